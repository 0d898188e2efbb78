"""Fine-grained experts of olmo2 as a FlexOlmo, which has the same norms behind attention and MLP.

Weights are 1/k, so down projections are multiplied by k, and no other number of experts can be asked for at load time.
"""

from __future__ import annotations

from transformers import FlexOlmoConfig, PreTrainedConfig

from tomoe.exporting.stock.family_decoder import FamilyDecoder
from tomoe.exporting.stock.fine_grained import FineGrained, FineLayout
from tomoe.exporting.stock.routers import Softmax
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM


class FlexOlmo(FamilyDecoder[FineLayout], FineGrained):
    """Every layer has experts, and none a shared part."""

    name, about = "flex_olmo", "FlexOlmo"
    config_class = FlexOlmoConfig
    families = ("olmo2",)
    form = Softmax()
    holds_shared = False
    whole_layers = False

    def config(self, moe: ToMoEForCausalLM, layout: FineLayout) -> PreTrainedConfig:
        return self.make_config(
            moe,
            intermediate_size=layout.width,
            num_experts=layout.experts,
            num_experts_per_tok=layout.top_k,
            norm_topk_prob=True,
        )
