"""Fine-grained experts of qwen3_5 (Qwen3.5, Qwen3.8) as a Qwen3_5Moe, which has the same linear and full attention.

Weights are 1/k, so down projections are multiplied by k, and no other number of experts can be asked for at load time. The
shared expert is multiplied by sigmoid(gate x). A gate of zeros makes that exactly 1/2 for every token, and down weights that
are doubled undo it exactly: powers of two round nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from tomoe.exporting.stock.family_decoder import FamilyDecoder
from tomoe.exporting.stock.fine_grained import FineGrained, FineLayout
from tomoe.exporting.stock.routers import Softmax
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP


class Qwen3_5Moe(FamilyDecoder[FineLayout], FineGrained):
    """Every layer has experts."""

    name, about = "qwen3_5_moe", "Qwen3_5Moe"
    config_class = Qwen3_5MoeTextConfig
    families = ("qwen3_5_text",)
    form = Softmax()
    shared, shared_factor = "shared_expert", 2.0
    whole_layers = False

    def config(self, moe: ToMoEForCausalLM, layout: FineLayout) -> PreTrainedConfig:
        return self.make_config(
            moe,
            moe_intermediate_size=layout.width,
            shared_expert_intermediate_size=layout.shared,
            num_experts=layout.experts,
            num_experts_per_tok=layout.top_k,
        )

    def expert_tensors(self, mlp: ToMoEMLP, layout: FineLayout) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.block}.shared_expert_gate.weight", mlp.up_proj.new_zeros(1, mlp.up_proj.shape[1])
        yield from super().expert_tensors(mlp, layout)
