"""Active parameters, counted in one place. The loss, the plan and every report use this arithmetic.

A width is an int (reports) or a tensor with a gradient (the loss). Biases and norms are not counted, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tomoe.model.shape import ModelShape

BUDGET_TOLERANCE = 0.002
"""Largest distance between the active fraction of a plan and the requested one."""


def mlp_params(shape: ModelShape, width: Any) -> Any:
    """Count the projection weights of an MLP of `width` neurons."""
    return (3 if shape.gated else 2) * shape.hidden_size * width


def attention_params(shape: ModelShape, qk_dims: Any, value_dims: Any) -> Any:
    """Count the projection weights of attention with `qk_dims` in Q and K and `value_dims` in V and O, per head."""
    return shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * (qk_dims + value_dims)


def decoder_params(shape: ModelShape) -> int:
    """Count the projection weights of all decoder layers: T_total (Eq. 8, Sec. 3.4)."""
    attention = attention_params(shape, shape.head_dim, shape.head_dim)
    return int(shape.num_layers * (mlp_params(shape, shape.mlp_size) + attention)) + shape.other_params


def layer_params(shape: ModelShape, width: Any, qk_dims: Any, value_dims: Any) -> Any:
    """Count the projection weights of a converted layer with its share of what is always active."""
    own = mlp_params(shape, width) + attention_params(shape, qk_dims, value_dims)
    return own + shape.other_params / shape.num_layers if shape.other_params else own


def active_params(shape: ModelShape, widths: Iterable[tuple[Any, Any, Any]]) -> Any:
    """Count T(d_MoE) (Eq. 8, Sec. 3.4) from (MLP width, Q/K dims, V/O dims) per converted layer."""
    layers = sum(mlp_params(shape, w) + attention_params(shape, qk, v) for w, qk, v in widths)
    return layers + shape.other_params
