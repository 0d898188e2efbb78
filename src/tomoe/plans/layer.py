"""One decoder layer of a plan, as tensors and in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tomoe.budget import router_params
from tomoe.model.shape import ModelShape
from tomoe.plans.tensors import FIELDS, always_used, layer_shapes, refit_shapes, router_shapes
from tomoe.recipe.target_rules import Form


@dataclass(frozen=True)
class LayerCounts:
    """What one decoder layer keeps, in numbers."""

    num_experts: int  # N
    expert_size: int  # neurons of one expert (of the narrowest one, should they differ)
    widest: int  # neurons of the widest expert
    shared_size: int  # neurons of the shared part; 0 for overlapping experts
    form: Form  # of the experts
    top_k: int  # experts of a token
    union: int  # neurons that some token can use
    members: int  # neurons of all experts and of the shared part, counted once for each expert that has them
    always_used: int  # fine-grained experts that every token uses
    rotary_pairs: int  # rotary pairs that Q and K keep
    unpaired_dims: int  # dims that RoPE does not rotate, which Q and K keep
    value_dims: int  # dims of V and O that any token uses
    value_top_k: int  # value dims of one token
    value_embedding: int  # numbers in the embedding of the value router; 0 if tokens choose no value dims
    rotated: bool  # whether value dims are in a basis of their own

    @property
    def width(self) -> int:
        """Neurons per token."""
        return self.shared_size + self.top_k * self.expert_size

    def router_params(self, shape: ModelShape) -> int:
        """Number of router weights."""
        return router_params(shape, self.num_experts, self.value_embedding)

    @property
    def qk_dims(self) -> int:
        """Kept dims of Q and K per head."""
        return 2 * self.rotary_pairs + self.unpaired_dims

    def error(self, shape: ModelShape) -> str | None:
        """Say what is wrong with these numbers; None if nothing is."""
        if self.expert_size < 1:
            return "an expert has no neuron"
        if self.expert_size != self.widest:
            return f"its experts have unequal widths ({self.expert_size} to {self.widest})"
        fine = self.form == "fine"
        if not 1 <= self.top_k <= (self.num_experts if fine else 1):
            return f"a token uses {self.top_k} of its {self.num_experts} experts"
        if fine and not self.members == self.union == shape.mlp_size:
            return "a neuron is in no expert, or in several"
        if shape.head_dim and (not self.qk_dims or not 1 <= self.value_top_k <= self.value_dims):
            return f"it keeps no Q/K dim, or K = {self.value_top_k} of {self.value_dims} V/O dims"
        if not self.value_embedding and self.value_top_k != self.value_dims:
            return "tokens are to choose value dims, but it has no value router"
        if self.value_embedding and (self.value_dims != shape.head_dim or self.value_top_k == shape.head_dim):
            return "it has a value router, but no choice among all V/O dims"
        return None


def dense_attention(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of a `LayerPlan` with dense attention."""
    qk, values = (torch.ones(n, dtype=torch.bool) for n in (shape.num_qk_choices, shape.head_dim))
    return {"qk_kept": qk, "value_kept": values, "value_top_k": shape.head_dim}


