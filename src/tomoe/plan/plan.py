"""The plan with its tensors: made by planning and repair, obeyed by folding, written and read whole."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import safe_open

from tomoe.errors import UserError
from tomoe.files import atomic_write, sha256
from tomoe.model.shape import ModelShape
from tomoe.plan.counts import Counted, LayerCounts, broken_layer
from tomoe.plan.head import FINE_FORMAT, FORMAT, REPAIRED, ROTATED_FORMAT, PlanHead, damage_in_a_sentence
from tomoe.plan.layout import (
    FIELDS,
    FINE,
    MASKS,
    NEURON_MASKS,
    REFIT,
    ROTATION,
    ROUTER,
    TENSORS,
    TOO_MANY_NEURONS,
    always_used,
    checked_layers,
    layer_shapes,
    refit_shapes,
    router_shapes,
)  # fmt: skip

# jaxtyping takes long to import; whoever checks shapes has imported it before
if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float


@dataclass(frozen=True)
class LayerPlan:
    """What one decoder layer keeps. All experts of a layer have the same width.

    There are two forms. `overlapping` (the paper's): a token uses one expert, and experts share neurons. `fine`: every
    neuron is in exactly one expert or in the shared part, and a token uses the shared part and `top_k` experts.
    """

    expert_masks: Bool[Any, "N F"]
    """Neuron f belongs to expert n. Stored as the tensor `expert_neurons`."""
    router_weight: Float[Any, "N D"]
    """One row per expert."""
    qk_kept: Bool[Any, " Q"]
    """Rotary pairs, then unpaired dims, that Q and K keep for every token."""
    value_kept: Bool[Any, " C"]
    """Dims of V and O that any token uses, in the basis of `value_rotation`."""
    value_top_k: int
    """K, the value dims of one token; fewer than are kept only if a value router chooses among them."""
    value_router: dict[str, Any] = field(default_factory=dict)
    """The state of `routing.ValueRouter`, or empty."""
    refit: dict[str, Any] = field(default_factory=dict)
    """Refitted projections by repair: `down.weight` [D F], or `down.left` [D r] and `down.right` [r F], whose product is
    added to the dense matrix; the same under `output` [D H*C], not rotated. Empty: the dense matrices stay."""
    shared_mask: Bool[Any, " F"] | None = None
    """Neurons that every token uses; None for overlapping experts."""
    router_bias: Float[Any, " N"] | None = None
    """Added to the router's logits; None for overlapping experts."""
    top_k: int = 1
    """Experts of a token."""
    value_rotation: Float[Any, "G C C"] | None = None
    """Orthogonal matrix of every key/value head, whose columns are the V/O dims; None: the model's own dims."""

    def refitted(self, part: Literal["down", "output"], weight: Any) -> Any:
        """Return the matrix that replaces the dense `weight` [D n] of a projection, in its dtype; `weight` if none does."""
        if f"{part}.weight" in self.refit:
            return self.refit[f"{part}.weight"].to(weight)
        if f"{part}.left" in self.refit:
            left, right = (self.refit[f"{part}.{side}"].to(weight.device).float() for side in ("left", "right"))
            return (weight.float() + left @ right).to(weight.dtype)
        return weight

    @property
    def fine(self) -> bool:
        """Whether the experts are fine-grained."""
        return self.shared_mask is not None

    @property
    def always_used(self) -> Bool[Any, " N"]:
        """The fine-grained experts that every token uses, because their bias is ALWAYS."""
        assert self.router_bias is not None
        return always_used(self.router_bias)

    def count(self, s: ModelShape) -> LayerCounts:
        """What the layer keeps, in numbers. Its tensors must have the shapes that the model needs."""
        widths, pairs = self.expert_masks.sum(1), s.rotary_size // 2
        used = self.expert_masks.any(0) if self.shared_mask is None else self.expert_masks.any(0) | self.shared_mask
        shared = 0 if self.shared_mask is None else int(self.shared_mask.sum())
        routers = [self.router_weight, *self.value_router.values()]
        routers += [] if self.router_bias is None else [self.router_bias]
        return LayerCounts(
            num_experts=len(self.expert_masks), expert_size=int(widths.min()), widest=int(widths.max()), shared_size=shared,
            fine=self.fine, top_k=self.top_k, union=int(used.sum()), members=int(widths.sum()) + shared,
            always_used=int(self.always_used.sum()) if self.fine else 0, rotary_pairs=int(self.qk_kept[:pairs].sum()),
            unpaired_dims=int(self.qk_kept[pairs:].sum()), value_dims=int(self.value_kept.sum()), value_top_k=self.value_top_k,
            value_embedding=len(self.value_router["norm.bias"]) if self.value_router else 0,
            rotated=self.value_rotation is not None, router_params=sum(t.numel() for t in routers),
        )  # fmt: skip


@dataclass(frozen=True)
class Plan(Counted):
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
            if error := _tensor_error(layer, self.shape):
                raise broken_layer(i, error)
        object.__setattr__(self, "counts", tuple(layer.count(self.shape) for layer in self.layers))
        self.check_counts()

    def without_repair(self) -> Plan:
        """The plan as it was before its projections were refitted."""
        notes = {name: note for name, note in self.notes.items() if name != REPAIRED}
        return replace(self, layers=tuple(replace(layer, refit={}) for layer in self.layers), notes=notes)

    def save(self, folder: Path) -> None:
        """Write both files atomically; the same plan gives the same bytes. Raises UserError if they cannot be written."""
        from safetensors.torch import save

        tensors: dict[str, Any] = {}
        for i, layer in enumerate(self.layers):
            names = TENSORS | (FINE if layer.fine else {}) | ({} if layer.value_rotation is None else ROTATION)
            parts = {name: getattr(layer, field) for field, name in names.items()}
            parts |= {f"{ROUTER}{k}": v for k, v in layer.value_router.items()}
            parts |= {f"{REFIT}{k}": v for k, v in layer.refit.items()}
            parts["router_weight"] = _halved(layer.router_weight)
            if layer.fine:
                parts |= {name: _packed(parts[name]) for name in NEURON_MASKS}
            tensors |= {f"layers.{i}.{name}": t.contiguous().cpu() for name, t in parts.items()}
        plan_format = FINE_FORMAT if self.form == "fine" else ROTATED_FORMAT if self.rotated else FORMAT
        data = save(tensors, metadata={"format": plan_format})
        head = {
            "format": plan_format,
            "shape": self.shape.to_dict(),
            "value_top_k": [layer.value_top_k for layer in self.layers],
            "active_fraction": self.active_fraction(),
            "source": self.source,
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
            "dense_config": self.dense_config,
            "recipe": self.recipe,
            "notes": self.notes,
        }
        if plan_format != FORMAT:
            head["experts_per_token"] = [layer.top_k for layer in self.layers]
        atomic_write(folder / "plan.safetensors", data)
        atomic_write(folder / "plan.json", json.dumps(head, indent=2, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read and check a plan; `PlanCounts.load` does where its tensors are not needed, and imports no torch.

        Raises UserError if the folder holds no plan, a damaged one, or one of an unknown format.
        """
        head = PlanHead.read(folder)
        if sha256(head.tensors) != head.checksum:
            raise UserError(
                f"{head.tensors} does not belong to plan.json beside it (checksums differ); copy both files again"
            )
        with damage_in_a_sentence(folder):
            layers = _read_layers(head)
        return cls(head.shape, layers, **head.metadata)


def _halved(t: Any) -> Any:
    """The tensor in bfloat16 if it holds no other values, as routers of a conversion in bfloat16 do: half of the bytes."""
    rounded = t.bfloat16()
    return rounded if bool((rounded.float() == t).all()) else t


def _packed(mask: Any) -> Any:
    """A mask [..., F] as bytes [..., F / 8, rounded up] of eight neurons, the first of them in the lowest bit."""
    import numpy as np
    import torch

    return torch.from_numpy(np.packbits(mask.cpu().numpy(), axis=-1, bitorder="little"))


def _unpacked(packed: Any, neurons: int) -> Any:
    """The mask [..., F] that was packed. Raises ValueError if bits are set for more neurons."""
    import numpy as np
    import torch

    mask = torch.from_numpy(np.unpackbits(packed.numpy(), axis=-1, bitorder="little")).bool()
    if bool(mask[..., neurons:].any()):
        raise ValueError(TOO_MANY_NEURONS)
    return mask[..., :neurons]


def _read_layers(head: PlanHead) -> tuple[LayerPlan, ...]:
    """Read the layers, with routers in float32 whatever they are stored in. Raises as `checked_layers` does."""
    layers = []
    with safe_open(head.tensors, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        stored = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        parts_of_layers = list(checked_layers(stored, head.shape))
        for i, (parts, (value_top_k, top_k)) in enumerate(zip(parts_of_layers, head.chosen, strict=True)):
            read = {part: file.get_tensor(f"layers.{i}.{part}") for part in parts}
            packed = {part: t for part, t in read.items() if part in NEURON_MASKS and parts[part][1] == "U8"}
            read |= {part: _unpacked(t, head.shape.mlp_size) for part, t in packed.items()}
            tensors = {part: t if part in MASKS or part.startswith(REFIT) else t.float() for part, t in read.items()}
            router = {part.removeprefix(ROUTER): t for part, t in tensors.items() if part.startswith(ROUTER)}
            fields = {field: tensors[name] for field, name in (TENSORS | FINE | ROTATION).items() if name in tensors}
            refit = {part.removeprefix(REFIT): t for part, t in tensors.items() if part.startswith(REFIT)}
            layers.append(LayerPlan(**fields, value_top_k=value_top_k, value_router=router, refit=refit, top_k=top_k))
    return tuple(layers)


def _tensor_error(layer: LayerPlan, s: ModelShape) -> str | None:
    """What is wrong with the shapes of a layer's tensors, or with the numbers in them; None if nothing is."""
    n = layer.expert_masks.shape[0]
    for name, shape in layer_shapes(s, n, layer.fine).items():
        t = getattr(layer, FIELDS[name])
        if t is None or tuple(t.shape) != shape:
            return f"{name} has shape {None if t is None else tuple(t.shape)}, the model needs {shape}"
    if n < 1:
        return "it has no expert"
    if layer.value_router:
        parts = router_shapes(s, len(layer.value_router.get("norm.bias", ())))
        shapes = {name: tuple(t.shape) for name, t in layer.value_router.items()}
        if shapes != parts:
            return f"its value router holds {shapes}, the model needs {parts}"
    if layer.value_rotation is not None and (error := s.rotation_error(layer.value_rotation)):
        return error
    stored = {name: tuple(t.shape) for name, t in layer.refit.items()}
    if stored != (needed := refit_shapes(s, stored)):
        return f"its refitted projections are {stored}, the model needs {needed}"
    tensors = {
        "router": [layer.router_weight, *layer.value_router.values(), *([layer.router_bias] if layer.fine else [])],
        "refitted projection": layer.refit.values(),
    }
    for what, group in tensors.items():
        if not all(bool((abs(t) < math.inf).all()) for t in group):
            return f"a {what} holds a number that is not finite"
    return None
