"""Fine-grained experts as a Glm4Moe, which transformers, vLLM and llama.cpp know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import Glm4MoeConfig, PreTrainedConfig

from tomoe.exporting.stock.fine_grained import FineGrained, FineLayout
from tomoe.exporting.stock.plain_decoder import Places, PlainDecoder
from tomoe.exporting.stock.routers import Sigmoid
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM

# Undoes the 1/2 that a sigmoid has at 0.
ROUTED_SCALE = 2.0


class Glm4Moe(PlainDecoder[FineLayout], FineGrained):
    """Biases, norms of heads if the config says so, no windows. The first layers may be plain MLPs."""

    name, about = "glm4_moe", "Glm4Moe"
    tried_with = ("4.57.1",)
    config_class = Glm4MoeConfig
    places = Places(biased=True, normed=None, windows="no layer", silu_only=True)
    form = Sigmoid()
    router_names = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
    float32_routers = True

    def config(self, moe: ToMoEForCausalLM, layout: FineLayout) -> PreTrainedConfig:
        """Output matrices are never tied: vLLM's class does not tie them."""
        attention: Any = moe.model.layers[0].self_attn
        return self.make_config(
            moe,
            rope_parameters=dict(moe.config.rope_parameters) | {"partial_rotary_factor": 1.0},
            tie_word_embeddings=False,
            attention_bias=attention.q_proj.bias is not None,
            use_qk_norm=getattr(attention, "q_norm", None) is not None,
            n_routed_experts=layout.experts,
            num_experts_per_tok=layout.top_k,
            n_shared_experts=layout.shared // layout.width,
            moe_intermediate_size=layout.width,
            routed_scaling_factor=ROUTED_SCALE,
            norm_topk_prob=False,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=layout.whole,
            num_nextn_predict_layers=0,
        )

    def output_tensors(self, moe: ToMoEForCausalLM) -> Iterator[tuple[str, Tensor]]:
        # a tensor of its own: two names of one are refused by safetensors
        yield "lm_head.weight", moe.lm_head.weight.clone()
