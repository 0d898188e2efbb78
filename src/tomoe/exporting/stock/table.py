"""The stock classes, one row each: its config, the decoder around the experts, its router, its tensor names.

What a row asks of a conversion stands in `recipe.target_rules` under the same name. Classes with Softmax routers weigh each of k
experts 1/k: down projections hold the factor k, and no other number of experts can be asked for at load time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import (
    Cohere2MoeConfig,
    FlexOlmoConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    Lfm2MoeConfig,
    MixtralConfig,
)
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from tomoe.exporting.stock.architecture import FamilyDecoder, StockArch, StockLayout, each, round_up
from tomoe.exporting.stock.fine_grained import FineGrained
from tomoe.exporting.stock.gemma4 import ZERO_NEURONS, Gemma4
from tomoe.exporting.stock.plain_decoder import PlainDecoder, sliding_windows
from tomoe.exporting.stock.routers import Sigmoid, Softmax
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.recipe.target_rules import STOCK_MULTIPLE

ROUTED_SCALE = 2.0  # undoes the 1/2 that a sigmoid has at 0


def glm4_sizes(moe: ToMoEForCausalLM, layout: StockLayout) -> dict[str, Any]:
    """Config values of Glm4Moe: one group of experts to choose from; untied output matrix, as vLLM's class needs it."""
    attention: Any = moe.model.layers[0].self_attn
    return {
        "n_routed_experts": layout.experts,
        "num_experts_per_tok": layout.top_k,
        "n_shared_experts": layout.shared // layout.width,
        "moe_intermediate_size": layout.width,
        "routed_scaling_factor": ROUTED_SCALE,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": layout.dense_layers,
        "rope_parameters": dict(moe.config.rope_parameters) | {"partial_rotary_factor": 1.0},
        "tie_word_embeddings": False,
        "attention_bias": attention.q_proj.bias is not None,
        "use_qk_norm": getattr(attention, "q_norm", None) is not None,
        "num_nextn_predict_layers": 0,
    }


class Mixtral(StockArch):
    """Overlapping experts of one width in all layers. Shared neurons are copied, narrow experts are padded with zeros. A token
    uses one expert with the weight 1: the stock router normalizes the weights of the chosen ones."""

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


MIXTRAL = Mixtral(
    name="mixtral",
    config_class=MixtralConfig,
    decoder=PlainDecoder(),
    sizes_of=lambda moe, layout: {
        "intermediate_size": layout.width,
        "num_local_experts": layout.experts,
        "num_experts_per_tok": 1,
        "sliding_window": sliding_windows(moe)[0],
    },
    tried_with=("4.57.1",),
)

GLM4_MOE = FineGrained(
    name="glm4_moe",
    config_class=Glm4MoeConfig,
    decoder=PlainDecoder(biased=True, normed=True, windows=False, silu_only=True, tied=False),
    sizes_of=glm4_sizes,
    tried_with=("4.57.1",),
    form=Sigmoid(),
    router=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    float32_routers=True,
)

QWEN3_5_MOE = FineGrained(
    name="qwen3_5_moe",
    config_class=Qwen3_5MoeTextConfig,
    decoder=FamilyDecoder("qwen3_5_text"),
    sizes_of=lambda moe, layout: {
        "moe_intermediate_size": layout.width,
        "shared_expert_intermediate_size": layout.shared,
        "num_experts": layout.experts,
        "num_experts_per_tok": layout.top_k,
    },
    form=Softmax(),
    shared=each("mlp.shared_expert"),
    shared_gate="mlp.shared_expert_gate.weight",
)

