"""Fine-grained experts of granite as a GraniteMoeShared, and of the dense granitemoehybrid (Granite 4) as the same with experts.

All multipliers stay the family's. Weights are 1/k, so down projections are multiplied by k, and no other number of experts can
be asked for at load time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from transformers import GraniteMoeHybridConfig, GraniteMoeSharedConfig, PreTrainedConfig

from tomoe.exporting.stock.family_decoder import FamilyDecoder
from tomoe.exporting.stock.fine_grained import FineGrained, FineLayout
from tomoe.exporting.stock.routers import Softmax
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP


class GraniteMoeShared(FamilyDecoder[FineLayout], FineGrained):
    """Every layer has experts. Experts are chosen by logits, which no softmax rounds, so Softmax's bounds hold."""

    name, about = "granitemoeshared", "GraniteMoeShared"
    config_class: ClassVar[type[PreTrainedConfig]] = GraniteMoeSharedConfig
    families = ("granite",)
    form = Softmax()
    block, gate = "block_sparse_moe", "router"
    router_names = ("block_sparse_moe.router.layer.weight",)
    whole_layers = False

    def config(self, moe: ToMoEForCausalLM, layout: FineLayout) -> PreTrainedConfig:
        return self.make_config(
            moe,
            intermediate_size=layout.width,
            shared_intermediate_size=layout.shared,
            num_local_experts=layout.experts,
            num_experts_per_tok=layout.top_k,
        )

    def expert_tensors(self, mlp: ToMoEMLP, layout: FineLayout) -> Iterator[tuple[str, Tensor]]:
        gate, up, down = self.matrices(mlp, layout, None)
        yield "shared_mlp.input_linear.weight", torch.cat([gate, up])
        yield "shared_mlp.output_linear.weight", down
        experts = [self.matrices(mlp, layout, expert) for expert in range(layout.experts)]
        yield f"{self.block}.input_linear.weight", torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
        yield f"{self.block}.output_linear.weight", torch.stack([down for _, _, down in experts])


class GraniteMoeHybrid(GraniteMoeShared):
    """Layers of state spaces beside those of attention."""

    name, about = "granitemoehybrid", "GraniteMoeHybrid"
    config_class = GraniteMoeHybridConfig
    families = ("granitemoehybrid",)
