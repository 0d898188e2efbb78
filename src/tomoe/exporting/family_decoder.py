"""Stock classes whose decoder is the dense family's own, but for the MLP: everything else is copied by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tomoe.exporting.stock import LayoutT, Stock
from tomoe.model.mlp import converted_mlps, decoder_layers, named_layers
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM


class FamilyDecoder(Stock[LayoutT]):
    """A class with the decoder of one family; families: their types of config, activations: that its experts have."""

    families: ClassVar[tuple[str, ...]]
    activations: ClassVar[tuple[str, ...]] = ()

    def decoder_problem(self, moe: ToMoEForCausalLM) -> str | None:
        if problem := self._family_problem(moe.config.tomoe_dense_type):
            return problem
        if moe.config.prunes_attention:
            return "its attention is pruned (attention.pruning), and this class has whole heads"
        mlp = moe.mlps()[0]
        biases = any(bias is not None for bias in (mlp.gate_bias, mlp.up_bias, mlp.down_bias))
        return self._mlp_problem(moe, len(moe.mlps()), mlp.gate_proj is not None, biases)

    def dense_decoder_problem(self, dense: PreTrainedModel) -> str | None:
        mlps = converted_mlps(dense)
        parts = (mlps[0].gate, mlps[0].up, mlps[0].down)
        biases = any(part is not None and part.bias is not None for part in parts)
        problem = self._family_problem(dense.config.get_text_config().model_type)
        return problem or self._mlp_problem(dense, len(mlps), mlps[0].gate is not None, biases)

    def _family_problem(self, kind: str) -> str | None:
        if kind in self.families:
            return None
        return f"it is a {kind} model, and this class has the attention and the norms of {' or '.join(self.families)}"

    def _mlp_problem(self, model: PreTrainedModel, converted: int, gated: bool, biases: bool) -> str | None:
        activation = getattr(model.config.get_text_config(), "hidden_act", "silu")
        if converted < len(decoder_layers(model)):
            return "some of its layers have no MLP that is converted"
        if not gated:
            return "its MLP has no gate projection"
        if biases:
            return "its MLP has biases"
        if self.activations and activation not in self.activations:
            return f"its activation is {activation}, and this class has {' or '.join(self.activations)}"
        return None

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
