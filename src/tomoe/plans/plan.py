"""The plan with its tensors: made by planning and repair, applied by folding, saved and loaded as one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from pydantic import StrictInt
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on only

from tomoe.budget import active_fraction, active_params, decoder_params, layer_params
from tomoe.errors import Advice, UserError
from tomoe.files import atomic_write, sha256, validated
from tomoe.model.shape import ModelShape
from tomoe.plans.layer import LayerCounts, LayerPlan
from tomoe.plans.manifest import (
    FORMAT,
    REPAIRED,
    Notes,
    Shape,
    damage_in_a_sentence,
    is_of_inputs,
    read_head,
    write_head,
)
from tomoe.plans.tensors import FINE, MASKS, PACKED, REFIT, ROTATION, ROUTER, TENSORS, checked_layers
from tomoe.recipe.target_rules import Form


@dataclass(frozen=True)
class Plan:
    """A validated plan. Raises UserError at construction if its parts contradict each other."""

    shape: ModelShape
    """Sizes of the dense model."""
    layers: tuple[LayerPlan, ...]
    """One per decoder layer."""
    source: str = ""
    """Fingerprint of the dense weights."""
    dense_config: dict[str, Any] = field(default_factory=dict)
    """Config of the dense model, as transformers writes it."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The recipe of the conversion."""
    notes: dict[str, Any] = field(default_factory=dict)
    """How the plan was made: steps, sequence length, versions."""

    counts: tuple[LayerCounts, ...] = field(init=False, repr=False, compare=False)
    """The layers in numbers."""

    def __post_init__(self) -> None:
        for i, layer in enumerate(self.layers):
            if error := layer.tensor_error(self.shape):
                raise _broken_layer(i, error)
        object.__setattr__(self, "counts", tuple(layer.count(self.shape) for layer in self.layers))
        if len(self.counts) != self.shape.num_layers:
            raise UserError(f"the plan has {len(self.counts)} layers, but its model has {self.shape.num_layers}")
        for i, counts in enumerate(self.counts):
            if error := counts.error(self.shape):
                raise _broken_layer(i, error)
        experts = sorted({layer.num_experts for layer in self.counts})
        embeddings = sorted({layer.value_embedding for layer in self.counts if layer.value_embedding})
        for differ, what in (
            (len({layer.form for layer in self.counts}) > 1, "some have fine-grained experts, others overlapping ones"),
            (len(experts) > 1, f"{experts} experts"),
            (len(embeddings) > 1, f"embeddings of {embeddings}"),
        ):
            if differ:
                raise UserError(f"the layers of the plan differ: {what}; make the plan again with `tomoe plan`")

    def widths(self) -> list[tuple[int, int, int]]:
        """Return (MLP width, Q/K dims, V/O dims of a token) of every layer."""
        return [(layer.width, layer.qk_dims, layer.value_top_k) for layer in self.counts]

    @property
    def num_experts(self) -> int:
        """Experts of a layer (N)."""
        return self.counts[0].num_experts

    @property
    def form(self) -> Form:
        return self.counts[0].form

    @property
    def is_static(self) -> bool:
        """Whether all tokens use the same neurons: there is only one expert."""
        return self.num_experts == 1

    @property
    def prunes_attention(self) -> bool:
        """Whether any layer drops dims of its attention; otherwise attention is the family's own."""
        full = self.shape.head_dim
        return any(layer.rotated or layer.qk_dims < full or layer.value_top_k < full for layer in self.counts)

    @property
    def dynamic_values(self) -> bool:
        """Whether tokens choose their V/O dims in any layer."""
        return any(layer.value_embedding for layer in self.counts)

    @property
    def rotated(self) -> bool:
        """Whether any layer has its own basis of V/O dims."""
        return any(layer.rotated for layer in self.counts)

    @property
    def router_params(self) -> int:
        """Number of router weights of all layers."""
        return sum(layer.router_params(self.shape) for layer in self.counts)

    def active_fraction(self, routers: bool = True) -> float:
        """Return the parameters that a token uses, as a fraction of the dense decoder's, the same for all tokens.

        `routers`: whether theirs count; without them it is the paper's p.
        """
        return active_fraction(self.shape, self.widths(), self.router_params if routers else 0)

    def totals(self) -> dict[str, Any]:
        """Return totals over all layers: layers, experts, and decoder parameters of the dense model, active and stored, with
        routers."""
        total = decoder_params(self.shape)
        stored = [(layer.union, layer.qk_dims, layer.value_dims) for layer in self.counts]
        return {
            "num_layers": self.shape.num_layers,
            "num_experts": self.num_experts,
            "active_fraction": self.active_fraction(),
            "decoder_params": total,
            "active_decoder_params": round(self.active_fraction() * total),
            "stored_decoder_params": int(active_params(self.shape, stored)) + self.router_params,
            "router_params": self.router_params,
        }

    def describe(self) -> list[dict[str, Any]]:
        """Return one row per layer, for a table; the keys are columns, `active` is the fraction of the layer's parameters."""
        s = self.shape
        full = decoder_params(s) / s.num_layers

        def active(layer: LayerCounts) -> float:
            used = layer_params(s, layer.width, layer.qk_dims, layer.value_top_k) + layer.router_params(s)
            return float(used) / full

        return [
            {
                "layer": i,
                "shared": layer.shared_size,
                "expert_size": layer.expert_size,
                "top_k": layer.top_k,
                "width": layer.width,
                "width_share": layer.width / s.mlp_size,
                "union_share": layer.union / s.mlp_size,
                "qk_dims": layer.qk_dims,
                "value_dims": layer.value_top_k,
                "active": active(layer),
            }
            for i, layer in enumerate(self.counts)
        ]

    def without_repair(self) -> Plan:
        """Return the plan before its projections were refitted."""
        notes = {name: note for name, note in self.notes.items() if name != REPAIRED}
        return replace(self, layers=tuple(replace(layer, refit={}) for layer in self.layers), notes=notes)

    def save(self, folder: Path) -> None:
        """Write both files atomically; the same plan gives the same bytes. Raises UserError if they cannot be written."""
        tensors: dict[str, Tensor] = {}
        for i, layer in enumerate(self.layers):
            fields = {name: getattr(layer, field) for field, name in (TENSORS | FINE | ROTATION).items()}
            parts = {name: t for name, t in fields.items() if t is not None}
            parts |= {f"{ROUTER}{k}": v for k, v in layer.value_router.items()}
            parts |= {f"{REFIT}{k}": v for k, v in layer.refit.items()}
            parts["router_weight"] = _halved(layer.router_weight)
            parts |= {name: _packed(parts[name]) for name in PACKED if name in parts}
            tensors |= {f"layers.{i}.{name}": t.contiguous().cpu() for name, t in parts.items()}
        data = save(tensors, metadata={"format": FORMAT})
        own: dict[str, Any] = {
            "value_top_k": [layer.value_top_k for layer in self.layers],
            "experts_per_token": [layer.top_k for layer in self.layers],
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
        }
        atomic_write(folder / "plan.safetensors", data)
        write_head(folder, self, own)

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read and check a plan of experts. Raises UserError if the folder holds none or a damaged one."""
        head, tensors = read_head(folder), folder / "plan.safetensors"
        if is_of_inputs(head):
            raise UserError(
                f"{folder} uses sparse inputs, and this command needs experts",
                Advice("method.name", "to convert the model to an MoE", "carve", here=False),
            )
        if not tensors.is_file():
            raise UserError(f"{folder} holds no plan (plan.json and plan.safetensors); make one with `tomoe plan`")
        with damage_in_a_sentence(folder):
            known = validated(_Head, head)
            shape = known["shape"]
            for numbers in (known["value_top_k"], known["experts_per_token"]):
                if len(numbers) != shape.num_layers:
                    raise ValueError(f"it holds {len(numbers)} layers, its model has {shape.num_layers}")
        if sha256(tensors) != known["tensors_sha256"]:
            raise UserError(
                f"{tensors} does not belong to plan.json beside it (checksums differ); copy both files again"
            )
        with damage_in_a_sentence(folder):
            chosen = list(zip(known["value_top_k"], known["experts_per_token"], strict=True))
            layers = _read_layers(tensors, shape, chosen)
        return cls(shape, layers, known["source"], known["dense_config"], known["recipe"], known["notes"])


class _Head(TypedDict):
    """plan.json of experts, as far as it is read."""

    shape: Shape
    value_top_k: list[StrictInt]
    experts_per_token: list[StrictInt]
    tensors_sha256: str
    source: str
    dense_config: dict[str, Any]
    recipe: dict[str, Any]
    notes: Notes


def _broken_layer(i: int, error: str) -> UserError:
    return UserError(f"layer {i} of the plan is broken: {error}; make the plan again with `tomoe plan`")


def _halved(t: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return the tensor in bfloat16 if that is exact, as for routers of a bfloat16 conversion: half of the bytes."""
    rounded = t.bfloat16()
    return rounded if bool((rounded.float() == t).all()) else t


