"""Values in another basis: V and O turned within their heads, which changes nothing until dims are cut.

V and O of a key/value head may be turned by any orthogonal matrix R: v R (W_v' = R^T W_v, the bias with it) and the
output matrices W_o R of all its query heads compute what v and W_o do. Masks of V/O dims then act in the new basis.

Shapes: G key/value heads, C dims of a head, D hidden size. A rotation is [G, C, C]; its columns are the new directions.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


# Without shapes, as torch.compile traces it.
def rotate_heads(x: Tensor, rotation: Tensor, inverse: bool = False) -> Tensor:
    """Turn the last dim of x [.., heads C], all key/value or all query heads, by the rotation of their key/value head, or by
    the inverse; in float32, returned in the dtype of x."""
    matrix = rotation.to(x.device, torch.float32)
    heads = x.float().unflatten(-1, (len(matrix), -1, matrix.shape[-1]))
    # a product with a broadcast would copy the rotations for every token, and learning would keep the copies
    rotated = torch.einsum("...gqc,gdc->...gqd" if inverse else "...gqc,gcd->...gqd", heads, matrix)
    return rotated.flatten(-3).to(x.dtype)


def rotate_weights(
    v_weight: Float[Tensor, "G_C D"],
    v_bias: Float[Tensor, " G_C"] | None,
    o_weight: Float[Tensor, "D H_C"],
    rotation: Float[Tensor, "G C C"],
) -> tuple[Float[Tensor, "G_C D"], Float[Tensor, " G_C"] | None, Float[Tensor, "D H_C"]]:
    """Weight and bias of V and weight of O in the rotated basis, as new tensors of the same dtypes."""
    bias = None if v_bias is None else rotate_heads(v_bias, rotation)
    return rotate_heads(v_weight.mT, rotation).mT.contiguous(), bias, rotate_heads(o_weight, rotation)
