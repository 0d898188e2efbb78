"""Overlapping experts of llama, mistral and alike as a Mixtral.

Neurons that experts share are copied, narrow experts get neurons of zeros. A token uses one expert, with the weight 1: the
stock router normalizes the weights of the chosen ones, which is one here.

Letters: N experts, M width of an expert, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from tomoe.exporting.stock.carrier import Carrier, each, padded, round_up
from tomoe.exporting.target import Options, Sizes
from tomoe.exporting.verify import Check, Proof, verify_exactly
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP
from tomoe.recipe.target_rules import STOCK_MULTIPLE


class Mixtral(Carrier[int]):
    """Its layout is M, which every layer has."""

    other_form = "its experts are fine-grained (experts.form = fine): a token uses several, each with the weight 1"
    how_well = "exactly"

    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> int:
        return widest(moe, multiple)

    def mlp_tensors(self, moe: ToMoEForCausalLM, layout: int) -> Callable[[int], Iterable[tuple[str, Tensor]]]:
        def of_layer(i: int) -> Iterable[tuple[str, Tensor]]:
            mlp = moe.model.layers[i].mlp
            yield "block_sparse_moe.gate.weight", mlp.router.weight.to(mlp.up_proj.dtype)
            for n in range(mlp.num_experts):
                names = each(f"block_sparse_moe.experts.{n}", ("w1", "w3", "w2"))
                yield from zip(names, copied_expert(mlp, layout, n), strict=True)

        return of_layer

    def sizes(self, moe: ToMoEForCausalLM, options: Options) -> Sizes:
        width = self.layout(moe, options.width_multiple)
        words = f"{moe.config.tomoe_num_experts} experts of {width:,} neurons in each of {len(moe.model.layers)} layers"
        return Sizes(self.bytes(moe, width), words, has_copies(moe, width))

    def verify(self, folder: Path, out: Path, options: Options, check: Check) -> Proof:
        return verify_exactly(folder, out, check)


def widest(moe: ToMoEForCausalLM, multiple: int | None) -> int:
    """The width that holds the experts of all layers."""
    width = max(layer.mlp.expert_rows.shape[1] for layer in moe.model.layers)
    return round_up(width, multiple or STOCK_MULTIPLE)


def has_copies(moe: ToMoEForCausalLM, width: int) -> bool:
    """Whether neurons are stored more than once, or experts are padded."""
    return bool(moe.config.tomoe_num_experts * width > min(moe.config.tomoe_union_sizes))


def copied_expert(mlp: ToMoEMLP, width: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up [M, D] and down [D, M] of an expert, with a copy of its neurons."""
    assert mlp.gate_proj is not None
    rows = mlp.expert_rows[expert].long()
    gate, up = (padded(t[rows], width, 0) for t in (mlp.gate_proj, mlp.up_proj))
    return gate, up, padded(mlp.down_proj[rows].t(), width, 1)
