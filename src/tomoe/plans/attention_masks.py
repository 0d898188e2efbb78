"""The meaning of an attention mask: the dense model runs with some dims of Q, K, V and O multiplied by zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.model.attention import rotate_heads
from tomoe.model.hooks import input_of
from tomoe.model.shape import ModelShape
from tomoe.model.structure import LayerParts
from tomoe.plans.layer import LayerPlan
from tomoe.plans.routing import largest


def value_logits(
    x: Float[Tensor, "T D"],
    project_in: Float[Tensor, "E D"],
    embedding: Float[Tensor, " E"],
    norm: Callable[[Tensor], Tensor],
    project_out: Float[Tensor, "C E"],
    start: Float[Tensor, " C"],
) -> Float[Tensor, "T C"]:
    """Compute one logit per V dim of a head, shared by all heads (Eq. 5, Sec. 3.3), in float32."""
    return F.linear(F.gelu(norm(F.linear(x.float(), project_in, embedding))), project_out, start)


class PlannedAttention:
    """The masks of a plan: no noise, decisions as at inference."""

    def __init__(self, layer: LayerPlan, shape: ModelShape, device: torch.device):
        self.qk_mask = shape.expand_qk(layer.qk_kept.float()).to(device)
        self.value_mask = layer.value_kept.float().to(device)
        self.value_rotation = None if layer.value_rotation is None else layer.value_rotation.to(device)
        self.top_k = layer.value_top_k
        self.value_router = {name: t.to(device) for name, t in layer.value_router.items()}

    @classmethod
    def of(cls, layer: LayerPlan, shape: ModelShape, device: torch.device) -> PlannedAttention | None:
        """Return the masks of a layer; None if its attention stays dense."""
        dense = bool(layer.qk_kept.all()) and layer.value_top_k == shape.head_dim and layer.value_rotation is None
        return None if dense else cls(layer, shape, device)

    def value_logits(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T C"]:
        """Compute them with a value router: its embedding is the bias of `project_in`, its start that of `project_out`."""
        into, norm, out = (
            (self.value_router[f"{part}.weight"], self.value_router[f"{part}.bias"])
            for part in ("project_in", "norm", "project_out")
        )
        return value_logits(x, *into, lambda y: F.layer_norm(y, y.shape[-1:], *norm), *out)

    def values(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "*T C"]:
        return largest(self.value_logits(x), self.top_k) if self.value_router else self.value_mask


@runtime_checkable
class AttentionMasks(Protocol):
    """The masks of the attention of one layer."""

    @property
    def qk_mask(self) -> Float[Tensor, " C"]:
        """The kept dims of Q and K."""

    @property
    def value_rotation(self) -> Tensor | None:
        """The basis of the V/O dims; None: the model's own."""

    def values(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "*T C"]:
        """Return the V/O dims that each token uses, from the input of the attention."""


def times_heads(y: Tensor, mask: Tensor) -> Tensor:
    """Multiply y [.., heads C] by the mask of a head, [C] or [T, C]."""
    tiled = mask.to(y.dtype).repeat(*[1] * (mask.dim() - 1), y.shape[-1] // mask.shape[-1])
    return y * (tiled if mask.dim() == 1 else tiled.view(*y.shape[:-1], -1))


def attention_hooks(parts: LayerParts, masks: AttentionMasks) -> Iterator[RemovableHandle]:
    """Hook the attention of one layer. Activations are rotated after V and back before O, as weights may be packed."""
    rotation = masks.value_rotation
    now: dict[str, Tensor] = {}

    def choose(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now["values"] = masks.values(input_of(args, kwargs).flatten(0, -2))

    def mask_qk(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> Tensor:
        return times_heads(y, masks.qk_mask)

    def mask_v(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> Tensor:
        turned = y if rotation is None else rotate_heads(y, rotation)
        return times_heads(turned, now["values"])

    def mask_o(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        kept = times_heads(args[0], now.pop("values"))
        return (kept if rotation is None else rotate_heads(kept, rotation, inverse=True),)

    yield parts.attention.module.register_forward_pre_hook(choose, with_kwargs=True)
    yield parts.attention.q.register_forward_hook(mask_qk)
    yield parts.attention.k.register_forward_hook(mask_qk)
    yield parts.attention.v.register_forward_hook(mask_v)
    yield parts.attention.o.register_forward_pre_hook(mask_o)
