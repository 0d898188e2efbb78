"""What the stock classes have in common, the architectures that transformers, vLLM and llama.cpp already know.

A stock class has separate weights for every expert, and one width and one number of them for all layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tomoe.exporting.target import Options, Sizes, Target
from tomoe.exporting.writing import write_checkpoint, write_config, write_tokenizer
from tomoe.model.mlp import converted_mlps, decoder_layers
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.progress import StageCallback
from tomoe.recipe.target_rules import Form

LayoutT = TypeVar("LayoutT")


class Stock(Target, Generic[LayoutT]):
    """A class of transformers: a config and tensors by name.

    experts_form: of the experts that it has a place for; other_form: why it has none for others, as half a sentence; how_well:
    it holds a model that it supports.
    """

    config_class: ClassVar[type[PreTrainedConfig]]
    experts_form: ClassVar[Form]
    other_form: ClassVar[str]
    how_well: ClassVar[str] = "exactly"

    def supports(self, moe: ToMoEForCausalLM) -> str | None:
        return self.form_problem(moe.config.tomoe_expert_form) or self.decoder_problem(moe) or self.layout_problem(moe)

    def supports_dense(self, dense: PreTrainedModel, form: str) -> str | None:
        return self.form_problem(form) or self.dense_decoder_problem(dense)

    def form_problem(self, form: str) -> str | None:
        """Why the class has no place for experts of this form (experts.form), as half a sentence; None if it has."""
        return None if form == self.experts_form else self.other_form

    @abstractmethod
    def decoder_problem(self, moe: ToMoEForCausalLM) -> str | None:
        """Why the class computes something else around the experts, as half a sentence; None if it does not."""

    @abstractmethod
    def dense_decoder_problem(self, dense: PreTrainedModel) -> str | None:
        """Why no MoE made from this dense model could become the class, judging by its parts; None if one might."""

    def layout_problem(self, moe: ToMoEForCausalLM) -> str | None:
        """Why the class cannot hold these experts, as half a sentence; None if it can."""
        return None

    @abstractmethod
    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> LayoutT:
        """The sizes that all layers get; expert widths are multiples of `multiple`."""

    @abstractmethod
    def config(self, moe: ToMoEForCausalLM, layout: LayoutT) -> PreTrainedConfig:
        """The config of the export."""

    @abstractmethod
    def tensors(self, moe: ToMoEForCausalLM, layout: LayoutT) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of every tensor of the checkpoint, layer by layer: only one layer's copies are alive at a time."""

    @abstractmethod
    def mlp_tensors(self, moe: ToMoEForCausalLM, layout: LayoutT) -> Callable[[int], Iterable[tuple[str, Tensor]]]:
        """For a layer by its number, name (behind that of the layer) and value of every tensor of its MLP."""

    def common_values(self, moe: ToMoEForCausalLM) -> dict[str, Any]:
        """What the class's config has in common with the dense model's."""
        known = {f.name for f in fields(self.config_class)} - {"architectures", "dtype", "transformers_version"}
        return {k: v for k, v in moe.config.dense_config().to_dict().items() if k in known}

    def make_config(self, moe: ToMoEForCausalLM, **values: Any) -> PreTrainedConfig:
        """A config of the class with these values."""
        config = self.config_class(**values, architectures=[f"{self.about}ForCausalLM"])
        config.dtype = moe.dtype
        return config

    def bytes(self, moe: ToMoEForCausalLM, layout: LayoutT) -> int:
        """Of the weights."""
        return sum(p.numel() for p in empty_stock(self.config(moe, layout)).parameters()) * moe.dtype.itemsize

    @abstractmethod
    def describe(self, moe: ToMoEForCausalLM, layout: LayoutT) -> Sizes:
        """The sizes of an export with this layout."""

    def sizes(self, moe: ToMoEForCausalLM, options: Options) -> Sizes:
        return self.describe(moe, self.layout(moe, options.width_multiple))

    def write(
        self, moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path, options: Options,
        on_progress: StageCallback,
    ) -> None:  # fmt: skip
        layout = self.layout(moe, options.width_multiple)
        write_config(self.config(moe, layout), folder)
        write_tokenizer(moe, tokenizer, folder)
        write_checkpoint(self.tensors(moe, layout), folder, self.bytes(moe, layout), on_progress)


def mlp_problem(moe: ToMoEForCausalLM) -> str | None:
    """Why no stock class has MLPs such as those of this MoE, as half a sentence; None if some may have."""
    mlps = moe.mlps()
    biases = (mlps[0].gate_bias, mlps[0].up_bias, mlps[0].down_bias)
    return _mlp_problem(moe, len(mlps), mlps[0].gate_proj, biases)


def dense_mlp_problem(dense: PreTrainedModel) -> str | None:
    """The same of the MoE that this dense model becomes."""
    mlps = converted_mlps(dense)
    biases = [part and part.bias for part in (mlps[0].gate, mlps[0].up, mlps[0].down)]
    return _mlp_problem(dense, len(mlps), mlps[0].gate, biases)


def _mlp_problem(model: PreTrainedModel, converted: int, gate: Any, biases: Iterable[Any]) -> str | None:
    if converted < len(decoder_layers(model)):
        return "some of its layers have no MLP that is converted"
    if gate is None:
        return "its MLP has no gate projection"
    if any(bias is not None for bias in biases):
        return "its MLP has biases"
    return None


def empty_stock(config: PreTrainedConfig) -> Any:
    """A model of this config on the meta device, to read names and sizes from."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def padded(t: Float[Tensor, "n m"], size: int, dim: int) -> Float[Tensor, "_ _"]:
    """Append zeros along `dim`, up to `size`."""
    shape = list(t.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([t, t.new_zeros(shape)], dim).contiguous()
