"""Fine-grained experts on a GPU in plain PyTorch: gathered rows for one token, a grouped matrix product for many.

Both compute the same on a CPU, where `auto` never takes them. Letters as in the modelling file; S shared neurons.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tomoe.moe.kernels.native import ACTIVATIONS, activation_kind
from tomoe.moe.modeling_tomoe import ToMoEMLP, run_masked

# Measured on an H100 (docs/lab/performance.md). Tokens that read the rows of their own experts, and the share of all experts up
# to which that pays: four tokens were slower than all neurons with a mask.
FEW_TOKENS, MOST_FOR_FEW = 1, 1 / 2
# What a grouped product needs to beat all neurons with a mask: neurons of an expert, so few of the experts that reading x once
# for each of them pays, and products (tokens x rows x columns of a projection) that outweigh sorting the tokens.
WIDE, MOST_FOR_GROUPED, MANY_PRODUCTS = 128, 1 / 4, 10**11
GROUPED_MULTIPLE = 8  # what rows of 16 bytes need, without which PyTorch refuses the grouped product

Activation = Callable[[Tensor], Tensor]


# What torch.compile traces has no shapes in its signature (x is [T, D]): checking them would break the graph.
def supports_few(mlp: ToMoEMLP, x: Tensor) -> bool:
    """Whether `auto` takes `few`: on CUDA for fine-grained experts."""
    return _fine_on_cuda(mlp, x) and len(x) <= FEW_TOKENS and _share(mlp) <= MOST_FOR_FEW


def supports_grouped(mlp: ToMoEMLP, x: Tensor) -> bool:
    """Whether `auto` takes `grouped`: on CUDA for fine-grained experts."""
    if not _fine_on_cuda(mlp, x) or x.dtype != torch.bfloat16 or not _divides(mlp):
        return False
    wide = mlp.expert_rows.shape[1] >= WIDE and _share(mlp) <= MOST_FOR_GROUPED
    return wide and len(x) * mlp.up_proj.numel() >= MANY_PRODUCTS


def _fine_on_cuda(mlp: ToMoEMLP, x: Tensor) -> bool:
    return mlp.fine and x.is_cuda and len(x) > 0 and not (torch.is_grad_enabled() and x.requires_grad)


def _share(mlp: ToMoEMLP) -> float:
    return (mlp.top_k or 1) / mlp.num_experts


def _divides(mlp: ToMoEMLP) -> bool:
    """Whether experts are contiguous and their sizes fit the grouped matrix product."""
    return (
        mlp.fine and mlp.expert_rows.shape[1] % GROUPED_MULTIPLE == 0 and mlp.up_proj.shape[1] % GROUPED_MULTIPLE == 0
    )


def run_few(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor) -> Tensor:
    """Read the shared rows and the contiguous rows of each token's experts; on CUDA in compiled kernels that do not copy them.
    `masked` for overlapping experts or an unknown activation."""
    if not mlp.fine:
        return run_masked(mlp, x, expert_ids)
    weights = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.gate_bias, mlp.up_bias
    sizes = mlp.shared_size, mlp.num_experts
    if torch.compiler.is_compiling():
        # Recognizing an activation looks at values, which would break the graph.
        return few(x, expert_ids, weights, *sizes, mlp.activation)
    kind = activation_kind(mlp)
    if kind is None:
        return run_masked(mlp, x, expert_ids)
    run = compiled(*expert_ids.shape) if x.is_cuda else few
    return run(x, expert_ids, weights, *sizes, ACTIVATIONS[kind])


@cache
def compiled(tokens: int, top_k: int) -> Callable[..., Tensor]:
    """Compile `few` for one size of the expert ids, which may differ between layers."""
    # PyTorch compiles one function for no more than eight sizes, and then runs it as it is: so each has a copy.
    return torch.compile(FunctionType(few.__code__.replace(), few.__globals__), dynamic=False)


def few(
    x: Tensor, expert_ids: Tensor, weights: tuple[Any, ...], shared: int, num_experts: int, activation: Activation
) -> Tensor:
    """Compute the experts of x [T, D] from gathered rows [T, k, W, D]; a compiler fuses gathering and products. Weights are those
    of gate (or None), up and down, and the biases of gate and up (or None)."""
    gate, up, down, gate_bias, up_bias = weights

    def split(t: Tensor) -> tuple[Tensor, Tensor]:
        return t[:shared], t[shared:].unflatten(0, (num_experts, -1))[expert_ids]

    def project(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        (all_use, own), wide = split(weight), x.float()
        first = F.linear(x, all_use).float()
        second = (own * wide[:, None, None]).sum(-1)
        if bias is None:
            return first, second
        biases = split(bias)
        return first + biases[0], second + biases[1]

    h = project(up, up_bias)
    if gate is None:
        h = activation(h[0]), activation(h[1])
    else:
        gates = project(gate, gate_bias)
        h = activation(gates[0]) * h[0], activation(gates[1]) * h[1]
    all_use, own = split(down)
    # Expert by expert first: one sum over all rows would leave most of a GPU without work.
    experts = (h[1][..., None] * own).sum(2).sum(1)
    return (experts + (h[0].to(x.dtype) @ all_use)).to(x.dtype)


def run_grouped(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor) -> Tensor:
    """Sort tokens by expert and run all experts in one grouped matrix product; the host waits for no counts.

    `masked` for overlapping experts or sizes that do not fit, and in float64.
    """
    if not (len(x) and _divides(mlp)) or x.dtype == torch.float64:
        return run_masked(mlp, x, expert_ids)
    shared, n, k = mlp.shared_size, mlp.num_experts, expert_ids.shape[1]
    flat = expert_ids.flatten()
    experts, order = flat.sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(n, device=x.device), right=True).int()
    rows = x[order // k]

    def project(weight: Tensor, bias: Tensor | None) -> Tensor:
        own = weight[shared:].unflatten(0, (n, -1)).to(x.dtype)
        y = F.grouped_mm(rows, own.transpose(1, 2), offs=ends)
        return y if bias is None else y + bias[shared:].view(n, -1)[experts].to(x.dtype)

    h = project(mlp.up_proj, mlp.up_bias)
    h = mlp.activation(h) if mlp.gate_proj is None else mlp.activation(project(mlp.gate_proj, mlp.gate_bias)) * h
    y = F.grouped_mm(h, mlp.down_proj[shared:].unflatten(0, (n, -1)).to(x.dtype), offs=ends)
    # Back in the order of the tokens, so that sums do not depend on which product ended first.
    out = y[order.argsort()].unflatten(0, (-1, k)).sum(1, dtype=torch.float32)
    if shared:
        out += mlp.activations(x, slice(shared)) @ mlp.down_proj[:shared]
    return out.to(x.dtype)
