"""The memory of a dense model's activations, computed from its sizes."""

from __future__ import annotations

import torch

from tomoe.model.shape import ModelShape

_FLOAT32 = 4  # bytes


def activation_bytes(
    s: ModelShape, dtype: torch.dtype, tokens: int, checkpointing: bool = False, pruning: str = "off", experts: int = 0
) -> int:
    """Count bytes of the activations of a forward pass that the backward pass needs; with checkpointing the inputs of all layers,
    what their tokens chose, and all activations of one layer."""
    # of one token in one layer; masks stay in the model's own dtype
    own = dtype.itemsize
    heads, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    values = {"off": 0, "static": heads + 2 * kv, "per_token": 2 * heads + 3 * kv}[pruning]
    layer = (
        # gate, activated gate, up, their product, its mask
        s.mlp_size * (5 if s.gated else 3) * own
        # q, k, v and the result; q, k and v before their masks, the masks of values
        + (2 * (heads + kv) + values) * own
        # the input of both norms, of the router, of the router of values
        + s.hidden_size * (4 if pruning == "per_token" else 3) * _FLOAT32
        # the choice, its noise, its probabilities
        + 3 * experts * _FLOAT32
    )
    if checkpointing:
        chosen = 3 * experts + (2 * s.head_dim if pruning == "per_token" else 0)
        return tokens * (s.num_layers * (own * s.hidden_size + _FLOAT32 * chosen) + layer)
    # the first layer has nothing below it that learns
    return tokens * (2 * s.num_layers - 1) * layer // 2
