"""Fine-grained experts of lfm2 (LFM2, LFM2.5) as an Lfm2Moe, which has the same convolutions and attention.

It has no shared expert, so the shared part stands in experts that are always chosen. transformers makes its scores in the dtype
of the model: in bfloat16 they are coarse, so such a checkpoint gets a larger eps, and its weights are less equal.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import Lfm2MoeConfig, PreTrainedConfig

from tomoe.exporting.proof_by_parts import StockRouter
from tomoe.exporting.stock.family_decoder import FamilyDecoder
from tomoe.exporting.stock.fine_grained import FineGrained, FineLayout, without_shared_expert
from tomoe.exporting.stock.routers import HalfPrecisionSigmoid, RouterForm, Sigmoid
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM


class Lfm2Moe(FamilyDecoder[FineLayout], FineGrained):
    """The first layers may be plain MLPs."""

    name, about = "lfm2_moe", "Lfm2Moe"
    config_class = Lfm2MoeConfig
    families = ("lfm2",)
    block, projections = "feed_forward", ("w1", "w3", "w2")
    router_names = ("feed_forward.gate.weight", "feed_forward.expert_bias")

    def form_in(self, dtype: torch.dtype) -> RouterForm:
        return Sigmoid() if dtype == torch.float32 else HalfPrecisionSigmoid(dtype)

    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> FineLayout:
        return without_shared_expert(super().layout(moe, multiple))

    def config(self, moe: ToMoEForCausalLM, layout: FineLayout) -> PreTrainedConfig:
        return self.make_config(
            moe,
            intermediate_size=len(moe.mlps()[0].up_proj),
            moe_intermediate_size=layout.width,
            num_dense_layers=layout.whole,
            num_experts=layout.experts,
            num_experts_per_tok=layout.top_k,
            use_expert_bias=True,
            norm_topk_prob=False,
            routed_scaling_factor=2.0,
        )

    def routers(self, exported: Any, form: RouterForm) -> dict[int, StockRouter]:
        biases = {i: exported.model.layers[i].feed_forward.expert_bias for i in self.gates(exported)}

        def router(gate: Any, bias: Tensor) -> StockRouter:
            def choose(x: Tensor) -> tuple[Tensor, Tensor]:
                _, weights, ids = gate(x, bias)
                return ids, weights

            return StockRouter(form, choose, float(gate.weight.abs().amax()))

        return {i: router(deepcopy(gate), biases[i].clone()) for i, gate in self.gates(exported).items()}
