"""What the stock classes share, the architectures that transformers, vLLM and llama.cpp already know.

A stock class has separate weights for every expert, and one width and one number of them for all layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tomoe.exporting.stock.routers import RouterForm
from tomoe.exporting.target import Job, Options, Sizes, Target
from tomoe.exporting.writing import write_checkpoint, write_config
from tomoe.model.mlp import converted_mlps, decoder_layers, named_layers
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP
from tomoe.recipe.target_rules import TARGET_RULES, TargetRules

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of a gated MLP's matrices in most classes."""


class Decoder(ABC):
    """The part of a stock class around the experts."""

    @abstractmethod
    def problem(self, model: PreTrainedModel) -> str | None:
        """Say why this model, dense or converted, computes something else, as half a sentence; None if it does not."""

    def values(self, moe: ToMoEForCausalLM, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
        """Return the config values that the class shares with the dense model."""
        known = {f.name for f in fields(config_class)} - {"architectures", "dtype", "transformers_version"}
        return {k: v for k, v in moe.config.dense_config().to_dict().items() if k in known}

    def check(self, moe: ToMoEForCausalLM, config: PreTrainedConfig) -> None:
        """Raise UserError if the class with this config computes something else than the MoE."""
        return None

    @abstractmethod
    def tensors(self, moe: ToMoEForCausalLM) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of every tensor outside of the MLPs."""


@dataclass(frozen=True)
class FamilyDecoder(Decoder):
    """The decoder of one dense family, whose config has the type `kind`: everything except the MLP is copied by name."""

    kind: str

    def problem(self, model: PreTrainedModel) -> str | None:
        kind = getattr(model.config, "tomoe_dense_type", model.config.get_text_config().model_type)
        if kind != self.kind:
            return f"it is a {kind} model, and this class has the attention and the norms of {self.kind}"
        if getattr(model.config, "prunes_attention", False):
            return "its attention is pruned (attention.pruning), and this class does not support that"
        return mlp_problem(model)

    def tensors(self, moe: ToMoEForCausalLM) -> Iterator[tuple[str, Tensor]]:
        """Yield the first of tied tensors only."""
        inside = tuple(f"{name}." for name in moe.config.tomoe_mlps)
        tied = moe.get_output_embeddings().weight is moe.get_input_embeddings().weight
        for name, t in moe.state_dict().items():
            if not name.startswith(inside) and not (tied and name == "lm_head.weight"):
                yield name, t


@dataclass(frozen=True)
class StockLayout:
    """Sizes of all layers; width: w; shared: of the shared expert, a multiple of w; experts: all that are stored; top_k: per
    token; zeros: padding experts of the layer with the smallest top-k; dense_layers: first layers that use all experts and are
    written as plain MLPs; always: experts that hold the shared part, if there is no shared expert."""

    width: int
    shared: int
    experts: int
    top_k: int
    zeros: int
    dense_layers: int
    always: int = 0

    def words(self, moe: ToMoEForCausalLM) -> str:
        """Describe, as in "64 experts of 16 neurons, 16 for each token, and a shared one of 512 in each of 30 layers"."""
        zeros = f" ({self.zeros} of zeros)" if self.zeros else ""
        dense = f", {self.dense_layers} dense before them" if self.dense_layers else ""
        size = max(mlp.expert_rows.shape[1] for mlp in moe.mlps())
        filled = f" (filled up from {size:,})" if self.width > size else ""
        if not self.experts:
            return f"{self.width:,} neurons{filled} in each of {len(moe.mlps())} layers, the same for all tokens"
        shared = f", and a shared one of {self.shared:,}" if self.shared else ""
        always = f" ({self.always} of them always, the shared part)" if self.always else ""
        return (
            f"{self.experts} experts{zeros} of {self.width:,} neurons{filled}, {self.top_k} for each token{always}{shared} "
            f"in each of {len(moe.mlps()) - self.dense_layers} layers{dense}"
        )

    def sizes(self, moe: ToMoEForCausalLM, stored: int, more: str = "") -> Sizes:
        """Return the sizes of an export of so many bytes; `more` ends its words."""
        overlapping = moe.config.tomoe_expert_form == "overlapping"
        copies = overlapping and self.experts * self.width > min(moe.config.tomoe_union_sizes)
        return Sizes(stored, self.words(moe) + more, copies, self.zeros)


@dataclass(eq=False, kw_only=True)
class StockArch(Target):
    """A class of transformers with experts; decoder: around them; sizes_of: config keys of their sizes; tried_with: older
    versions of transformers that computed the same; other_form: why it does not support another form of experts, as half a
    sentence; how_well: with which precision it represents a supported model."""

    name: str
    config_class: type[PreTrainedConfig]
    decoder: Decoder
    sizes_of: Callable[[ToMoEForCausalLM, StockLayout], dict[str, Any]]
    form: RouterForm | None = None
    tried_with: tuple[str, ...] = ()
    other_form: ClassVar[str]
    how_well: ClassVar[str]

    @property
    def rules(self) -> TargetRules:
        """What it requires of a conversion's experts."""
        return TARGET_RULES[self.name]

    @property
    def about(self) -> str:
        """The name of the class without the common ending."""
        return self.config_class.__name__.removesuffix("Config").removesuffix("Text")

    def supports(self, moe: ToMoEForCausalLM) -> str | None:
        return self.form_problem(moe.config.tomoe_expert_form) or self.decoder.problem(moe) or self.layout_problem(moe)

    def supports_dense(self, dense: PreTrainedModel, form: str) -> str | None:
        return self.form_problem(form) or self.decoder.problem(dense)

    def form_problem(self, form: str) -> str | None:
        """Say why the class does not support experts of this form (experts.form), as half a sentence; None if it does."""
        return None if form in self.rules.forms else self.other_form

    def layout_problem(self, moe: ToMoEForCausalLM) -> str | None:
        """Say why the class cannot represent these experts, as half a sentence; None if it can."""
        return None

    @abstractmethod
    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> StockLayout:
        """Return the sizes that all layers get; expert widths are multiples of `multiple`."""

    def is_adjustable(self, moe: ToMoEForCausalLM) -> bool:
        return self.form is None or not self.form.normalized

    def sizes(self, moe: ToMoEForCausalLM, options: Options) -> Sizes:
        layout = self.layout(moe, options.width_multiple)
        return layout.sizes(moe, self.bytes(moe, layout))

    def config(self, moe: ToMoEForCausalLM, layout: StockLayout) -> PreTrainedConfig:
        """Make the config of the export. Raises UserError if the class computes something else with it."""
        values = self.decoder.values(moe, self.config_class) | self.sizes_of(moe, layout)
        config = self.config_class(**values, architectures=[f"{self.about}ForCausalLM"])
        config.dtype = moe.dtype
        self.decoder.check(moe, config)
        return config

    @torch.no_grad()
    def tensors(self, moe: ToMoEForCausalLM, layout: StockLayout) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of every tensor of the checkpoint: only one layer's copies are alive at a time."""
        prefix = named_layers(moe)[0]
        yield from self.decoder.tensors(moe)
        for i, eps in enumerate(self.scales(moe)):
            yield from ((f"{prefix}.{i}.{name}", t) for name, t in self.mlp_tensors(moe, i, layout, eps))

    @abstractmethod
    def mlp_tensors(
        self, moe: ToMoEForCausalLM, i: int, layout: StockLayout, eps: float
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name (within the layer) and value of every tensor of the MLP of layer i; eps: of its router, from `scales`."""

    def scales(self, moe: ToMoEForCausalLM) -> list[float]:
        """Return the factors of the routers of all layers."""
        return [1.0] * len(moe.mlps())

    def matrices(self, mlp: ToMoEMLP, layout: StockLayout, expert: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return gate, up [w, D] and down [D, w] of an expert (zeros beyond the last), or of the shared one if None. A class that
        weighs it multiplies down by the inverse."""
        assert mlp.gate_proj is not None
        width = layout.shared if expert is None else layout.width
        if expert is None:
            rows = torch.arange(mlp.shared_size, device=mlp.up_proj.device)
        elif expert < mlp.num_experts:
            rows = mlp.expert_rows[expert].long()
        else:
            # the shared part comes first in the matrices, and is longer than the experts of zeros can claim
            first = (expert - mlp.num_experts) * layout.width
            last = min(first + layout.width, mlp.shared_size if layout.always else 0)
            rows = torch.arange(min(first, last), last, device=mlp.up_proj.device)
        gate, up = (padded(t[rows], width, 0) for t in (mlp.gate_proj, mlp.up_proj))
        return gate, up, padded(mlp.down_proj[rows].t(), width, 1)

    def bytes(self, moe: ToMoEForCausalLM, layout: StockLayout) -> int:
        """Count the bytes of the weights."""
        return sum(p.numel() for p in empty_stock(self.config(moe, layout)).parameters()) * moe.dtype.itemsize

    def write(self, job: Job, folder: Path) -> None:
        moe, layout = job.moe, self.layout(job.moe, job.options.width_multiple)
        write_config(self.config(moe, layout), folder)
        if moe.generation_config is not None:
            moe.generation_config.save_pretrained(folder)
        job.save_tokenizer(folder)
        write_checkpoint(self.tensors(moe, layout), folder, self.bytes(moe, layout), job.on_progress)


def mlp_problem(model: Any) -> str | None:
    """Say why no stock class has MLPs like those of this model, dense or converted, as half a sentence; None if some may."""
    converted = isinstance(model, ToMoEForCausalLM)
    mlps: Sequence[Any] = model.mlps() if converted else converted_mlps(model)
    first = mlps[0]
    if converted:
        gate, biases = first.gate_proj, [first.gate_bias, first.up_bias, first.down_bias]
    else:
        gate, biases = first.gate, [part and part.bias for part in (first.gate, first.up, first.down)]
    if len(mlps) < len(decoder_layers(model)):
        return "some of its layers have no MLP that is converted"
    if gate is None:
        return "its MLP has no gate projection"
    if any(bias is not None for bias in biases):
        return "its MLP has biases"
    return None


def empty_stock(config: PreTrainedConfig) -> Any:
    """Make a model of this config on the meta device, to read names and sizes from."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def padded(t: Float[Tensor, "n m"], size: int, dim: int) -> Float[Tensor, "_ _"]:
    """Pad with zeros along `dim` to `size`."""
    shape = list(t.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([t, t.new_zeros(shape)], dim).contiguous()


def round_up(size: int, multiple: int) -> int:
    """Round up to a multiple, at least one."""
    return max(multiple, -(-size // multiple) * multiple)


def each(place: str, projections: tuple[str, str, str] = PROJECTIONS) -> tuple[str, str, str]:
    """Names of gate, up and down matrices of an MLP in a layer."""
    gate, up, down = (f"{place}.{name}.weight" for name in projections)
    return gate, up, down