@dataclass(frozen=True)
class LayerPlan:
    """What one decoder layer keeps. All experts of a layer have the same width.

    There are two forms. `overlapping` (the paper's): a token uses one expert, and experts share neurons. `fine`: every
    neuron is in exactly one expert or in the shared part, and a token uses the shared part and `top_k` experts.
    """

    expert_masks: Bool[Tensor, "N F"]
    """Neuron f belongs to expert n. Stored as the tensor `expert_neurons`."""
    router_weight: Float[Tensor, "N D"]
    """One row per expert."""
    qk_kept: Bool[Tensor, " Q"]
    """Rotary pairs, then unpaired dims, that Q and K keep for every token."""
    value_kept: Bool[Tensor, " C"]
    """Dims of V and O that any token uses, in the basis of `value_rotation`."""
    value_top_k: int
    """K, the value dims of one token; fewer than are kept only if a value router chooses among them."""
    value_router: dict[str, Tensor] = field(default_factory=dict)
    """The tensors of `plan.tensors.router_shapes`, or empty."""
    refit: dict[str, Tensor] = field(default_factory=dict)
    """Refitted projections by repair: `down.weight` [D F], or `down.left` [D r] and `down.right` [r F], whose product is
    added to the dense matrix; the same under `output` [D H*C], not rotated. Empty: the dense matrices stay."""
    shared_mask: Bool[Tensor, " F"] | None = None
    """Neurons that every token uses; None for overlapping experts."""
    router_bias: Float[Tensor, " N"] | None = None
    """Added to the router's logits; None for overlapping experts."""
    top_k: int = 1
    """Experts of a token."""
    value_rotation: Float[Tensor, "G C C"] | None = None
    """Orthogonal matrix of every key/value head, whose columns are the V/O dims; None: the model's own dims."""

    def refitted(self, part: Literal["down", "output"], weight: Float[Tensor, "D n"]) -> Float[Tensor, "D n"]:
        """Return the matrix that replaces the dense `weight` of a projection, in its dtype; `weight` if none does."""
        if f"{part}.weight" in self.refit:
            return self.refit[f"{part}.weight"].to(weight)
        if f"{part}.left" in self.refit:
            left, right = (self.refit[f"{part}.{side}"].to(weight.device).float() for side in ("left", "right"))
            return (weight.float() + left @ right).to(weight.dtype)
        return weight

    @property
    def form(self) -> Form:
        """The form of the experts, as their tensors show."""
        return "overlapping" if self.shared_mask is None else "fine"

    @property
    def _routers(self) -> list[Tensor]:
        biases = [] if self.router_bias is None else [self.router_bias]
        return [self.router_weight, *self.value_router.values(), *biases]

    @property
    def always_used(self) -> Bool[Tensor, " N"]:
        """The fine-grained experts that every token uses, because their bias is ALWAYS."""
        assert self.router_bias is not None
        return always_used(self.router_bias)

    def count(self, s: ModelShape) -> LayerCounts:
        """Count what the layer keeps. `tensor_error` must have found nothing."""
        widths, pairs = self.expert_masks.sum(1), s.rotary_size // 2
        used = self.expert_masks.any(0) if self.shared_mask is None else self.expert_masks.any(0) | self.shared_mask
        shared = 0 if self.shared_mask is None else int(self.shared_mask.sum())
        return LayerCounts(
            num_experts=len(self.expert_masks),
            expert_size=int(widths.min()),
            widest=int(widths.max()),
            shared_size=shared,
            form=self.form,
            top_k=self.top_k,
            union=int(used.sum()),
            members=int(widths.sum()) + shared,
            always_used=0 if self.router_bias is None else int(self.always_used.sum()),
            rotary_pairs=int(self.qk_kept[:pairs].sum()),
            unpaired_dims=int(self.qk_kept[pairs:].sum()),
            value_dims=int(self.value_kept.sum()),
            value_top_k=self.value_top_k,
            value_embedding=len(self.value_router["norm.bias"]) if self.value_router else 0,
            rotated=self.value_rotation is not None,
        )

    def tensor_error(self, s: ModelShape) -> str | None:
        """Say what is wrong with the shapes or values of the tensors; None if nothing is."""
        n = len(self.expert_masks)
        for name, shape in layer_shapes(s, n, self.shared_mask is not None).items():
            t = getattr(self, FIELDS[name])
            if t is None or tuple(t.shape) != shape:
                return f"{name} has shape {None if t is None else tuple(t.shape)}, the model needs {shape}"
        if n < 1:
            return "it has no expert"
        if self.value_router:
            parts = router_shapes(s, len(self.value_router.get("norm.bias", ())))
            shapes = {name: tuple(t.shape) for name, t in self.value_router.items()}
            if shapes != parts:
                return f"its value router holds {shapes}, the model needs {parts}"
        if self.value_rotation is not None and (error := s.rotation_error(self.value_rotation)):
            return error
        stored = {name: tuple(t.shape) for name, t in self.refit.items()}
        if stored != (needed := refit_shapes(s, stored)):
            return f"its refitted projections are {stored}, the model needs {needed}"
        for what, tensors in (("router", self._routers), ("refitted projection", self.refit.values())):
            if not all(bool(t.isfinite().all()) for t in tensors):
                return f"a {what} holds a number that is not finite"
        return None
