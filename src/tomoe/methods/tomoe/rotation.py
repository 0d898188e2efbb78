"""The basis of the values in which pruning the last dims costs least, from calibration text.

All heads of a layer share one mask of V/O dims, so every head has its most important direction at index 0.
docs/lab/log.md compares the ways to choose the directions.

Shapes: G key/value heads, R query heads of each, H in all, C dims of a head, D hidden size, t tokens. A rotation is
[G, C, C]; its columns are the new directions.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tomoe.model.hooks import hooked
from tomoe.model.running import run_model
from tomoe.model.structure import layer_parts, shape_of
from tomoe.progress import StageCallback, no_stage_progress

# Directions of less than this share of the largest one count as this: no product is divided by rounding errors.
SMALLEST_SHARE = 1e-9


def head_rotations(
    attended: Float[Tensor, "t H_C"], o_weight: Float[Tensor, "D H_C"], num_kv_heads: int, head_dim: int
) -> Float[Tensor, "G C C"]:
    """Compute rotations of one layer from the input of its output projection on calibration tokens, in float32 on the CPU.

    With S = E[a a^T] of the attended values a and M = W_o^T W_o, both summed over the query heads of a group, dropping
    the dims in a projection P costs tr(P M P S). The directions are eigenvectors of the geometric mean of S and M, which
    solve this exactly if S and M commute, and nearly otherwise; they are sorted by what dropping each of them costs.
    """
    values = attended.float().unflatten(-1, (num_kv_heads, -1, head_dim)).permute(1, 2, 0, 3)
    weight = o_weight.float().unflatten(-1, (num_kv_heads, -1, head_dim)).permute(1, 2, 0, 3)
    s, m = ((x.mT @ x).cpu().double() for x in (values / len(attended) ** 0.5, weight))
    mean = _geometric_mean(s.sum(1), m.sum(1))
    directions = torch.linalg.eigh(mean).eigenvectors
    energy = (_along(directions, s) * _along(directions, m)).sum(1)
    order = energy.argsort(dim=-1, descending=True, stable=True)
    directions = directions.take_along_dim(order[:, None], -1)
    # eigenvectors have no sign of their own: the same plan everywhere needs one
    largest = directions.take_along_dim(directions.abs().argmax(1, keepdim=True), 1)
    return (directions * largest.sign()).float()


def _along(directions: Float[Tensor, "G C C"], form: Float[Tensor, "G R C C"]) -> Float[Tensor, "G R C"]:
    """Evaluate the quadratic form in every direction."""
    u = directions[:, None]
    return (u * (form @ u)).sum(-2)


def _geometric_mean(a: Float[Tensor, "G C C"], b: Float[Tensor, "G C C"]) -> Float[Tensor, "G C C"]:
    """a # b = a^1/2 (a^-1/2 b a^-1/2)^1/2 a^1/2 of symmetric positive matrices."""
    root, inverse = _power(a, 0.5), _power(a, -0.5)
    mean = root @ _power(inverse @ b @ inverse, 0.5) @ root
    return (mean + mean.mT) / 2


def _power(a: Float[Tensor, "G C C"], exponent: float) -> Float[Tensor, "G C C"]:
    values, vectors = torch.linalg.eigh((a + a.mT) / 2)
    floor = (values[..., -1:] * SMALLEST_SHARE).clamp_min(1e-30)
    return (vectors * values.maximum(floor).pow(exponent)[..., None, :]) @ vectors.mT


@torch.no_grad()
def value_rotations(
    model: Any, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], on_progress: StageCallback = no_stage_progress
) -> list[Float[Tensor, "G C C"]]:
    """Compute the rotation of every layer in one pass over calibration text, with unpacked weights; padding (mask 0) does not
    count."""
    s = shape_of(model)
    rotations: list[Tensor] = []

    def rotate(o: nn.Module, args: tuple[Any, ...]) -> None:
        attended = args[0].flatten(0, -2)[mask.flatten()]
        rotations.append(head_rotations(attended, o.get_parameter("weight"), s.num_kv_heads, s.head_dim))
        on_progress(len(rotations), s.num_layers)

    with hooked(parts.attention.o.register_forward_pre_hook(rotate) for parts in layer_parts(model)):
        run_model(model, ids, mask)
    return rotations
