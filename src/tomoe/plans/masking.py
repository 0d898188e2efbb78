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
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.model.hooks import hooked, input_of
from tomoe.model.mlp import WeightMatrix
from tomoe.model.shape import ModelShape
from tomoe.model.structure import LayerParts, layer_parts
from tomoe.plans.attention_masks import AttentionMasks, PlannedAttention, attention_hooks
from tomoe.plans.layer import LayerPlan
from tomoe.plans.plan import Plan
from tomoe.plans.routing import ExpertRouter, Routing, route


@runtime_checkable
class LayerMasks(Protocol):
    """The masks of one layer: from a plan, or sampled in a training step."""

    @property
    def attention(self) -> AttentionMasks | None:
        """The masks of its attention; None if it stays dense."""

    def neurons(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        """Return the neurons that each token uses, from the input of the MLP."""


class PlannedLayerMasks:
    """The masks of a plan: no noise, decisions as at inference."""

    def __init__(self, layer: LayerPlan, shape: ModelShape, device: torch.device):
        self.layer, self.experts = layer, PlannedExperts(layer, device)
        self.attention = PlannedAttention.of(layer, shape, device)
        self.copied: dict[str, Tensor] = {}  # refitted matrices that were copied to a device, by projection
        self.routing: Routing | None = None  # of the last forward pass

    def neurons(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        self.routing, neurons = self.experts.choose(x_TD)
        return neurons

    def refitted(self, part: Literal["down", "output"], weight: Float[Tensor, "D n"]) -> Float[Tensor, "D n"]:
        """Return the matrix that replaces the dense `weight` of a projection; copied to its device once."""
        if weight.device.type == "cpu":
            return self.layer.refitted(part, weight)
        if part not in self.copied:
            self.copied[part] = self.layer.refitted(part, weight)
        return self.copied[part]


def planned_masks(plan: Plan, device: torch.device | str = "cpu") -> list[PlannedLayerMasks]:
    """Return the masks of every layer of a plan, on `device`."""
    return [PlannedLayerMasks(layer, plan.shape, torch.device(device)) for layer in plan.layers]


def mask_hooks(parts: LayerParts, masks: LayerMasks) -> Iterator[RemovableHandle]:
    """Hook one layer: one multiplication for the MLP (two would leave dropped neurons without a gradient)."""
    now: dict[str, Tensor] = {}

    def choose_neurons(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now["neurons"] = masks.neurons(input_of(args, kwargs).flatten(0, -2))

    def mask_neurons(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # a mask of float32 for each layer is more than memory should hold until the next step
        return (args[0] * now.pop("neurons").view(args[0].shape).to(args[0].dtype),)

    yield parts.mlp.module.register_forward_pre_hook(choose_neurons, with_kwargs=True)
    yield parts.mlp.down.register_forward_pre_hook(mask_neurons)
    if isinstance(masks, PlannedLayerMasks):
        yield from _refit_hooks(parts, masks)
    if masks.attention is not None:
        yield from attention_hooks(parts, masks.attention)


def _refit_hooks(parts: LayerParts, masks: PlannedLayerMasks) -> Iterator[RemovableHandle]:
    """Hook the projections that the plan refitted to compute with their new matrices."""
    names = {name.partition(".")[0] for name in masks.layer.refit}
    if "down" in names:
        yield with_weight(parts.mlp.down, partial(masks.refitted, "down"))
    if "output" in names:
        yield with_weight(parts.attention.o, partial(masks.refitted, "output"))


def with_weight(projection: WeightMatrix, weight: Callable[[Tensor], Tensor] | Tensor) -> RemovableHandle:
    """Hook a projection to compute with another matrix [D n], given or made from its own, whatever was done to its input."""

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


class PlannedExperts:
    """The experts of one layer. `choose` routes tokens: it returns their experts and the mask of their neurons."""

    def __init__(self, layer: LayerPlan, device: torch.device):
        bias, shared = layer.router_bias, layer.shared_mask
        self.router = ExpertRouter.of(layer.router_weight.to(device), None if bias is None else bias.to(device))
        self.top_k = None if shared is None else layer.top_k
        self.expert_masks: Float[Tensor, "N F"] | None = None  # of experts that overlap
        if shared is None:
            self.expert_masks = layer.expert_masks.float().to(device)
        else:
            # the expert of each neuron, the number of experts for shared ones
            expert = layer.expert_masks.int().argmax(0).masked_fill(shared, len(layer.expert_masks))
            self.expert_of_neuron: Int[Tensor, " F"] = expert.to(device)

    def choose(self, x_TD: Float[Tensor, "T D"]) -> tuple[Routing, Float[Tensor, "T F"]]:
        routing = route(self.router(x_TD), self.top_k)
        if self.expert_masks is not None:
            return routing, routing.assignment @ self.expert_masks
        # a product with hundreds of masks takes ten times as long; the column of ones is the shared part
        return routing, F.pad(routing.assignment, (0, 1), value=1.0).index_select(1, self.expert_of_neuron)
