"""A plan in numbers: what `inspect`, tables, summaries and warnings need of it. Needs neither torch nor numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal

from tomoe.budget import active_params, decoder_params
from tomoe.errors import UserError
from tomoe.model.shape import ModelShape
from tomoe.plan.head import PlanHead, damage_in_a_sentence
from tomoe.plan.layout import ROUTER, TOO_MANY_NEURONS, StoredTensor, always_used, checked_layers
from tomoe.plan.raw import RawTensors


@dataclass(frozen=True)
class LayerCounts:
    """What one decoder layer keeps, in numbers."""

    num_experts: int
    """N"""
    expert_size: int
    """Neurons of one expert (of the narrowest one, should they differ)."""
    widest: int
    """Neurons of the widest expert."""
    shared_size: int
    """Neurons of the shared part; 0 for overlapping experts."""
    fine: bool
    """Whether the experts are fine-grained."""
    top_k: int
    """Experts of a token."""
    union: int
    """Neurons that some token can use."""
    members: int
    """Neurons of all experts and of the shared part, counted once for each expert that has them."""
    always_used: int
    """Fine-grained experts that every token uses."""
    rotary_pairs: int
    """Rotary pairs that Q and K keep."""
    unpaired_dims: int
    """Dims that RoPE does not rotate, which Q and K keep."""
    value_dims: int
    """Dims of V and O that any token uses."""
    value_top_k: int
    """Value dims of one token."""
    value_embedding: int
    """Numbers in the embedding of the value router; 0 if tokens choose no value dims."""
    rotated: bool
    """Whether value dims are in a basis of their own."""
    router_params: int
    """Numbers in the routers."""

    @property
    def width(self) -> int:
        """Neurons that a token uses."""
        return self.shared_size + self.top_k * self.expert_size

    @property
    def qk_dims(self) -> int:
        """Dims of a head that Q and K keep."""
        return 2 * self.rotary_pairs + self.unpaired_dims

    def error(self, shape: ModelShape) -> str | None:
        """What is wrong with these numbers; None if nothing is."""
        if self.num_experts < 1 or self.expert_size < 1:
            return "an expert has no neuron"
        if self.expert_size != self.widest:
            return f"its experts have unequal widths ({self.expert_size} to {self.widest})"
        if not 1 <= self.top_k <= (self.num_experts if self.fine else 1):
            return f"a token uses {self.top_k} of its {self.num_experts} experts"
        if self.fine and not self.members == self.union == shape.mlp_size:
            return "a neuron is in no expert, or in several"
        if not self.qk_dims or not 1 <= self.value_top_k <= self.value_dims:
            return f"it keeps no Q/K dim, or K = {self.value_top_k} of {self.value_dims} V/O dims"
        if not self.value_embedding and self.value_top_k != self.value_dims:
            return "tokens are to choose value dims, but it has no value router"
        if self.value_embedding and (self.value_dims != shape.head_dim or self.value_top_k == shape.head_dim):
            return "it has a value router, but no choice among all V/O dims"
        return None


def broken_layer(i: int, error: str) -> UserError:
    """The refusal of a plan whose layer i holds what `error` says."""
    return UserError(f"layer {i} of the plan is broken: {error}; make the plan again with `tomoe plan`")


class Counted:
    """What both kinds of plan can say: with its tensors (`Plan`), and in numbers alone (`PlanCounts`)."""

    shape: ModelShape
    counts: tuple[LayerCounts, ...]
    recipe: dict[str, Any]
    notes: dict[str, Any]
    dense_config: dict[str, Any]

    def check_counts(self) -> None:
        """Raises UserError, in one sentence, if the numbers contradict each other or the model."""
        if len(self.counts) != self.shape.num_layers:
            raise UserError(f"the plan has {len(self.counts)} layers, but its model has {self.shape.num_layers}")
        for i, layer in enumerate(self.counts):
            if error := layer.error(self.shape):
                raise broken_layer(i, error)
        if len({layer.fine for layer in self.counts}) > 1:
            raise UserError(
                "the layers of the plan differ: some have fine-grained experts, others overlapping ones; make the plan "
                "again with `tomoe plan`"
            )
        experts = sorted({layer.num_experts for layer in self.counts})
        embeddings = sorted({layer.value_embedding for layer in self.counts if layer.value_embedding})
        if len(experts) > 1 or len(embeddings) > 1:
            sizes = f"{experts} experts" if len(experts) > 1 else f"embeddings of {embeddings}"
            raise UserError(f"the layers of the plan differ: {sizes}; make the plan again with `tomoe plan`")

    def widths(self) -> list[tuple[int, int, int]]:
        """Return (MLP width, Q/K dims, V/O dims of a token) of every layer."""
        return [(layer.width, layer.qk_dims, layer.value_top_k) for layer in self.counts]

    @property
    def num_experts(self) -> int:
        """Experts of a layer (N)."""
        return self.counts[0].num_experts

    @property
    def form(self) -> Literal["overlapping", "fine"]:
        """The form of the experts."""
        return "fine" if self.counts[0].fine else "overlapping"

    @property
    def dynamic_values(self) -> bool:
        """Whether tokens choose their V/O dims in any layer."""
        return any(layer.value_embedding for layer in self.counts)

    @property
    def rotated(self) -> bool:
        """Whether V/O dims are in a basis of their own in any layer."""
        return any(layer.rotated for layer in self.counts)

    def active_fraction(self) -> float:
        """Return the fraction of decoder parameters that are active for a token, the paper's p; the same for all tokens."""
        return float(active_params(self.shape, self.widths())) / decoder_params(self.shape)

    def totals(self) -> dict[str, Any]:
        """Return counts over all layers: layers, experts, and decoder parameters that exist, are active, are stored."""
        total = decoder_params(self.shape)
        stored = [(layer.union, layer.qk_dims, layer.value_dims) for layer in self.counts]
        return {
            "num_layers": self.shape.num_layers,
            "num_experts": self.num_experts,
            "active_fraction": self.active_fraction(),
            "decoder_params": total,
            "active_decoder_params": round(self.active_fraction() * total),
            "stored_decoder_params": int(active_params(self.shape, stored)),
            "router_params": sum(layer.router_params for layer in self.counts),
        }

    def describe(self) -> list[dict[str, Any]]:
        """Return one row per layer, for a table; the keys are columns, `active` is the fraction of the layer's parameters."""
        s = self.shape
        layer_params = decoder_params(s) / s.num_layers
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
                "active": float(active_params(s, [(layer.width, layer.qk_dims, layer.value_top_k)])) / layer_params,
            }
            for i, layer in enumerate(self.counts)
        ]


