"""The decoder of one dense family, but for the MLP: everything else is copied by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from tomoe.exporting.stock.carrier import Decoder, mlp_problem
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM


@dataclass(frozen=True)
class FamilyDecoder(Decoder):
    """Of the family whose config is of type `kind`."""

    kind: str

    def problem(self, model: PreTrainedModel) -> str | None:
        kind = getattr(model.config, "tomoe_dense_type", model.config.get_text_config().model_type)
        if kind != self.kind:
            return f"it is a {kind} model, and this class has the attention and the norms of {self.kind}"
        if getattr(model.config, "prunes_attention", False):
            return "its attention is pruned (attention.pruning), and this class has whole heads"
        return mlp_problem(model)

    def tensors(self, moe: ToMoEForCausalLM) -> Iterator[tuple[str, Tensor]]:
        """Of tied ones the first."""
        inside = tuple(f"{name}." for name in moe.config.tomoe_mlps)
        tied = moe.get_output_embeddings().weight is moe.get_input_embeddings().weight
        for name, t in moe.state_dict().items():
            if not name.startswith(inside) and not (tied and name == "lm_head.weight"):
                yield name, t
