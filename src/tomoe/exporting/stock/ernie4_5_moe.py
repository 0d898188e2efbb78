"""Fine-grained experts of ernie4_5 as an Ernie4_5_Moe, whose router is float32 and corrects the choice.

Weights are 1/k, so down projections are multiplied by k, and no other number of experts can be asked for at load time.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from transformers import Ernie4_5_MoeConfig, PreTrainedConfig, PreTrainedModel

from tomoe.exporting.stock.family_decoder import FamilyDecoder
from tomoe.exporting.stock.fine_grained import FineGrained, FineLayout
from tomoe.exporting.stock.routers import CorrectedSoftmax
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM


class Ernie4_5_Moe(FamilyDecoder[FineLayout], FineGrained):
    """The first layers may be plain MLPs. Its heads divide the hidden size."""

    name, about = "ernie4_5_moe", "Ernie4_5_Moe"
    config_class = Ernie4_5_MoeConfig
    families = ("ernie4_5",)
    form = CorrectedSoftmax()
    float32_routers = True

    def decoder_problem(self, moe: ToMoEForCausalLM) -> str | None:
        return super().decoder_problem(moe) or self._heads_problem(moe.config)

    def dense_decoder_problem(self, dense: PreTrainedModel) -> str | None:
        return super().dense_decoder_problem(dense) or self._heads_problem(dense.config)

    @staticmethod
    def _heads_problem(config: PreTrainedConfig) -> str | None:
        if config.head_dim * config.num_attention_heads == config.hidden_size:
            return None
        return (
            "its heads have another size than the hidden size divided by their number, which is all that this class has"
        )

    def config(self, moe: ToMoEForCausalLM, layout: FineLayout) -> PreTrainedConfig:
        return self.make_config(
            moe,
            intermediate_size=len(moe.mlps()[0].up_proj),
            moe_intermediate_size=layout.width,
            moe_num_experts=layout.experts,
            moe_k=layout.top_k,
            moe_num_shared_experts=layout.shared // layout.width,
            moe_layer_start_index=layout.whole,
            moe_layer_end_index=moe.config.num_hidden_layers - 1,
            moe_layer_interval=1,
        )

    def router_tensors(self, weight: Float[Tensor, "n D"], corrections: Float[Tensor, " n"]) -> dict[str, Tensor]:
        return {"mlp.gate.weight": weight, "mlp.moe_statics.e_score_correction_bias": corrections[None]}
