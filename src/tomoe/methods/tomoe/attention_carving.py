"""The carved start of pruned attention: every layer keeps the same fraction of dims, those with the most energy.

The error at its own output says little about what the model loses, so attention does not compete with the MLPs for parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.budget import attention_params
from tomoe.methods.tomoe.attention import PrunedAttention
from tomoe.methods.tomoe.projection import start_logits
from tomoe.methods.tomoe.rotation import head_rotations
from tomoe.model.attention import rotate_heads
from tomoe.model.hooks import input_of
from tomoe.model.mlp import Linear
from tomoe.model.shape import ModelShape
from tomoe.model.structure import layer_parts
from tomoe.plans.partition.activations import real_tokens
from tomoe.plans.partition.layouts import attention_units


class AttentionRanking:
    """What calibration text says about the attention of every layer, once it has run with the `hooks`."""

    def __init__(self, net: PrunedAttention, model: nn.Module):
        self.net, self.shape, self.parts = net, net.shape, layer_parts(model)
        self.importance: list[tuple[Tensor, Tensor]] = []  # of Q/K choices and of V/O dims
        self.rotations: list[Tensor] = []  # if values are rotated

    def hooks(self, i: int, valid: Bool[Tensor, " BS"] | None) -> Iterator[RemovableHandle]:
        """Record what the projections of layer i give, and rank its dims before the last of them runs."""
        parts = self.parts[i]
        activations: dict[str, Tensor] = {}

        def record(module: Linear, name: str) -> RemovableHandle:
            def hook(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> None:
                # some families clip these in place
                activations[name] = y.flatten(0, -2).clone() if valid is None else real_tokens(y, valid)

            return module.register_forward_hook(hook)

        def rank(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            attended = real_tokens(input_of(args, kwargs), valid)
            self._rank(activations["q"], activations["k"], attended, parts.attention.o.weight)
            activations.clear()

        yield record(parts.attention.q, "q")
        yield record(parts.attention.k, "k")
        yield parts.attention.o.register_forward_pre_hook(rank, with_kwargs=True)

    def _rank(self, q: Tensor, k: Tensor, o: Tensor, weight: Tensor) -> None:
        if self.net.section.rotate_values:
            rotation = head_rotations(o, weight, self.shape.num_kv_heads, self.shape.head_dim)
            self.rotations.append(rotation)
            o, weight = rotate_heads(o, rotation), rotate_heads(weight, rotation)
        self.importance.append(attention_importance(q, k, o, weight, self.shape))

    def start_(self, active: float) -> int:
        """Start from the most important Q/K choices and V/O dims of every layer; returns their parameters."""
        s = self.shape
        keep_bias = self.net.sampling.keep_bias
        if self.rotations:
            self.net.value_rotations.copy_(torch.stack(self.rotations))
        spent = 0
        choices, dims = attention_units(s, self.net.section, active)
        for i, (qk, values) in enumerate(self.importance):
            value_ranks, qk_ranks = (t.argsort(descending=True, stable=True).argsort() for t in (values, qk))
            spent += int(attention_params(s, len(s.qk_dims((qk_ranks < choices).cpu())), dims))
            starts = start_logits(value_ranks, dims, keep_bias), start_logits(qk_ranks, choices, keep_bias)
            self.net.dims[i].start_at_(torch.cat(starts))
        return spent


def attention_importance(
    q: Float[Tensor, "t HC"],
    k: Float[Tensor, "t GC"],
    o: Float[Tensor, "t HC"],
    weight: Float[Tensor, "D HC"],
    s: ModelShape,
) -> tuple[Float[Tensor, " Q"], Float[Tensor, " C"]]:
    """Return the importance of Q/K choices and of V/O dims, from q, k and the input `o` of the output projection.

    A Q/K choice has the root of the sum over heads of E|q|^2 E|k|^2 of its dims, a V/O dim the root of the sum over heads
    of E(o^2) |column|^2 of the output projection. (RoPE turns a pair without changing its length, so q and k are those
    before it.)
    """
    q_energy, k_energy, o_energy = (t.float().square().mean(0).view(-1, s.head_dim) for t in (q, k, o))
    pairs = s.rotary_size // 2

    def choices(energy: Float[Tensor, "h C"]) -> Float[Tensor, "h Q"]:
        return torch.cat([energy[:, :pairs] + energy[:, pairs : 2 * pairs], energy[:, 2 * pairs :]], 1)

    groups = s.num_heads // s.num_kv_heads
    qk = (choices(q_energy) * choices(k_energy).repeat_interleave(groups, 0)).sum(0).sqrt()
    columns = weight.float().square().sum(0).view_as(o_energy)
    return qk, (o_energy * columns).sum(0).sqrt()
