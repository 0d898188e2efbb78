"""What a mask means: the dense model, run with some of its dims multiplied by zero.

Slow and exact. Training runs it with sampled masks. With a plan's masks it is the definition that the MoE in tomoe/moe
must reproduce, and the pseudo-MoE (app. pmoe) for fine-tuning after conversion. No modelling code is copied: everything
is a hook on the family's own modules, gone when the block is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.model.structure import LayerParts, ModelShape, layer_parts
from tomoe.plan import LayerPlan, Plan
from tomoe.pruning.routing import ExpertRouter, ValueRouter


@runtime_checkable
class LayerMasks(Protocol):
    """The masks of one decoder layer. T counts tokens over the whole batch; None means: everything kept."""

    def neurons(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]: ...
    def qk(self) -> Float[Tensor, " C"] | None: ...
    def values(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "*T C"] | None: ...


class PlannedLayerMasks:
    """A plan's masks: no noise, the decisions of inference."""

    def __init__(self, layer: LayerPlan, shape: ModelShape, device: torch.device):
        self.expert_masks = layer.expert_neurons.float().to(device)
        self.router = ExpertRouter(shape.hidden_size, layer.expert_neurons.shape[0])
        self.router.weight.data = layer.router_weight.to(device)
        self.qk_mask = shape.expand_qk(layer.qk_kept.float()).to(device)
        self.value_mask = layer.value_kept.float().to(device)
        self.top_k = layer.value_top_k
        self.value_router: ValueRouter | None = None
        if layer.value_router:
            embedding_size = layer.value_router["project_in.weight"].shape[0]
            self.value_router = ValueRouter(shape.hidden_size, embedding_size, shape.head_dim)
            self.value_router.load_state_dict(layer.value_router)
            self.value_router.to(device)

    def neurons(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        return self.expert_masks[self.router.decide(x)]

    def qk(self) -> Float[Tensor, " C"]:
        return self.qk_mask

    def values(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "*T C"]:
        if self.value_router is None:
            return self.value_mask
        return self.value_router.decide(self.value_router(x), self.top_k)


def planned_masks(plan: Plan, device: torch.device | str = "cpu") -> list[PlannedLayerMasks]:
    return [PlannedLayerMasks(layer, plan.shape, torch.device(device)) for layer in plan.layers]


def _tile(mask: Float[Tensor, "*T C"], like: Tensor) -> Tensor:
    """[.., C] -> [.., heads * C] in the dtype and leading shape of the projection that it multiplies."""
    tiled = mask.to(like.dtype).repeat(*[1] * (mask.dim() - 1), like.shape[-1] // mask.shape[-1])
    return tiled if mask.dim() == 1 else tiled.view(*like.shape[:-1], -1)


def _hooks(parts: LayerParts, m: LayerMasks) -> list[RemovableHandle]:
    """Hooks of one layer: one multiplication for the MLP (two would leave dropped neurons without a gradient)."""
    now: dict[str, Tensor | None] = {}

    def choose_neurons(_: nn.Module, args: tuple[Any, ...]) -> None:
        now["neurons"] = m.neurons(args[0].flatten(0, -2))

    def mask_neurons(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        h, mask = args[0], now["neurons"]
        assert mask is not None
        return (h * mask.view(h.shape).to(h.dtype),)

    def choose_values(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        now["values"], now["qk"] = m.values(x.flatten(0, -2)), m.qk()

    def mask_qk(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> Tensor:
        mask = now["qk"]
        return y if mask is None else y * _tile(mask, y)

    def mask_v(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> Tensor:
        mask = now["values"]
        return y if mask is None else y * _tile(mask, y)

    def mask_o(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        mask = now["values"]
        return args if mask is None else (args[0] * _tile(mask, args[0]),)

    return [
        parts.mlp.register_forward_pre_hook(choose_neurons),
        parts.down.register_forward_pre_hook(mask_neurons),
        parts.attention.register_forward_pre_hook(choose_values, with_kwargs=True),
        parts.q.register_forward_hook(mask_qk),
        parts.k.register_forward_hook(mask_qk),
        parts.v.register_forward_hook(mask_v),
        parts.o.register_forward_pre_hook(mask_o),
    ]


@contextmanager
def masked(model: nn.Module, masks: Sequence[LayerMasks]) -> Iterator[None]:
    """Inside the block, `model` runs with `masks` applied; outside it is the untouched dense model again.

    With activation checkpointing the backward pass runs layers again, so it belongs inside the block too.
    """
    handles: list[RemovableHandle] = []
    try:
        for parts, m in zip(layer_parts(model), masks, strict=True):
            handles += _hooks(parts, m)
        yield
    finally:
        for handle in handles:
            handle.remove()
