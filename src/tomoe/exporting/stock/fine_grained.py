"""Fine-grained experts as separate ones of a stock class: no neuron is copied.

All layers get one width, one shared part and one number of experts per token. A layer that uses fewer experts than another
gets experts of zeros, which its router always chooses.

Letters: N experts, w width of an expert, S shared neurons, D hidden size, F neurons of a layer, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tomoe.exporting.proof_by_parts import StockRouter, verify_by_parts
from tomoe.exporting.stock.carrier import Stock, padded
from tomoe.exporting.stock.overlapping import QWEN_PROJECTIONS, round_up
from tomoe.exporting.stock.routers import RouterForm, stored_router
from tomoe.exporting.target import Options, Sizes
from tomoe.exporting.verify import Check, Proof
from tomoe.model.hooks import hooked, input_of
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP
from tomoe.recipe.target_rules import FINE_MULTIPLE

# Tokens that the reach of a router is measured on.
PROBE_TOKENS = 256


@dataclass(frozen=True)
class FineLayout:
    """Sizes that every layer of the export has, but for the first ones, which may be whole.

    width: w; shared: of the shared expert, a multiple of w; experts: all that are stored; top_k: experts of a token, all of
    these counted; zeros: how many of them are of zeros in the layer that needs most, because it chooses fewest itself; whole:
    how many of the first layers use all experts, and are written as plain MLPs; always: how many experts hold the shared part,
    if there is no shared expert.
    """

    width: int
    shared: int
    experts: int
    top_k: int
    zeros: int
    whole: int
    always: int = 0


def fine_layout(moe: ToMoEForCausalLM, multiple: int | None = None, whole_layers: bool = True) -> FineLayout:
    """One width, shared part and k for all layers, the smallest that hold each of them; w is a multiple of `multiple`."""
    multiple = multiple or FINE_MULTIPLE
    every = moe.mlps()
    # engines want at least one layer with experts
    whole = 0
    while whole_layers and whole < len(every) - 1 and experts_per_token(every[whole]) == every[whole].num_experts:
        whole += 1
    mlps = every[whole:]
    width = round_up(max(mlp.expert_rows.shape[1] for mlp in mlps), multiple)
    shared = round_up(max(mlp.shared_size for mlp in mlps), width)
    chosen = [experts_per_token(mlp) for mlp in mlps]
    zeros = max(chosen) - min(chosen)
    # the stock router looks for the two best of a group
    return FineLayout(width, shared, max(2, mlps[0].num_experts + zeros), max(chosen), zeros, whole)


def without_shared_expert(layout: FineLayout) -> FineLayout:
    """The layout with the shared part in experts that are always chosen."""
    always = layout.shared // layout.width
    experts, top_k = layout.experts + always, layout.top_k + always
    return replace(layout, shared=0, experts=experts, top_k=top_k, always=always)


class FineGrained(Stock[FineLayout]):
    """A class with a place for fine-grained experts.

    form: of its routers; block, gate: names of a layer's MoE, and of the router in it; router_names: of its weight, and of its
    corrections if it has some, in a layer of the checkpoint; projections: of an expert's gate, up and down; shared: of the
    shared expert; shared_factor: what undoes how it is weighed; holds_shared: whether there is a place for a shared part;
    whole_layers: whether the first layers may be plain MLPs; float32_routers: whether routers are float32 in a checkpoint of
    any dtype.
    """

    experts_form = "fine"
    other_form = "its experts share neurons (experts.form = overlapping), and it has a place for fine-grained ones only"
    form: ClassVar[RouterForm]
    block: ClassVar[str] = "mlp"
    gate: ClassVar[str] = "gate"
    router_names: ClassVar[tuple[str, ...]] = ("mlp.gate.weight",)
    projections: ClassVar[tuple[str, str, str]] = QWEN_PROJECTIONS
    shared: ClassVar[str] = "shared_experts"
    shared_factor: ClassVar[float] = 1.0
    holds_shared: ClassVar[bool] = True
    whole_layers: ClassVar[bool] = True
    float32_routers: ClassVar[bool] = False
    how_well = "up to the rounding of its router"

    def form_in(self, dtype: torch.dtype) -> RouterForm:
        """The form of its routers in a checkpoint of this dtype."""
        return self.form

    def is_dialed(self, moe: ToMoEForCausalLM) -> bool:
        return not self.form_in(moe.dtype).normalized

    def layout_problem(self, moe: ToMoEForCausalLM) -> str | None:
        mlps, advice = moe.mlps(), f"convert with target = {self.name}"
        if moe.dtype == torch.float16 and not self.float32_routers:
            return "its weights are float16, which has no numbers as small as this class needs in a router"
        if not self.holds_shared and any(mlp.shared_size for mlp in mlps):
            return f"tokens share neurons, and this class has no place for them; {advice}"
        if self.form_in(moe.dtype).corrected:
            return None
        if any(not torch.equal(mlp.router.bias, mlp.router.bias[:1].expand_as(mlp.router.bias)) for mlp in mlps):
            return f"its routers have biases, and those of this class have none; {advice}"
        if len({mlp.top_k for mlp in mlps}) > 1:
            return f"its layers use different numbers of experts for a token, and this class has one; {advice}"
        return None

    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> FineLayout:
        layout = fine_layout(moe, multiple, self.whole_layers)
        return layout if self.holds_shared else replace(layout, shared=0)

    def router_tensors(self, weight: Float[Tensor, "n D"], corrections: Float[Tensor, " n"]) -> dict[str, Tensor]:
        """A layer's router by the names in the layer."""
        return dict(zip(self.router_names, (weight, corrections), strict=False))

    def mlp_tensors(self, moe: ToMoEForCausalLM, layout: FineLayout) -> Callable[[int], Iterable[tuple[str, Tensor]]]:
        form, mlps = self.form_in(moe.dtype), moe.mlps()
        scales = router_scales(moe, form)

        def of_layer(i: int) -> Iterator[tuple[str, Tensor]]:
            if i < layout.whole:
                yield from self._named("", whole_matrices(mlps[i]))
                return
            weight, corrections = router_tensors(mlps[i], layout, scales[i], form)
            weight = weight if self.float32_routers else weight.to(moe.dtype)
            yield from self.router_tensors(weight, corrections).items()
            yield from self.expert_tensors(mlps[i], layout)

        return of_layer

    def expert_tensors(self, mlp: ToMoEMLP, layout: FineLayout) -> Iterator[tuple[str, Tensor]]:
        """Shared and other experts of a layer, one after the other."""
        if layout.shared:
            yield from self._named(f"{self.shared}.", self.matrices(mlp, layout, None))
        for expert in range(layout.experts):
            yield from self._named(f"experts.{expert}.", self.matrices(mlp, layout, expert))

    def matrices(self, mlp: ToMoEMLP, layout: FineLayout, expert: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, up and down of an expert, or of the shared one if it is None, with what undoes its weight."""
        gate, up, down = expert_matrices(mlp, layout, expert)
        routed = layout.top_k if self.form_in(mlp.up_proj.dtype).normalized else 1
        return gate, up, down * (self.shared_factor if expert is None else routed)

    def _named(self, place: str, matrices: tuple[Tensor, Tensor, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, t in zip(self.projections, matrices, strict=True):
            yield f"{self.block}.{place}{name}.weight", t

    def bytes(self, moe: ToMoEForCausalLM, layout: FineLayout) -> int:
        routers = (len(moe.mlps()) - layout.whole) * layout.experts * moe.config.hidden_size
        wider = torch.float32.itemsize - moe.dtype.itemsize if self.float32_routers else 0
        return super().bytes(moe, layout) + routers * wider

    def describe(self, moe: ToMoEForCausalLM, layout: FineLayout) -> Sizes:
        return Sizes(self.bytes(moe, layout), layout_words(moe, layout), zeros=layout.zeros)

    def verify(self, folder: Path, out: Path, options: Options, check: Check) -> Proof:
        form = self.form_in(check.stored)
        return verify_by_parts(folder, out, check, partial(self.routers, form=form), self.use_all_experts_)

    def gates(self, exported: Any) -> dict[int, Any]:
        """The routers' modules in an export, as transformers loaded it, by number of the layer."""
        blocks = {i: getattr(layer, self.block) for i, layer in enumerate(exported.model.layers)}
        return {i: getattr(block, self.gate) for i, block in blocks.items() if hasattr(block, self.gate)}

    def experts(self, layer: Any) -> Any:
        """The experts' module in a layer of an export."""
        return getattr(layer, self.block).experts

    def routers(self, exported: Any, form: RouterForm) -> dict[int, StockRouter]:
        """What chooses experts in each layer of an export, by itself."""
        return {i: self.router(deepcopy(gate), form) for i, gate in self.gates(exported).items()}

    def router(self, gate: Any, form: RouterForm) -> StockRouter:
        """One router, as its module computes it."""

        def choose(x: Tensor) -> tuple[Tensor, Tensor]:
            _, weights, ids = gate(x)
            return ids, weights * (ids.shape[1] if form.normalized else 1)

        return StockRouter(form, choose, float(gate.weight.abs().amax()))

    @torch.no_grad()
    def use_all_experts_(self, exported: Any) -> Any:
        """Let tokens use all experts, with routers of zeros, whose weights are equal: then no router decides."""
        for i, gate in self.gates(exported).items():
            if self.form_in(exported.dtype).normalized:
                self.experts(exported.model.layers[i]).down_proj.mul_(gate.num_experts / gate.top_k)
            gate.weight.zero_()
            gate.top_k = gate.num_experts
        return exported


def experts_per_token(mlp: ToMoEMLP) -> int:
    """k of a layer with fine-grained experts."""
    assert mlp.top_k is not None
    return mlp.top_k


def layout_words(moe: ToMoEForCausalLM, layout: FineLayout) -> str:
    """The layout in words, "64 experts of 16 neurons, 16 for each token, and a shared one of 512 in each of 30 layers"."""
    zeros = f" ({layout.zeros} of zeros)" if layout.zeros else ""
    whole = f", {layout.whole} whole before them" if layout.whole else ""
    size = max(mlp.expert_rows.shape[1] for mlp in moe.mlps())
    filled = f" (filled up from {size:,})" if layout.width > size else ""
    shared = f", and a shared one of {layout.shared:,}" if layout.shared else ""
    always = f" ({layout.always} of them always, the shared part)" if layout.always else ""
    return (
        f"{layout.experts} experts{zeros} of {layout.width:,} neurons{filled}, {layout.top_k} for each token{always}{shared} "
        f"in each of {len(moe.mlps()) - layout.whole} layers{whole}"
    )


def router_scales(moe: ToMoEForCausalLM, form: RouterForm) -> list[float]:
    """eps of every layer, for the largest logit Z (without the bias) on some tokens of the vocabulary."""
    return [form.scale(largest) for largest in router_reach(moe)]


@torch.no_grad()
def router_reach(moe: ToMoEForCausalLM) -> list[float]:
    """The largest logit of each layer's router, without its bias, on some tokens of the vocabulary."""
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
    return reach


def router_tensors(
    mlp: ToMoEMLP, layout: FineLayout, eps: float, form: RouterForm
) -> tuple[Float[Tensor, "n D"], Float[Tensor, " n"]]:
    """u and c in float32. Behind the router's experts stand those of the shared part, and those of zeros, of which as many as
    are missing to k are chosen."""
    needed = layout.top_k - experts_per_token(mlp)
    others = layout.experts - mlp.num_experts
    return stored_router(form, mlp.router.weight, mlp.router.bias, eps, needed, others - needed)


def whole_matrices(mlp: ToMoEMLP) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up [F, D] and down [D, F] of all neurons."""
    assert mlp.gate_proj is not None
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj.t().contiguous()


def expert_matrices(mlp: ToMoEMLP, layout: FineLayout, expert: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up [w, D] and down [D, w] of an expert (zeros beyond the last), or of the shared one if it is None."""
    assert mlp.gate_proj is not None
    width = layout.shared if expert is None else layout.width
    if expert is None:
        rows = torch.arange(mlp.shared_size, device=mlp.up_proj.device)
    elif expert < mlp.num_experts:
        rows = mlp.expert_rows[expert].long()
    else:
        # the shared part comes first in the matrices, and is longer than the experts of zeros can claim
        first = (expert - mlp.num_experts) * layout.width
        last = min(first + layout.width, mlp.shared_size if layout.always else 0)
        rows = torch.arange(min(first, last), last, device=mlp.up_proj.device)
    gate, up = (padded(t[rows], width, 0) for t in (mlp.gate_proj, mlp.up_proj))
    return gate, up, padded(mlp.down_proj[rows].t(), width, 1)
