"""Experts as grouped products on a GPU, where Triton is installed (it comes with PyTorch for CUDA)."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tomoe.moe.kernels.native import activation_kind
from tomoe.moe.modeling_tomoe import ToMoEMLP, run_masked

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run_triton(mlp: ToMoEMLP, x: Float[Tensor, "T D"], expert_ids: Int[Tensor, " T"]) -> Float[Tensor, "T D"]:
    """Rows of the shared weights by index, in two kernels, without a copy and without waiting for the device.

    Without a GPU (or Triton's interpreter), without Triton, with gradients or another activation: `masked`. `auto` does
    not take it, because it has not been timed on a GPU.
    """
    kind = activation_kind(mlp)
    graph = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in mlp.parameters()))
    here = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    alike = x.dtype in DTYPES and mlp.up_proj.dtype == x.dtype
    if kind is None or graph or not here or not alike or not len(x) or find_spec("triton") is None:
        return run_masked(mlp, x, expert_ids)
    from tomoe.moe.kernels import gpu

    return gpu.run(mlp, x, expert_ids, kind)
