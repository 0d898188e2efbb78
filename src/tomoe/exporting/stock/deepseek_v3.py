"""Fine-grained experts of youtu as a DeepseekV3, which has the same latent attention (MLA)."""

from __future__ import annotations

from transformers import DeepseekV3Config, PreTrainedConfig

from tomoe.exporting.stock.family_decoder import FamilyDecoder
from tomoe.exporting.stock.fine_grained import FineGrained, FineLayout
from tomoe.exporting.stock.routers import Sigmoid
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM


class DeepseekV3(FamilyDecoder[FineLayout], FineGrained):
    """The first layers may be plain MLPs."""

    name, about = "deepseek_v3", "DeepseekV3"
    config_class = DeepseekV3Config
    families = ("youtu",)
    form = Sigmoid()
    router_names = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
    float32_routers = True

    def config(self, moe: ToMoEForCausalLM, layout: FineLayout) -> PreTrainedConfig:
        return self.make_config(
            moe,
            intermediate_size=len(moe.mlps()[0].up_proj),
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
