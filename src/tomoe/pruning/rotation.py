"""Rotated values: an exact change of basis within every value head, after which a cut of the last dims hurts least.

V and O of a key/value head may be turned by any orthogonal matrix R: v R (W_v' = R^T W_v, the bias with it) and the
output matrices W_o R of all its query heads compute what v and W_o do. The masks of V and O then act in the new basis.
All heads of a layer share one mask, so every head has its most important direction at index 0.

No conversion uses it yet; docs/lab/rotation.md says what was measured and what is missing.

Shapes: G key/value heads, H query heads, C dims of a head, D hidden size, t tokens. A rotation is [G, C, C]; its
columns are the new directions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe import distributed
from tomoe.model.hooks import hooked
from tomoe.model.structure import layer_parts, run_model, shape_of
from tomoe.progress import StageCallback, no_stage_progress

# Directions of less than this share of the largest one count as this: no product is divided by rounding errors.
SMALLEST_SHARE = 1e-9


def rotate_heads(
    x: Float[Tensor, "*T heads_C"], rotation: Float[Tensor, "G C C"], inverse: bool = False
) -> Float[Tensor, "*T heads_C"]:
    """Turn the last dim, H or G heads of C dims: every head by the rotation of its key/value head, or by the inverse.

    Computed in float32, returned in the dtype of `x`.
    """
    matrix = rotation.to(x.device, torch.float32)
    heads = x.float().unflatten(-1, (len(matrix), -1, matrix.shape[-1]))
    return (heads @ (matrix.mT if inverse else matrix)).flatten(-3).to(x.dtype)


def rotate_weights(
    v_weight: Float[Tensor, "G_C D"],
    v_bias: Float[Tensor, " G_C"] | None,
    o_weight: Float[Tensor, "D H_C"],
    rotation: Float[Tensor, "G C C"],
) -> tuple[Float[Tensor, "G_C D"], Float[Tensor, " G_C"] | None, Float[Tensor, "D H_C"]]:
    """Weight and bias of V and weight of O in the rotated basis, as new tensors of the same dtypes."""
    bias = None if v_bias is None else rotate_heads(v_bias, rotation)
    return rotate_heads(v_weight.mT, rotation).mT.contiguous(), bias, rotate_heads(o_weight, rotation)


@contextmanager
def rotated(model: nn.Module, rotations: Sequence[Float[Tensor, "G C C"]]) -> Iterator[None]:
    """Inside the block, V projections give rotated values and output projections take them; the logits stay the same.

    What hooks on these projections see and change, such as the masks of `masked`, is in the rotated basis, whichever of
    the two is entered first. Activations are turned, not weights, so the weights may be frozen, offloaded or packed.
    """
    with ExitStack() as stack:
        for parts, rotation in zip(layer_parts(model), rotations, strict=True):
            stack.enter_context(_rotated_layer(parts.v, parts.o, rotation))
        yield


@contextmanager
def _rotated_layer(v: Any, o: Any, rotation: Float[Tensor, "G C C"]) -> Iterator[None]:
    """Replaces `forward` of both modules: it runs between a module's forward pre-hooks and its forward hooks."""
    v_forward, o_forward = v.forward, o.forward
    replaced = [(module, vars(module).get("forward")) for module in (v, o)]
    v.forward = lambda x: rotate_heads(v_forward(x), rotation)
    o.forward = lambda x: o_forward(rotate_heads(x, rotation, inverse=True))
    try:
        yield
    finally:
        for module, own in replaced:
            del module.forward
            if own is not None:
                module.forward = own


def head_rotations(
    attended: Float[Tensor, "t H_C"], o_weight: Float[Tensor, "D H_C"], num_kv_heads: int, head_dim: int
) -> Float[Tensor, "G C C"]:
    """Rotations of one layer from the input of its output projection on calibration tokens, in float32 on the CPU.

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
    """The quadratic form at every direction."""
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
    """The rotation of every layer from one pass over calibration text; padding (mask 0) does not count.

    All processes run the same text and take the result of process 0. Needs the original weights, not packed ones.
    """
    s, layers = shape_of(model), layer_parts(model)
    rotations: list[Tensor] = []

    def hooks() -> Iterable[RemovableHandle]:
        for parts in layers:

            def rotate(o: nn.Module, args: tuple[Any, ...]) -> None:
                attended, weight = args[0].flatten(0, -2)[mask.flatten()], o.get_parameter("weight")
                rotations.append(head_rotations(attended, weight, s.num_kv_heads, s.head_dim))
                on_progress(len(rotations), s.num_layers)

            yield parts.o.register_forward_pre_hook(rotate)

    with hooked(hooks()):
        run_model(model, ids, mask)
    distributed.broadcast_(rotations, 0)
    return rotations