@dataclass(frozen=True)
class PlanCounts(Counted):
    """A plan in numbers. Raises UserError at construction if they contradict each other."""

    shape: ModelShape
    counts: tuple[LayerCounts, ...]
    source: str = ""
    dense_config: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_counts()

    @classmethod
    def load(cls, folder: Path) -> PlanCounts:
        """Read the numbers of a plan: of its tensors the masks alone, and no checksum, as a repaired plan can have gigabytes.

        Raises UserError if the folder holds no plan, one of an unknown format, or one whose numbers contradict each other.
        """
        head = PlanHead.read(folder)
        with damage_in_a_sentence(folder), RawTensors(head.tensors) as raw:
            layers = list(checked_layers(raw.stored(), head.shape))
            counts = tuple(
                _count(raw, i, parts, head.shape, *chosen)
                for i, (parts, chosen) in enumerate(zip(layers, head.chosen, strict=True))
            )
        return cls(head.shape, counts, **head.metadata)


def _count(
    raw: RawTensors, i: int, parts: dict[str, StoredTensor], s: ModelShape, value_top_k: int, top_k: int
) -> LayerCounts:
    """Count what layer i keeps, whose tensors have the right shapes."""
    qk, value = (raw.mask(f"layers.{i}.{name}") for name in ("qk_kept", "value_kept"))
    fine, pairs = "shared_neurons" in parts, s.rotary_size // 2
    experts = _neuron_sets(raw, f"layers.{i}.expert_neurons", parts["expert_neurons"], s.mlp_size)
    shared = _neuron_sets(raw, f"layers.{i}.shared_neurons", parts["shared_neurons"], s.mlp_size) if fine else []
    biases = raw.floats(f"layers.{i}.router_bias") if fine else []
    widths, shared_size = [neurons.bit_count() for neurons in experts], sum(neurons.bit_count() for neurons in shared)
    union = reduce(or_, [*experts, *shared], 0)
    routers = [size for name, (size, _) in parts.items() if name.startswith((ROUTER, "router_"))]
    return LayerCounts(
        num_experts=len(experts), expert_size=min(widths, default=0), widest=max(widths, default=0),
        shared_size=shared_size, fine=fine, top_k=top_k, union=union.bit_count(), members=sum(widths) + shared_size,
        always_used=sum(bool(always_used(bias)) for bias in biases), rotary_pairs=qk[:pairs].count(1),
        unpaired_dims=qk[pairs:].count(1), value_dims=value.count(1), value_top_k=value_top_k,
        value_embedding=parts[f"{ROUTER}norm.bias"][0][0] if f"{ROUTER}norm.bias" in parts else 0,
        rotated="value_rotation" in parts, router_params=sum(math.prod(size) for size in routers),
    )  # fmt: skip


def _neuron_sets(raw: RawTensors, name: str, stored: StoredTensor, mlp_size: int) -> list[int]:
    """Each row of a neuron mask as a number in which every neuron of the row has one bit, set."""
    (*_, row_bytes), dtype = stored
    data = raw.mask(name) if dtype == "BOOL" else raw.data(name)
    rows = [int.from_bytes(data[at : at + row_bytes], "little") for at in range(0, len(data), row_bytes)]
    if dtype != "BOOL" and any(row >> mlp_size for row in rows):
        raise ValueError(TOO_MANY_NEURONS)
    return rows
