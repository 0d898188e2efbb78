"""Projections whose tokens choose their inputs: the rows of the chosen ones are read, and no others.

For this the matrices of a choice lie side by side, input after input, each once: what a module calls its weight is then a
view. Prompts multiply by the same memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from tomoe.moe.kernels.build import load
from tomoe.moe.kernels.native import DTYPES, obstacle_of
from tomoe.moe.modeling_tomoe import FEW_TOKENS, Choice, Choosing, chosen_inputs, matrix_of, stamp_of

SOURCE = Path(__file__).with_name("inputs.cpp")


# What torch.compile traces has no shapes in its signature: x is [.., D], what it returns [.., n].
def suits(projection: Choosing, x: Tensor) -> bool:
    """Whether the kernel can run this, and not more tokens than it is for."""
    return x.numel() <= FEW_TOKENS * x.shape[-1] and _fits(projection.choice, x) and available()


def obstacle(projection: Choosing, x: Tensor) -> str | None:
    """What a user could change, so that the kernel ran this; None if there is nothing."""
    if x.numel() > FEW_TOKENS * x.shape[-1] or _learns(projection.choice, x):
        return None
    return obstacle_of(SOURCE, kernel() is not None, x, projection.choice.projections[0].weight)


def product(projection: Choosing, x: Tensor) -> Tensor:
    """What a projection gives whose tokens choose their inputs, by the kernel.

    Inside torch.compile it is the operator `tomoe::inputs`, one node of the graph.
    """
    choice = projection.choice
    if torch.compiler.is_compiling():
        bias = getattr(projection, "bias", None)
        return inputs(x, choice.norms(), matrix_of(projection), bias, choice.count)
    packed, places = _packed(choice)
    factors, state = (x, choice.norms(), _bias(choice)), (stamp_of(x), choice.count)
    kept = choice.kept.get("product")
    # the projections of a choice run one after another on the same x, and the first computes for all
    if kept is None or kept[1] != state or any(a is not b for a, b in zip(kept[0], factors, strict=True)):
        y = call(*factors[:2], packed, factors[2], choice.count)
        # one tuple, so that another thread never finds half of it
        kept = choice.kept["product"] = factors, state, y
    first, last = places[projection]
    result: Tensor = kept[2][..., first:last]
    return result


def _fits(choice: Choice, x: Tensor) -> bool:
    """Whether this is on a CPU, in one dtype that the kernel knows, without gradients."""
    if x.device.type != "cpu" or x.dtype not in DTYPES or not x.numel():
        return False
    weights = [projection.weight for projection in choice.projections]
    if any(weight.device.type != "cpu" or weight.dtype != x.dtype for weight in weights):
        return False
    return not _learns(choice, x)


def _learns(choice: Choice, x: Tensor) -> bool:
    """Whether the pass is one that something learns from."""
    learning = x.requires_grad or any(projection.weight.requires_grad for projection in choice.projections)
    return torch.is_grad_enabled() and learning


def _packed(choice: Choice) -> tuple[Tensor, dict[Any, tuple[int, int]]]:
    """The matrices of a choice side by side [D, n], which the modules' weights are views of, and the columns of each."""
    where = [(projection.weight.data_ptr(), projection.weight.stride()) for projection in choice.projections]
    kept = choice.kept.get("packed")
    if kept is not None and kept[0] == where:
        return kept[1], kept[2]
    matrices = [matrix_of(projection) for projection in choice.projections]
    edges = [0]
    for matrix in matrices:
        edges.append(edges[-1] + len(matrix))
    norms = choice.norms()
    # weights that can be trained later are no tensors of inference mode
    with torch.inference_mode(False), torch.no_grad():
        packed = torch.empty(matrices[0].shape[1], edges[-1], dtype=matrices[0].dtype)
        for projection, matrix, first, last in zip(choice.projections, matrices, edges, edges[1:], strict=False):
            packed[:, first:last] = matrix.t()
            own = packed[:, first:last]
            projection.weight.data = own if isinstance(projection, Conv1D) else own.t()
    places = {
        projection: (first, last) for projection, first, last in zip(choice.projections, edges, edges[1:], strict=False)
    }
    where = [(projection.weight.data_ptr(), projection.weight.stride()) for projection in choice.projections]
    choice.kept["packed"] = where, packed, places
    # the same numbers elsewhere
    choice.kept["norms"] = [stamp_of(projection.weight) for projection in choice.projections], norms
    return packed, places


