"""Overlapping experts of qwen3 (Q and K normalized in each head) as a Qwen3Moe."""

from __future__ import annotations

from transformers import PreTrainedConfig, Qwen3MoeConfig

from tomoe.exporting.stock.overlapping import Layout, Overlapping
from tomoe.exporting.stock.plain_decoder import Places, PlainDecoder, sliding_windows
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM


class Qwen3Moe(PlainDecoder[Layout], Overlapping):
    """One window for all layers, norms of heads, no biases."""

    name, about = "qwen3_moe", "Qwen3Moe"
    tried_with = ("4.57.1",)
    config_class = Qwen3MoeConfig
    places = Places(normed=True)

    def config(self, moe: ToMoEForCausalLM, layout: Layout) -> PreTrainedConfig:
        window = sliding_windows(moe)[0]
        return self.make_config(
            moe, moe_intermediate_size=layout.width, num_experts=moe.config.tomoe_num_experts, num_experts_per_tok=1,
            norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
            sliding_window=window, use_sliding_window=bool(window),
        )  # fmt: skip
