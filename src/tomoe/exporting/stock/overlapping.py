"""Overlapping experts as separate ones: neurons that experts share are copied, narrow experts get neurons of zeros.

A token uses one expert, with the weight 1: the stock routers normalize the weights of the chosen ones, which is one here.

Letters: N experts, M width of an expert, S width of the shared expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from tomoe.exporting.stock.carrier import Stock, padded
from tomoe.exporting.target import Options, Sizes
from tomoe.exporting.verify import Check, Proof, verify_exactly
from tomoe.model.shape import ceil_div
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP
from tomoe.recipe.target_rules import STOCK_MULTIPLE

QWEN_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Layout:
    """Widths that every layer of the export has: M, and S (0 without a shared expert)."""

    width: int
    shared: int = 0


class Overlapping(Stock[Layout]):
    """A class with a place for overlapping experts.

    block: of a layer's MoE in a checkpoint; projections: of an expert's gate, up and down there.
    """

    experts_form = "overlapping"
    other_form = "its experts are fine-grained (experts.form = fine): a token uses several, each with the weight 1"
    block: ClassVar[str] = "mlp"
    projections: ClassVar[tuple[str, str, str]] = QWEN_PROJECTIONS

    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> Layout:
        return widest(moe, multiple)

    def mlp_tensors(self, moe: ToMoEForCausalLM, layout: Layout) -> Callable[[int], Iterable[tuple[str, Tensor]]]:
        def of_layer(i: int) -> Iterable[tuple[str, Tensor]]:
            tensors = expert_tensors(moe.model.layers[i].mlp, layout, self.projections)
            return [(f"{self.block}.{name}", t) for name, t in tensors.items()]

        return of_layer

    def describe(self, moe: ToMoEForCausalLM, layout: Layout) -> Sizes:
        shared = f" and a shared one of {layout.shared:,}" if layout.shared else ""
        number, layers = moe.config.tomoe_num_experts, len(moe.model.layers)
        words = f"{number} experts of {layout.width:,} neurons{shared} in each of {layers} layers"
        return Sizes(self.bytes(moe, layout), words, has_copies(moe, layout))

    def verify(self, folder: Path, out: Path, options: Options, check: Check) -> Proof:
        return verify_exactly(folder, out, check)


def common_neurons(mlp: ToMoEMLP) -> Tensor:
    """Rows that belong to every expert, ascending."""
    uses = torch.bincount(mlp.expert_rows.flatten().long(), minlength=mlp.up_proj.shape[0])
    return (uses == mlp.num_experts).nonzero().squeeze(1)


def round_up(size: int, multiple: int) -> int:
    """The next multiple, and one at least."""
    return max(multiple, ceil_div(size, multiple) * multiple)


def widest(moe: ToMoEForCausalLM, multiple: int | None) -> Layout:
    """The width that holds the experts of all layers."""
    width = max(layer.mlp.expert_rows.shape[1] for layer in moe.model.layers)
    return Layout(round_up(width, multiple or STOCK_MULTIPLE))


def has_copies(moe: ToMoEForCausalLM, layout: Layout) -> bool:
    """Whether neurons are stored more than once, or experts are padded."""
    return moe.config.tomoe_num_experts * layout.width + layout.shared > min(moe.config.tomoe_union_sizes)


def expert_tensors(mlp: ToMoEMLP, layout: Layout, names: tuple[str, str, str]) -> dict[str, Tensor]:
    """A copy of its neurons for every expert; what all experts have goes to the shared expert, as far as that is wide.

    The shared expert's output is multiplied by sigmoid(gate x). A gate of zeros makes that exactly 1/2 for every token,
    and down weights that are doubled undo it exactly: powers of two round nothing.
    """
    assert mlp.gate_proj is not None
    shared = common_neurons(mlp)[: layout.shared]
    inside = torch.zeros(mlp.up_proj.shape[0], dtype=torch.bool, device=shared.device)
    inside[shared] = True

    def matrices(rows: Tensor, width: int, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        assert mlp.gate_proj is not None
        gate, up = (padded(t[rows], width, 0) for t in (mlp.gate_proj, mlp.up_proj))
        return gate, up, padded(factor * mlp.down_proj[rows].t(), width, 1)

    tensors: dict[str, Tensor] = {"gate.weight": mlp.router.weight.to(mlp.up_proj.dtype)}
    for n, rows in enumerate(mlp.expert_rows.long()):
        expert = matrices(rows[~inside[rows]], layout.width)
        tensors |= {f"experts.{n}.{name}.weight": t for name, t in zip(names, expert, strict=True)}
    if layout.shared:
        expert = matrices(shared, layout.shared, 2.0)
        tensors |= {f"shared_expert.{name}.weight": t for name, t in zip(names, expert, strict=True)}
        tensors["shared_expert_gate.weight"] = mlp.up_proj.new_zeros(1, mlp.up_proj.shape[1])
    return tensors