def _bias(choice: Choice) -> Tensor | None:
    """The biases side by side; None if there is none."""
    biases = [getattr(projection, "bias", None) for projection in choice.projections]
    if all(bias is None for bias in biases):
        return None
    stamp = [None if bias is None else stamp_of(bias) for bias in biases]
    if choice.kept.get("bias", (None,))[0] != stamp:
        weights = [matrix_of(projection) for projection in choice.projections]
        parts = [
            weight.new_zeros(len(weight)) if bias is None else bias.detach().to(weight.dtype)
            for bias, weight in zip(biases, weights, strict=True)
        ]
        choice.kept["bias"] = stamp, torch.cat(parts)
    bias: Tensor = choice.kept["bias"][1]
    return bias


def call(x: Tensor, norms: Tensor, packed: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """Run the kernel. Raises RuntimeError if it could not be compiled."""
    run = kernel()
    if run is None:
        raise RuntimeError("the kernel for inputs is missing (no C++ compiler, or TOMOE_NATIVE=0)")
    return run(x.reshape(-1, x.shape[-1]).contiguous(), norms, packed, bias, count).view(*x.shape[:-1], packed.shape[1])


SCHEMA = "(Tensor x, Tensor norms, Tensor weight, Tensor? bias, int count) -> Tensor"


@torch.library.custom_op("tomoe::inputs", mutates_args=(), schema=SCHEMA)
def inputs(x: Tensor, norms: Tensor, weight: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """The kernel as a PyTorch operator, for graphs; weight [n, D], which it reads by columns where they are rows in memory."""
    columns = weight.t()
    if columns.stride(1) == 1:
        return call(x, norms, columns, bias, count)
    return F.linear(chosen_inputs(x, norms, count), weight, bias)


@inputs.register_fake
def _like(x: Tensor, norms: Tensor, weight: Tensor, bias: Tensor | None, count: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, int], Tensor]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def available() -> bool:
    """Whether the kernel could be compiled and computes what PyTorch computes."""
    return kernel() is not None


@cache
def kernel() -> Kernel | None:
    """The compiled function; None if it cannot be compiled or computes something else than PyTorch on this machine."""
    library = load(SOURCE)
    if library is None:
        return None
    run = _typed(library)
    return run if all(_agrees_with_pytorch(run, dtype, tokens) for dtype in DTYPES for tokens in (1, 2, 3, 4)) else None


def _typed(library: ctypes.CDLL) -> Kernel:
    pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    compiled = library.tomoe_inputs
    compiled.restype = int32
    compiled.argtypes = [
        int32, pointer, int64, int64, pointer, int64, pointer, int64, int64, pointer, pointer, int32,
    ]  # fmt: skip

    def run(x: Tensor, norms: Tensor, packed: Tensor, bias: Tensor | None, count: int) -> Tensor:
        y = torch.empty(len(x), packed.shape[1], dtype=x.dtype)
        failed = compiled(
            x.dtype == torch.bfloat16, x.data_ptr(), *x.shape, norms.data_ptr(), count, packed.data_ptr(), packed.stride(0),
            packed.shape[1], None if bias is None else bias.data_ptr(), y.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise torch.OutOfMemoryError("no memory for the sums of a projection")
        return y

    return run


def _agrees_with_pytorch(run: Kernel, dtype: torch.dtype, tokens: int) -> bool:
    """Compare what the compiler made of the source with PyTorch: 70 of 150 inputs, 107 outputs and a bias."""
    width, columns, count = 150, 107, 70
    draw: Callable[[Sequence[int], int], Tensor] = lambda shape, seed: (  # noqa: E731
        torch.linspace(-1, 1, shape[0] * shape[1]).mul(seed).sin().view(*shape).to(dtype)
    )
    x, weight, bias = draw((tokens, width), 977), draw((width, columns), 1009), draw((1, columns), 1511)[0]
    norms = torch.linspace(1, 2, width)
    y = run(x, norms, weight, bias, count).float()
    meant = chosen_inputs(x, norms, count).float() @ weight.float() + bias.float()
    return bool((y - meant).abs().max() <= (1e-5 if dtype == torch.float32 else 1e-2) * meant.abs().max())
