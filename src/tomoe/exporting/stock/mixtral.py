"""Overlapping experts of llama, mistral and alike as a Mixtral."""

from __future__ import annotations

from transformers import MixtralConfig, PreTrainedConfig

from tomoe.exporting.stock.overlapping import Layout, Overlapping
from tomoe.exporting.stock.plain_decoder import Places, PlainDecoder, sliding_windows
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM


class Mixtral(PlainDecoder[Layout], Overlapping):
    """One window for all layers, no biases, no norms of heads."""

    name, about = "mixtral", "Mixtral"
    tried_with = ("4.57.1",)
    config_class = MixtralConfig
    places = Places()
    block, projections = "block_sparse_moe", ("w1", "w3", "w2")

    def config(self, moe: ToMoEForCausalLM, layout: Layout) -> PreTrainedConfig:
        return self.make_config(
            moe, intermediate_size=layout.width, num_local_experts=moe.config.tomoe_num_experts, num_experts_per_tok=1,
            sliding_window=sliding_windows(moe)[0],
        )  # fmt: skip
