"""Stock classes whose decoder is the dense family's own, but for the MLP: everything else is copied by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tomoe.exporting.stock.carrier import LayoutT, Stock, dense_mlp_problem, mlp_problem
from tomoe.model.mlp import named_layers
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM


class FamilyDecoder(Stock[LayoutT]):
    """A class with the decoder of one family; families: their types of config."""

    families: ClassVar[tuple[str, ...]]

    def decoder_problem(self, moe: ToMoEForCausalLM) -> str | None:
        if problem := self._family_problem(moe.config.tomoe_dense_type):
            return problem
        if moe.config.prunes_attention:
            return "its attention is pruned (attention.pruning), and this class has whole heads"
        return mlp_problem(moe)

    def dense_decoder_problem(self, dense: PreTrainedModel) -> str | None:
        return self._family_problem(dense.config.get_text_config().model_type) or dense_mlp_problem(dense)

    def _family_problem(self, kind: str) -> str | None:
        if kind in self.families:
            return None
        return f"it is a {kind} model, and this class has the attention and the norms of {' or '.join(self.families)}"

    def make_config(self, moe: ToMoEForCausalLM, **sizes: Any) -> PreTrainedConfig:
        """What the class has in common with the dense model's config, and the sizes given."""
        return super().make_config(moe, **self.common_values(moe) | sizes)

    @torch.no_grad()
    def tensors(self, moe: ToMoEForCausalLM, layout: LayoutT) -> Iterator[tuple[str, Tensor]]:
        mlp_tensors, prefix = self.mlp_tensors(moe, layout), named_layers(moe)[0]
        yield from other_tensors(moe)
        for i in range(len(moe.mlps())):
            yield from ((f"{prefix}.{i}.{name}", t) for name, t in mlp_tensors(i))


def other_tensors(moe: ToMoEForCausalLM) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every tensor outside of the MLPs that hold experts; of tied ones the first."""
    inside = tuple(f"{name}." for name in moe.config.tomoe_mlps)
    tied = moe.get_output_embeddings().weight is moe.get_input_embeddings().weight
    for name, t in moe.state_dict().items():
        if not name.startswith(inside) and not (tied and name == "lm_head.weight"):
            yield name, t
