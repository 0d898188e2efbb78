"""Fine-grained experts as separate ones of a stock class: no neuron is copied.

All layers get one width, one shared part and one number of experts per token. A layer that uses fewer experts than another
gets experts of zeros, which its router always chooses.

Letters: N experts, w width of an expert, S shared neurons, D hidden size, F neurons of a layer, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tomoe.exporting.stock.architecture import StockArch, StockLayout, each, round_up
from tomoe.exporting.stock.routers import FIRST, LAST, HalfPrecisionSigmoid, RouterForm
from tomoe.exporting.target import Options
from tomoe.exporting.verify import Check, Proof, StockRouter, verify_by_parts
from tomoe.model.hooks import hooked, input_of
from tomoe.model.layerwise import held
from tomoe.model.offload import change_
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP
from tomoe.recipe.target_rules import FINE_MULTIPLE

PROBE_TOKENS = 256  # tokens that the reach of a router is measured on


@dataclass(eq=False, kw_only=True)
class FineGrained(StockArch):
    """A stock class that supports fine-grained experts.

    form: of its routers; coarse_scores: whether transformers makes their scores in the dtype of the model; float32_routers:
    whether they are float32 in a checkpoint of any dtype. block, gate: names of a layer's MoE, and of the router in it.

    Names of tensors in a layer: router: its weight, and its corrections if it has some; experts, shared, dense_mlp: gate, up and
    down of an expert by its number, of the shared expert, and of a layer without experts; where there are two names, the first
    holds gate and up, one behind the other, and without a place for the number they hold all experts. shared_gate: what the
    output of the shared expert is multiplied by the sigmoid of.
    """

    form: RouterForm
    coarse_scores: bool = False
    float32_routers: bool = False
    block: str = "mlp"
    gate: str = "gate"
    router: tuple[str, ...] = ("mlp.gate.weight",)
    experts: tuple[str, ...] = each("mlp.experts.{}")
    shared: tuple[str, ...] = each("mlp.shared_experts")
    shared_gate: str | None = None
    dense_mlp: tuple[str, ...] = each("mlp")
    other_form = (
        "its experts share neurons (experts.form = overlapping), and this class supports fine-grained experts only"
    )
    how_well = "up to the rounding of its router"

    def form_in(self, dtype: torch.dtype) -> RouterForm:
        """Return the form of its routers in a checkpoint of this dtype."""
        return HalfPrecisionSigmoid(dtype) if self.coarse_scores and dtype != torch.float32 else self.form

    def layout_problem(self, moe: ToMoEForCausalLM) -> str | None:
        mlps = moe.mlps()
        advice = f"convert with target = {self.name}"
        if moe.dtype == torch.float16 and not self.float32_routers:
            return "its weights are float16, which has no numbers as small as this class needs in a router"
        if not self.rules.holds_shared and any(mlp.shared_size for mlp in mlps):
            return f"tokens share neurons, and this class has no shared part; {advice}"
        if self.form.corrected:
            return None
        if any(not torch.equal(mlp.router.bias, mlp.router.bias[:1].expand_as(mlp.router.bias)) for mlp in mlps):
            return f"its routers have biases, and those of this class have none; {advice}"
        if len({mlp.top_k for mlp in mlps}) > 1:
            return f"its layers use different numbers of experts for a token, and this class has one; {advice}"
        return None

    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> StockLayout:
        """Return the smallest sizes that hold each layer; widths are multiples of `multiple`."""
        mlps = moe.mlps()
        # engines want at least one layer with experts
        dense_layers = 0
        while self.rules.dense_layers and len(mlps) > 1 and experts_per_token(mlps[0]) == mlps[0].num_experts:
            dense_layers, mlps = dense_layers + 1, mlps[1:]
        width = round_up(max(mlp.expert_rows.shape[1] for mlp in mlps), multiple or FINE_MULTIPLE)
        shared = round_up(max(mlp.shared_size for mlp in mlps), width)
        chosen = [experts_per_token(mlp) for mlp in mlps]
        zeros = max(chosen) - min(chosen)
        # the stock router looks for the two best of a group
        layout = StockLayout(width, shared, max(2, mlps[0].num_experts + zeros), max(chosen), zeros, dense_layers)
        if self.rules.shared_in_experts:
            always = layout.shared // layout.width
            experts, top_k = layout.experts + always, layout.top_k + always
            return replace(layout, shared=0, experts=experts, top_k=top_k, always=always)
        return layout if self.rules.holds_shared else replace(layout, shared=0)

    def scales(self, moe: ToMoEForCausalLM) -> list[float]:
        return router_scales(moe, self.form_in(moe.dtype))

    def mlp_tensors(
        self, moe: ToMoEForCausalLM, i: int, layout: StockLayout, eps: float
    ) -> Iterator[tuple[str, Tensor]]:
        mlp = moe.mlps()[i]
        if i < layout.dense_layers:
            yield from named(self.dense_mlp, dense_matrices(mlp))
            return
        weight, corrections = router_tensors(mlp, layout, eps, self.form_in(moe.dtype))
        weight = weight if self.float32_routers else weight.to(moe.dtype)
        yield from zip(self.router, (weight, corrections), strict=False)
        if self.shared_gate:
            yield self.shared_gate, mlp.up_proj.new_zeros(1, mlp.up_proj.shape[1])
        if layout.shared:
            yield from named(self.shared, self.matrices(mlp, layout, None))
        experts = (self.matrices(mlp, layout, expert) for expert in range(layout.experts))
        if len(self.experts) == 2:
            gate, up, down = (torch.stack(part) for part in zip(*experts, strict=True))
            yield from named(self.experts, (gate, up, down))
            return
        for n, matrices in enumerate(experts):
            yield from named([name.format(n) for name in self.experts], matrices)

    def matrices(self, mlp: ToMoEMLP, layout: StockLayout, expert: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """As for all stock classes; a gate of zeros makes the shared expert's sigmoid 1/2, undone exactly by a power of two."""
        gate, up, down = super().matrices(mlp, layout, expert)
        shared = 2 if self.shared_gate else 1
        routed = layout.top_k if self.form.normalized else 1
        return gate, up, down * (shared if expert is None else routed)

    def bytes(self, moe: ToMoEForCausalLM, layout: StockLayout) -> int:
        routers = (len(moe.mlps()) - layout.dense_layers) * layout.experts * moe.config.hidden_size
        wider = torch.float32.itemsize - moe.dtype.itemsize if self.float32_routers else 0
        return super().bytes(moe, layout) + routers * wider

    def verify(self, folder: Path, out: Path, options: Options, check: Check) -> Proof:
        form = self.form_in(check.stored)
        return verify_by_parts(folder, out, check, partial(self.routers, form=form), self.use_all_experts_)

    def gates(self, exported: Any) -> dict[int, Any]:
        """Return the router modules in an export, as transformers loaded it, by layer number."""
        blocks = {i: getattr(layer, self.block) for i, layer in enumerate(exported.model.layers)}
        return {i: getattr(block, self.gate) for i, block in blocks.items() if hasattr(block, self.gate)}

    def routers(self, exported: Any, form: RouterForm) -> dict[int, StockRouter]:
        """Return the routers of an export, layer by layer, to run by themselves."""
        found = {}
        for i, gate in self.gates(exported).items():
            layer = exported.model.layers[i]
            with held(layer):
                found[i] = self.stock_router(layer, deepcopy(gate), form)
        return found

    def stock_router(self, layer: Any, gate: Any, form: RouterForm) -> StockRouter:
        """Return the router of a layer, as its module computes it."""
        # LFM2's stands beside the router, which is handed it
        bias = getattr(getattr(layer, self.block), "expert_bias", None)
        corrections = () if bias is None else (bias.clone(),)

        def choose(x: Tensor) -> tuple[Tensor, Tensor]:
            _, weights, ids = gate(x, *corrections)
            return ids, weights * (ids.shape[1] if form.normalized else 1)

        return StockRouter(form, choose, float(gate.weight.abs().amax()))

    @torch.no_grad()
    def use_all_experts_(self, exported: Any) -> Any:
        """Make tokens use all experts, with routers of zeros, whose weights are equal: then routing does not matter."""
        for i, gate in self.gates(exported).items():
            layer = exported.model.layers[i]
            if self.form.normalized:
                experts, factor = getattr(layer, self.block).experts, gate.num_experts / gate.top_k
                change_(layer, experts.down_proj, partial(torch.mul, other=factor))
            change_(layer, gate.weight, torch.zeros_like)
            gate.top_k = gate.num_experts
        return exported


