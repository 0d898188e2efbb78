"""Active parameters, counted once. The loss, the plan and every report use these lines of arithmetic.

A width may be an int (report) or a tensor with a gradient (loss). Biases and norms are not counted, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tomoe.model.structure import ModelShape


def mlp_params(shape: ModelShape, width: Any) -> Any:
    """Projection weights of an MLP of `width` neurons."""
    return (3 if shape.gated else 2) * shape.hidden_size * width


def attention_params(shape: ModelShape, qk_dims: Any, value_dims: Any) -> Any:
    """Projection weights of attention with `qk_dims` in Q and K, `value_dims` in V and O, per head."""
    return shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * (qk_dims + value_dims)


def block_total(shape: ModelShape) -> int:
    """T_total of eq. pr: the projection weights of all blocks."""
    whole = attention_params(shape, shape.head_dim, shape.head_dim)
    return int(shape.num_layers * (mlp_params(shape, shape.mlp_size) + whole))


def active_params(shape: ModelShape, widths: Iterable[tuple[Any, Any, Any]]) -> Any:
    """T(d_MoE) of eq. pr from (MLP width, Q/K dims, V/O dims) per layer."""
    return sum(mlp_params(shape, w) + attention_params(shape, qk, v) for w, qk, v in widths)


def router_params(shape: ModelShape, num_experts: int, embedding_size: int, dynamic_values: bool) -> int:
    """Weights that the MoE has beyond the dense model: expert routers, value routers (L d 128 + L 128 C + L d N)."""
    value = embedding_size * (shape.hidden_size + shape.head_dim) if dynamic_values else 0
    return shape.num_layers * (num_experts * shape.hidden_size + value)
