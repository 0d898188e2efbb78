"""Overlapping experts of llama, mistral and alike as a Mixtral.

Neurons that experts share are copied, narrow experts get neurons of zeros. A token uses one expert, with the weight 1: the
stock router normalizes the weights of the chosen ones, which is one here.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tomoe.exporting.stock.carrier import Carrier, StockLayout, each, round_up
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.recipe.target_rules import STOCK_MULTIPLE


class Mixtral(Carrier):
    """All layers have experts of one width."""

    other_form = "its experts are fine-grained (experts.form = fine): a token uses several, each with the weight 1"
    how_well = "exactly"

    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> StockLayout:
        width = round_up(max(mlp.expert_rows.shape[1] for mlp in moe.mlps()), multiple or STOCK_MULTIPLE)
        return StockLayout(width, 0, moe.config.tomoe_num_experts, 1, 0, 0)

    def mlp_tensors(
        self, moe: ToMoEForCausalLM, i: int, layout: StockLayout, eps: float
    ) -> Iterator[tuple[str, Tensor]]:
        mlp = moe.mlps()[i]
        yield "block_sparse_moe.gate.weight", mlp.router.weight.to(mlp.up_proj.dtype)
        for n in range(layout.experts):
            names = each(f"block_sparse_moe.experts.{n}", ("w1", "w3", "w2"))
            yield from zip(names, self.matrices(mlp, layout, n), strict=True)
