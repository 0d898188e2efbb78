"""The meaning of a mask: the dense model runs with some of its dims multiplied by zero.

Slow and exact. Training runs it with sampled masks. With a plan's masks it is the definition that the MoE in tomoe/moe
must reproduce (the paper's pseudo-MoE: Eq. 17, App. B.3). No modeling code is copied: everything is a hook on the
family's own modules and is removed at the end of the `with` block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.model.heads import rotate_heads
from tomoe.model.hooks import hooked, input_of
from tomoe.model.mlp import Linear
from tomoe.model.shape import ModelShape
from tomoe.model.structure import LayerParts, layer_parts
from tomoe.plan import LayerPlan, Plan
from tomoe.pruning.forms import planned_experts
from tomoe.pruning.learned.value_logits import ValueLogits, top_values
from tomoe.pruning.routing import Routing


@runtime_checkable
class LayerMasks(Protocol):
    """The masks of one decoder layer. T counts tokens over the whole batch; None keeps everything."""

    @property
    def value_rotation(self) -> Float[Tensor, "G C C"] | None:
        """The basis that `values` cuts in; None: the model's own."""

    def neurons(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]: ...
    def qk(self) -> Float[Tensor, " C"] | None: ...
    def values(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "*T C"] | None: ...


class PlannedLayerMasks:
    """The masks of a plan: no noise, the decisions of inference."""

    def __init__(self, layer: LayerPlan, shape: ModelShape, device: torch.device):
        self.experts = planned_experts(layer, device)
        self.qk_mask = shape.expand_qk(layer.qk_kept.float()).to(device)
        self.value_mask = layer.value_kept.float().to(device)
        self.value_rotation = None if layer.value_rotation is None else layer.value_rotation.to(device)
        self.top_k, self.layer = layer.value_top_k, layer
        # refitted matrices that were copied to a device, by projection
        self.copied: dict[str, Tensor] = {}
        # of the last forward pass
        self.routing: Routing | None = None
        self.value_logits: ValueLogits | None = None
        if layer.value_router:
            embedding_size = layer.value_router["project_in.weight"].shape[0]
            self.value_logits = ValueLogits(shape.hidden_size, embedding_size, shape.head_dim)
            self.value_logits.load_state_dict(layer.value_router)
            self.value_logits.to(device)

    def neurons(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        self.routing, neurons = self.experts.choose(x)
        return neurons

    def refitted(self, part: Literal["down", "output"], weight: Float[Tensor, "D n"]) -> Float[Tensor, "D n"]:
        """Return the matrix that replaces the dense `weight` of a projection; beside the CPU it is copied once."""
        if weight.device.type == "cpu":
            return self.layer.refitted(part, weight)
        if part not in self.copied:
            self.copied[part] = self.layer.refitted(part, weight)
        return self.copied[part]

    def qk(self) -> Float[Tensor, " C"]:
        return self.qk_mask

    def values(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "*T C"]:
        if self.value_logits is None:
            return self.value_mask
        return top_values(self.value_logits(x), self.top_k)


def planned_masks(plan: Plan, device: torch.device | str = "cpu") -> list[PlannedLayerMasks]:
    """Return the masks of every layer of a plan, on `device`."""
    return [PlannedLayerMasks(layer, plan.shape, torch.device(device)) for layer in plan.layers]


def _tile(mask: Float[Tensor, "*T C"], like: Tensor) -> Tensor:
    """Repeat [.., C] to [.., heads * C], in the dtype and leading shape of the projection that it multiplies."""
    tiled = mask.to(like.dtype).repeat(*[1] * (mask.dim() - 1), like.shape[-1] // mask.shape[-1])
    return tiled if mask.dim() == 1 else tiled.view(*like.shape[:-1], -1)


def mask_hooks(parts: LayerParts, layer_masks: LayerMasks) -> Iterator[RemovableHandle]:
    """Hook one layer: one multiplication for the MLP (two would leave dropped neurons without a gradient).

    Values are rotated behind V and back before O: activations, not weights, which may be packed or refitted.
    """
    rotation = layer_masks.value_rotation
    now: dict[str, Tensor | None] = {}

    def choose_neurons(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now["neurons"] = layer_masks.neurons(input_of(args, kwargs).flatten(0, -2))

    def mask_neurons(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        h, mask = args[0], now["neurons"]
        assert mask is not None
        return (h * mask.view(h.shape).to(h.dtype),)

    def choose_values(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now["values"], now["qk"] = layer_masks.values(input_of(args, kwargs).flatten(0, -2)), layer_masks.qk()

    def mask_qk(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> Tensor:
        mask = now["qk"]
        return y if mask is None else y * _tile(mask, y)

    def mask_v(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> Tensor:
        mask = now["values"]
        if mask is None:
            return y
        turned = y if rotation is None else rotate_heads(y, rotation)
        return turned * _tile(mask, y)

    def mask_o(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        mask = now["values"]
        if mask is None:
            return args
        kept = args[0] * _tile(mask, args[0])
        return (kept if rotation is None else rotate_heads(kept, rotation, inverse=True),)

    yield parts.mlp.register_forward_pre_hook(choose_neurons, with_kwargs=True)
    yield parts.down.register_forward_pre_hook(mask_neurons)
    if isinstance(layer_masks, PlannedLayerMasks):
        yield from _refit_hooks(parts, layer_masks)
    if parts.of_attention is None:
        return
    yield parts.attention.register_forward_pre_hook(choose_values, with_kwargs=True)
    yield parts.q.register_forward_hook(mask_qk)
    yield parts.k.register_forward_hook(mask_qk)
    yield parts.v.register_forward_hook(mask_v)
    yield parts.o.register_forward_pre_hook(mask_o)


def _refit_hooks(parts: LayerParts, masks: PlannedLayerMasks) -> Iterator[RemovableHandle]:
    """Let the projections that the plan refitted compute with their new matrices."""
    names = {name.partition(".")[0] for name in masks.layer.refit}
    if "down" in names:
        yield with_weight(parts.down, partial(masks.refitted, "down"))
    if "output" in names:
        yield with_weight(parts.o, partial(masks.refitted, "output"))


def with_weight(projection: Linear, weight: Callable[[Tensor], Tensor] | Tensor) -> RemovableHandle:
    """Let a projection compute with another matrix [D n], given or made from its own, whatever was done to its input."""

    def hook(_: Any, args: tuple[Any, ...], __: Tensor) -> Tensor:
        replacement = weight if isinstance(weight, Tensor) else weight(projection.weight)
        return F.linear(args[0], replacement.to(args[0]), projection.bias)

    return projection.register_forward_hook(hook)


@contextmanager
def masked(model: nn.Module, masks: Sequence[LayerMasks]) -> Iterator[None]:
    """Apply `masks` to `model` inside the `with` block; outside it is the untouched dense model again.

    With activation checkpointing the backward pass runs layers again, so it belongs inside the block too. Raises
    ValueError if there is not one mask per layer.
    """
    with hooked(handle for pair in zip(layer_parts(model), masks, strict=True) for handle in mask_hooks(*pair)):
        yield
