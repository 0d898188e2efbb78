"""Overlapping experts of qwen2, llama, mistral and alike as a Qwen2Moe, whose shared expert holds what all experts have.

It always has biases of Q, K and V, zeros if the model has none: vLLM does not fill those that a file leaves out.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen2MoeConfig

from tomoe.exporting.stock.overlapping import Layout, Overlapping, common_neurons, round_up
from tomoe.exporting.stock.plain_decoder import Places, PlainDecoder, attention_tensors, sliding_windows
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP
from tomoe.recipe.target_rules import STOCK_MULTIPLE


class Qwen2Moe(PlainDecoder[Layout], Overlapping):
    """Windows in some layers, biases, a shared expert, no norms of heads."""

    name, about = "qwen2_moe", "Qwen2Moe"
    tried_with = ("4.57.1",)
    config_class = Qwen2MoeConfig
    places = Places(biased=True, windows="some layers")

    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> Layout:
        """The widths that take the fewest weights: what every expert has, a shared expert stores once instead of N times."""
        mlps: list[ToMoEMLP] = [layer.mlp for layer in moe.model.layers]
        widths = [mlp.expert_rows.shape[1] for mlp in mlps]
        common = [len(common_neurons(mlp)) for mlp in mlps]
        step = multiple or STOCK_MULTIPLE
        choices = [
            Layout(round_up(max(w - min(c, shared) for w, c in zip(widths, common, strict=True)), step), shared)
            for shared in range(step, round_up(max(common), step) + 1, step)
        ]
        return min(choices, key=lambda layout: (mlps[0].num_experts * layout.width + layout.shared, layout.shared))

    def config(self, moe: ToMoEForCausalLM, layout: Layout) -> PreTrainedConfig:
        windows = sliding_windows(moe)
        window = next((w for w in windows if w is not None), None)
        return self.make_config(
            moe, moe_intermediate_size=layout.width, shared_expert_intermediate_size=layout.shared,
            num_experts=moe.config.tomoe_num_experts, num_experts_per_tok=1, norm_topk_prob=True, decoder_sparse_step=1,
            mlp_only_layers=[], sliding_window=window, use_sliding_window=bool(window),
            layer_types=["full_attention" if w is None else "sliding_attention" for w in windows],
        )  # fmt: skip

    def attention_tensors(self, attention: nn.Module) -> dict[str, Tensor]:
        weights = attention_tensors(attention)
        names = ("q_proj", "k_proj", "v_proj")
        zeros = {f"{name}.bias": weights[f"{name}.weight"].new_zeros(len(weights[f"{name}.weight"])) for name in names}
        return zeros | weights
