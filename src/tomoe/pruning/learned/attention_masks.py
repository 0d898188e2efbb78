"""The meaning of a mask of attention: the dense model runs with some dims of Q, K, V and O multiplied by zero."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.model.compiled import fused
from tomoe.model.heads import rotate_heads
from tomoe.model.hooks import input_of
from tomoe.model.shape import ModelShape
from tomoe.model.structure import LayerParts
from tomoe.plan import LayerPlan
from tomoe.pruning.routing import largest


@runtime_checkable
class AttentionMasks(Protocol):
    """The masks of the attention of one decoder layer. T counts tokens over the whole batch."""

    @property
    def value_rotation(self) -> Float[Tensor, "G C C"] | None:
        """The basis that `values` cuts in; None: the model's own."""

    @property
    def qk_mask(self) -> Float[Tensor, " C"]: ...
    def values(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "*T C"]: ...


# Without shapes, as torch.compile traces it.
def value_logits(
    x: Tensor, project_in: Tensor, embedding: Tensor, norm: nn.Module, project_out: Tensor, start: Tensor
) -> Tensor:
    """One logit per value dim of a head, the same for all heads (Eq. 5, Sec. 3.3), in float32: of x [T, D], logits [T, C]."""
    return F.linear(F.gelu(norm(F.linear(x.float(), project_in, embedding))), project_out, start)


class ValueLogits(nn.Module):
    """`value_logits` with the tensors that a plan keeps.

    `project_in` is Proj_E, and its bias is the mean expert embedding of the site; `norm` and `project_out` are the V/O part
    of Proj_D, and their bias is the start.
    """

    def __init__(self, hidden_size: int, embedding_size: int, head_dim: int):
        super().__init__()
        self.project_in = nn.Linear(hidden_size, embedding_size)
        self.norm = nn.LayerNorm(embedding_size)
        self.project_out = nn.Linear(embedding_size, head_dim)

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T C"]:
        into, out = self.project_in, self.project_out
        return value_logits(x, into.weight, into.bias, self.norm, out.weight, out.bias)


class PlannedAttention:
    """The masks of a plan: no noise, the decisions of inference."""

    def __init__(self, layer: LayerPlan, shape: ModelShape, device: torch.device):
        self.qk_mask = shape.expand_qk(layer.qk_kept.float()).to(device)
        self.value_mask = layer.value_kept.float().to(device)
        self.value_rotation = None if layer.value_rotation is None else layer.value_rotation.to(device)
        self.top_k = layer.value_top_k
        self.value_logits: ValueLogits | None = None
        if layer.value_router:
            embedding_size = layer.value_router["project_in.weight"].shape[0]
            self.value_logits = ValueLogits(shape.hidden_size, embedding_size, shape.head_dim)
            self.value_logits.load_state_dict(layer.value_router)
            self.value_logits.to(device)

    @classmethod
    def of(cls, layer: LayerPlan, shape: ModelShape, device: torch.device) -> PlannedAttention | None:
        """The masks of a layer; None if its attention stays whole."""
        whole = bool(layer.qk_kept.all()) and layer.value_top_k == shape.head_dim and layer.value_rotation is None
        return None if whole else cls(layer, shape, device)

    def values(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "*T C"]:
        if self.value_logits is None:
            return self.value_mask
        return largest(self.value_logits(x), self.top_k)


# Without shapes, as torch.compile traces it.
def times_heads(y: Tensor, mask: Tensor) -> Tensor:
    """y [.., heads C] times the mask of a head, [C] or [T, C]."""
    tiled = mask.to(y.dtype).repeat(*[1] * (mask.dim() - 1), y.shape[-1] // mask.shape[-1])
    return y * (tiled if mask.dim() == 1 else tiled.view(*y.shape[:-1], -1))


_fused_times_heads = fused(times_heads)


def attention_hooks(parts: LayerParts, masks: AttentionMasks) -> Iterator[RemovableHandle]:
    """Hook the attention of one layer. Activations are rotated behind V and back before O, as weights may be packed."""
    rotation = masks.value_rotation
    now: dict[str, Tensor] = {}

    def choose(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now["values"] = masks.values(input_of(args, kwargs).flatten(0, -2))

    def mask_qk(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> Tensor:
        return _fused_times_heads(y, masks.qk_mask)

    def mask_v(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> Tensor:
        turned = y if rotation is None else rotate_heads(y, rotation)
        return _fused_times_heads(turned, now["values"])

    def mask_o(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        kept = _fused_times_heads(args[0], now.pop("values"))
        return (kept if rotation is None else rotate_heads(kept, rotation, inverse=True),)

    yield parts.attention.module.register_forward_pre_hook(choose, with_kwargs=True)
    yield parts.attention.q.register_forward_hook(mask_qk)
    yield parts.attention.k.register_forward_hook(mask_qk)
    yield parts.attention.v.register_forward_hook(mask_v)
    yield parts.attention.o.register_forward_pre_hook(mask_o)