def named(names: Sequence[str], matrices: tuple[Tensor, Tensor, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Pair gate, up and down with their three names, or with two if the first tensor holds gate and up."""
    gate, up, down = matrices
    return zip(names, matrices if len(names) == 3 else (torch.cat([gate, up], -2), down), strict=True)


def experts_per_token(mlp: ToMoEMLP) -> int:
    """Return k of a layer with fine-grained experts."""
    assert mlp.top_k is not None
    return mlp.top_k


@torch.no_grad()
def router_scales(moe: ToMoEForCausalLM, form: RouterForm) -> list[float]:
    """Return eps of every layer, for the largest logit Z (without the bias) on some tokens of the vocabulary."""
    mlps = moe.mlps()
    reach = [0.0] * len(mlps)

    def note(i: int, mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(mlp, ToMoEMLP)
        x = input_of(args, kwargs).flatten(0, -2).float()
        reach[i] = max(reach[i], float((x @ mlp.router.weight.float().t()).abs().max()))

    tokens = min(PROBE_TOKENS, int(moe.config.max_position_embeddings))
    ids = torch.linspace(0, moe.config.vocab_size - 1, tokens, device=moe.device).long()
    # in an order in which neighbors differ
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)).to(ids.device)
    with hooked(mlp.register_forward_pre_hook(partial(note, i), with_kwargs=True) for i, mlp in enumerate(mlps)):
        moe(ids[order][None], use_cache=False)
    return [form.scale(largest) for largest in reach]


def router_tensors(
    mlp: ToMoEMLP, layout: StockLayout, eps: float, form: RouterForm
) -> tuple[Float[Tensor, "n D"], Float[Tensor, " n"]]:
    """Return u and c in float32. The router's own experts are followed by those of the shared part and of zeros: as many of these
    as are missing to k are always chosen, the others never."""
    weight, bias = mlp.router.weight.float(), mlp.router.bias.float()
    first = layout.top_k - experts_per_token(mlp)
    last = layout.experts - mlp.num_experts - first
    zeros = weight.new_zeros(first + last, weight.shape[1])
    always = bias.new_tensor([FIRST] * first + [LAST] * last)
    return torch.cat([eps * weight, zeros]), torch.cat([form.corrections(bias, eps), always])


def dense_matrices(mlp: ToMoEMLP) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate, up [F, D] and down [D, F] of all neurons."""
    assert mlp.gate_proj is not None
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj.t().contiguous()