def _packed(mask: Bool[Tensor, "*N F"]) -> UInt8[Tensor, "*N bytes"]:
    """Pack a mask into bytes of eight neurons, lowest bit first; the last byte is padded with zeros."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy(), axis=-1, bitorder="little"))


def _unpacked(packed: UInt8[Tensor, "*N bytes"], neurons: int) -> Bool[Tensor, "*N F"]:
    """Unpack a packed mask. Raises ValueError if bits are set for more neurons."""
    mask = torch.from_numpy(np.unpackbits(packed.numpy(), axis=-1, bitorder="little")).bool()
    if bool(mask[..., neurons:].any()):
        raise ValueError("its experts have more neurons than the model")
    return mask[..., :neurons]


def _read_layers(path: Path, shape: ModelShape, chosen: list[tuple[int, int]]) -> tuple[LayerPlan, ...]:
    """Read the layers, with routers in float32 whatever they are stored in. Raises as `checked_layers` does."""
    layers = []
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        stored = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        names_of_layers = list(checked_layers(stored, shape))
        for i, (names, (value_top_k, top_k)) in enumerate(zip(names_of_layers, chosen, strict=True)):
            read = {part: file.get_tensor(f"layers.{i}.{part}") for part in names}
            read |= {part: _unpacked(read[part], shape.mlp_size) for part in PACKED if part in read}
            kept = (*MASKS, *PACKED)
            tensors = {part: t if part in kept or part.startswith(REFIT) else t.float() for part, t in read.items()}
            router = {part.removeprefix(ROUTER): t for part, t in tensors.items() if part.startswith(ROUTER)}
            fields = {field: tensors[name] for field, name in (TENSORS | FINE | ROTATION).items() if name in tensors}
            refit = {part.removeprefix(REFIT): t for part, t in tensors.items() if part.startswith(REFIT)}
            layers.append(LayerPlan(**fields, value_top_k=value_top_k, value_router=router, refit=refit, top_k=top_k))
    return tuple(layers)