# It has no shared expert, so the shared part stands in experts that are always chosen. In bfloat16 its scores are coarse, so
# such a checkpoint gets a larger eps, and its weights are less equal.
LFM2_MOE = FineGrained(
    name="lfm2_moe",
    config_class=Lfm2MoeConfig,
    decoder=FamilyDecoder("lfm2"),
    sizes_of=lambda moe, layout: {
        "intermediate_size": len(moe.mlps()[0].up_proj),
        "moe_intermediate_size": layout.width,
        "num_dense_layers": layout.dense_layers,
        "num_experts": layout.experts,
        "num_experts_per_tok": layout.top_k,
        "use_expert_bias": True,
        "norm_topk_prob": False,
        "routed_scaling_factor": ROUTED_SCALE,
    },
    form=Sigmoid(),
    coarse_scores=True,
    block="feed_forward",
    router=("feed_forward.gate.weight", "feed_forward.expert_bias"),
    experts=each("feed_forward.experts.{}", ("w1", "w3", "w2")),
    dense_mlp=each("feed_forward", ("w1", "w3", "w2")),
)


def granite(name: str, config_class: Any, kind: str) -> FineGrained:
    """Row of a Granite class. Multipliers are the family's. Experts are chosen by unrounded logits, so Softmax's bounds hold."""
    return FineGrained(
        name=name,
        config_class=config_class,
        decoder=FamilyDecoder(kind),
        sizes_of=lambda moe, layout: {
            "intermediate_size": layout.width,
            "shared_intermediate_size": layout.shared,
            "num_local_experts": layout.experts,
            "num_experts_per_tok": layout.top_k,
        },
        form=Softmax(),
        block="block_sparse_moe",
        gate="router",
        router=("block_sparse_moe.router.layer.weight",),
        experts=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        shared=("shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"),
    )


GEMMA4 = Gemma4(
    name="gemma4",
    config_class=Gemma4TextConfig,
    decoder=FamilyDecoder("gemma4_text"),
    sizes_of=lambda moe, layout: {
        # sizes of single layers, which are no field of the class
        "per_layer_config": moe.config.to_dict()["per_layer_config"],
        "enable_moe_block": True,
        "intermediate_size": ZERO_NEURONS,
        "use_double_wide_mlp": False,
        "moe_intermediate_size": layout.width,
        "num_experts": layout.experts,
        "top_k_experts": layout.top_k,
    },
    form=Softmax(),
    router=("router.proj.weight",),
    experts=("experts.gate_up_proj", "experts.down_proj"),
)

# Experts are chosen by logits here, too.
COHERE2_MOE = FineGrained(
    name="cohere2_moe",
    config_class=Cohere2MoeConfig,
    decoder=FamilyDecoder("cohere2"),
    sizes_of=lambda moe, layout: {
        "head_dim": moe.model.layers[0].self_attn.head_dim,
        "rope_theta": moe.config.rope_parameters["rope_theta"],
        "rope_parameters": moe.config.rope_parameters,
        "intermediate_size": layout.width,
        "num_experts": layout.experts,
        "num_experts_per_tok": layout.top_k,
        "num_shared_experts": layout.shared // layout.width,
        "shared_expert_combination_strategy": "sum",
        "expert_selection_fn": "softmax",
        "mlp_layer_types": ["sparse"] * moe.config.num_hidden_layers,
    },
    form=Softmax(),
)

FLEX_OLMO = FineGrained(
    name="flex_olmo",
    config_class=FlexOlmoConfig,
    decoder=FamilyDecoder("olmo2"),
    sizes_of=lambda moe, layout: {
        "intermediate_size": layout.width,
        "num_experts": layout.experts,
        "num_experts_per_tok": layout.top_k,
        "norm_topk_prob": True,
    },
    form=Softmax(),
)

STOCK_ARCHS: tuple[StockArch, ...] = (
    MIXTRAL,
    GLM4_MOE,
    QWEN3_5_MOE,
    LFM2_MOE,
    granite("granitemoeshared", GraniteMoeSharedConfig, "granite"),
    granite("granitemoehybrid", GraniteMoeHybridConfig, "granitemoehybrid"),
    GEMMA4,
    COHERE2_MOE,
    FLEX_OLMO,
)
