"""The backend `triton`: experts as grouped products on a GPU. It was never timed on one.

Tests run its kernels in Triton's interpreter, which shows that they are right, not that they are fast; `auto` does not
take it. Triton comes with PyTorch for CUDA.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tomoe.moe.kernels.native import activation_kind
from tomoe.moe.modeling_tomoe import ToMoEMLP, run_masked

log = logging.getLogger(__name__)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _warn_untimed() -> None:
    log.warning("the expert backend triton was never timed on a GPU; compare it with expert_backend=masked before use")


def run_triton(mlp: ToMoEMLP, x: Float[Tensor, "T D"], expert_ids: Int[Tensor, "T k"]) -> Float[Tensor, "T D"]:
    """Read rows of the shared weights by index, in two kernels, without a copy and without waiting for the device.

    Falls back to `masked` for fine-grained experts, without a GPU (or Triton's interpreter), without Triton, with gradients,
    or for an activation that the kernels do not know. Never timed on a GPU: the first call warns of that.
    """
    if not torch.compiler.is_compiling():
        _warn_untimed()
    kind = activation_kind(mlp)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in mlp.parameters()))
    on_device = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    dtype_fits = x.dtype in DTYPES and mlp.up_proj.dtype == x.dtype
    if (
        mlp.fine
        or kind is None
        or needs_grad
        or not on_device
        or not dtype_fits
        or not len(x)
        or find_spec("triton") is None
    ):
        return run_masked(mlp, x, expert_ids)
    from tomoe.moe.kernels import gpu

    return gpu.run(mlp, x, expert_ids, kind)
