"""Fine-grained experts as separate ones of a stock class: no neuron is copied.

All layers get one width, one shared part and one number of experts per token. A layer that uses fewer experts than another
gets experts of zeros, which its router always chooses.

Letters: N experts, w width of an expert, S shared neurons, D hidden size, F neurons of a layer, k experts of a token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tomoe.exporting.overlapping import QWEN_PROJECTIONS
from tomoe.exporting.proof_by_parts import StockRouter, verify_by_parts
from tomoe.exporting.routers import RouterForm, stored_router
from tomoe.exporting.stock import Stock, expert_mlps, padded
from tomoe.exporting.target import Options, Sizes
from tomoe.exporting.verification import Check, Proof
from tomoe.model.hooks import hooked, input_of
from tomoe.model.shape import ceil_div
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP
from tomoe.recipe.target_rules import FINE_MULTIPLE

# Tokens that the reach of a router is measured on.
PROBE_TOKENS = 256
OVERLAPPING_PROBLEM = (
    "its experts share neurons (experts.form = overlapping), and it has a place for fine-grained ones only"
)


@dataclass(frozen=True)
class FineLayout:
    """Sizes that every layer of the export has, but for the first ones, which may be whole.

    width: w; shared: of the shared expert, a multiple of w; experts: N and those of zeros; top_k: experts of a token, those
    of zeros included; zeros: how many of them are of zeros in the layer that needs most, because it chooses fewest itself;
    whole: how many of the first layers use all experts, and are written as plain MLPs.
    """

    width: int
    shared: int
    experts: int
    top_k: int
    zeros: int
    whole: int


def fine_layout(moe: ToMoEForCausalLM, multiple: int | None = None) -> FineLayout:
    """One width, shared part and k for all layers, the smallest that hold each of them; w is a multiple of `multiple`."""
    multiple = multiple or FINE_MULTIPLE
    every = expert_mlps(moe)
    # engines want at least one layer with experts
    whole = 0
    while whole < len(every) - 1 and experts_per_token(every[whole]) == every[whole].num_experts:
        whole += 1
    mlps = every[whole:]
    width = ceil_div(max(mlp.expert_rows.shape[1] for mlp in mlps), multiple) * multiple
    shared = max(1, ceil_div(max(mlp.shared_size for mlp in mlps), width)) * width
    chosen = [experts_per_token(mlp) for mlp in mlps]
    zeros = max(chosen) - min(chosen)
    # the stock router looks for the two best of a group
    return FineLayout(width, shared, max(2, mlps[0].num_experts + zeros), max(chosen), zeros, whole)


class FineGrained(Stock[FineLayout]):
    """A class with a place for fine-grained experts.

    form: of its routers; block, gate: names of a layer's MoE, and of the router in it; projections: of an expert's gate, up and
    down; shared: of the shared expert; float32_routers: whether routers are float32 in a checkpoint of any dtype.
    """

    form: ClassVar[RouterForm]
    block: ClassVar[str] = "mlp"
    gate: ClassVar[str] = "gate"
    projections: ClassVar[tuple[str, str, str]] = QWEN_PROJECTIONS
    shared: ClassVar[str] = "shared_experts"
    float32_routers: ClassVar[bool] = False
    how_well = "up to the rounding of its router"

    def form_problem(self, form: str) -> str | None:
        return None if form == "fine" else OVERLAPPING_PROBLEM

    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> FineLayout:
        return fine_layout(moe, multiple)

    @abstractmethod
    def router_tensors(self, weight: Float[Tensor, "n D"], corrections: Float[Tensor, " n"]) -> dict[str, Tensor]:
        """A layer's router by the names in its MoE."""

    def mlp_tensors(self, moe: ToMoEForCausalLM, layout: FineLayout) -> Callable[[int], Iterable[tuple[str, Tensor]]]:
        scales = router_scales(moe, self.form)

        def of_layer(i: int) -> Iterator[tuple[str, Tensor]]:
            mlp = expert_mlps(moe)[i]
            if i < layout.whole:
                yield from self._named("", whole_matrices(mlp))
                return
            for name, t in self.router_tensors(*router_tensors(mlp, layout, scales[i], self.form)).items():
                yield f"{self.block}.{name}", t
            yield from self._named(f"{self.shared}.", expert_matrices(mlp, layout, None))
            for expert in range(layout.experts):
                yield from self._named(f"experts.{expert}.", expert_matrices(mlp, layout, expert))

        return of_layer

    def _named(self, place: str, matrices: tuple[Tensor, Tensor, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, t in zip(self.projections, matrices, strict=True):
            yield f"{self.block}.{place}{name}.weight", t

    def bytes(self, moe: ToMoEForCausalLM, layout: FineLayout) -> int:
        routers = (len(expert_mlps(moe)) - layout.whole) * layout.experts * moe.config.hidden_size
        wider = torch.float32.itemsize - moe.dtype.itemsize if self.float32_routers else 0
        return super().bytes(moe, layout) + routers * wider

    def describe(self, moe: ToMoEForCausalLM, layout: FineLayout) -> Sizes:
        return Sizes(self.bytes(moe, layout), layout_words(moe, layout), zeros=layout.zeros)

    def verify(self, folder: Path, out: Path, options: Options, check: Check) -> Proof:
        return verify_by_parts(folder, out, check, self.routers, self.use_all_experts_)

    def gates(self, exported: Any) -> dict[int, Any]:
        """The routers' modules in an export, as transformers loaded it, by number of the layer."""
        blocks = {i: getattr(layer, self.block) for i, layer in enumerate(exported.model.layers)}
        return {i: getattr(block, self.gate) for i, block in blocks.items() if hasattr(block, self.gate)}

    def routers(self, exported: Any) -> dict[int, StockRouter]:
        """What chooses experts in each layer of an export, by itself."""
        return {i: self.router(deepcopy(gate)) for i, gate in self.gates(exported).items()}

    def router(self, gate: Any) -> StockRouter:
        """One router, as its module computes it."""

        def choose(x: Tensor) -> tuple[Tensor, Tensor]:
            _, weights, ids = gate(x)
            return ids, weights

        return StockRouter(self.form, choose, float(gate.weight.abs().amax()))

    def use_all_experts_(self, exported: Any) -> Any:
        """Let tokens use all experts, with routers of zeros, whose weights are equal: then no router decides."""
        for gate in self.gates(exported).values():
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
    size = max(mlp.expert_rows.shape[1] for mlp in (layer.mlp for layer in moe.model.layers))
    filled = f" (filled up from {size:,})" if layout.width > size else ""
    return (
        f"{layout.experts} experts{zeros} of {layout.width:,} neurons{filled}, {layout.top_k} for each token, and a shared one "
        f"of {layout.shared:,} in each of {len(moe.model.layers) - layout.whole} layers{whole}"
    )


def router_scales(moe: ToMoEForCausalLM, form: RouterForm) -> list[float]:
    """eps of every layer, for the largest logit Z (without the bias) on some tokens of the vocabulary."""
    return [form.scale(largest) for largest in router_reach(moe)]


@torch.no_grad()
def router_reach(moe: ToMoEForCausalLM) -> list[float]:
    """The largest logit of each layer's router, without its bias, on some tokens of the vocabulary."""
    reach = [0.0] * len(moe.model.layers)

    def note(i: int, mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(mlp, ToMoEMLP)
        x = input_of(args, kwargs).flatten(0, -2).float()
        reach[i] = max(reach[i], float((x @ mlp.router.weight.float().t()).abs().max()))

    tokens = min(PROBE_TOKENS, int(moe.config.max_position_embeddings))
    ids = torch.linspace(0, moe.config.vocab_size - 1, tokens, device=moe.device).long()
    # in an order in which neighbors differ
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)).to(ids.device)
    with hooked(
        layer.mlp.register_forward_pre_hook(partial(note, i), with_kwargs=True)
        for i, layer in enumerate(moe.model.layers)
    ):
        moe(ids[order][None], use_cache=False)
    return reach


def router_tensors(
    mlp: ToMoEMLP, layout: FineLayout, eps: float, form: RouterForm
) -> tuple[Float[Tensor, "n D"], Float[Tensor, " n"]]:
    """u and c in float32, those of experts of zeros behind the others: as many as are missing to k come first."""
    needed = layout.top_k - experts_per_token(mlp)
    fillers = layout.experts - mlp.num_experts
    return stored_router(form, mlp.router.weight, mlp.router.bias, eps, needed, fillers - needed)


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
    else:
        rows = mlp.expert_rows[expert : expert + 1].flatten().long()
    gate, up = (padded(t[rows], width, 0) for t in (mlp.gate_proj, mlp.up_proj))
    return gate, up, padded(mlp.down_proj[rows].t(), width, 1)
