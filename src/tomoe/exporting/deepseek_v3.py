"""Fine-grained experts of youtu as a DeepseekV3, which has the same latent attention (MLA)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from transformers import DeepseekV3Config, PreTrainedConfig

from tomoe.exporting.family_decoder import FamilyDecoder
from tomoe.exporting.fine_grained import FineGrained, FineLayout
from tomoe.exporting.routers import Sigmoid
from tomoe.exporting.stock import expert_mlps
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM


class DeepseekV3(FamilyDecoder[FineLayout], FineGrained):
    """The first layers may be plain MLPs."""

    name, about = "deepseek_v3", "DeepseekV3"
    config_class = DeepseekV3Config
    families = ("youtu",)
    form = Sigmoid()
    float32_routers = True

    def config(self, moe: ToMoEForCausalLM, layout: FineLayout) -> PreTrainedConfig:
        return self.make_config(
            moe,
            intermediate_size=len(expert_mlps(moe)[0].up_proj),
            moe_intermediate_size=layout.width,
            n_routed_experts=layout.experts,
            num_experts_per_tok=layout.top_k,
            n_shared_experts=layout.shared // layout.width,
            first_k_dense_replace=layout.whole,
            norm_topk_prob=False,
            routed_scaling_factor=2.0,
            n_group=1,
            topk_group=1,
            # transformers always corrects the choice, vLLM only where this says so
            topk_method="noaux_tc",
        )

    def router_tensors(self, weight: Float[Tensor, "n D"], corrections: Float[Tensor, " n"]) -> dict[str, Tensor]:
        return {"mlp.gate.weight": weight, "mlp.gate.e_score_correction_bias": corrections}
