"""Fine-grained experts of cohere2 (Command R7B, A) as a Cohere2Moe: attention and MLP beside each other, scaled logits.

Weights are 1/k, so down projections are multiplied by k, and no other number of experts can be asked for at load time.
"""

from __future__ import annotations

from typing import Any

from transformers import Cohere2MoeConfig, PreTrainedConfig

from tomoe.exporting.stock.family_decoder import FamilyDecoder
from tomoe.exporting.stock.fine_grained import FineGrained, FineLayout
from tomoe.exporting.stock.routers import Softmax
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM


class Cohere2Moe(FamilyDecoder[FineLayout], FineGrained):
    """Every layer has experts. Experts are chosen by logits, which no softmax rounds, so Softmax's bounds hold."""

    name, about = "cohere2_moe", "Cohere2Moe"
    config_class = Cohere2MoeConfig
    families = ("cohere2",)
    form = Softmax()
    whole_layers = False

    def config(self, moe: ToMoEForCausalLM, layout: FineLayout) -> PreTrainedConfig:
        rope: dict[str, Any] = moe.config.rope_parameters
        return self.make_config(
            moe,
            head_dim=moe.model.layers[0].self_attn.head_dim,
            rope_theta=rope["rope_theta"],
            rope_parameters=rope,
            intermediate_size=layout.width,
            num_experts=layout.experts,
            num_experts_per_tok=layout.top_k,
            num_shared_experts=layout.shared // layout.width,
            shared_expert_combination_strategy="sum",
            expert_selection_fn="softmax",
            mlp_layer_types=["sparse"] * moe.config.num_hidden_layers,
        )
