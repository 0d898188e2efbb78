"""Projections whose tokens choose their inputs: the rows of the chosen ones are read, and no others.

For this the matrices of a choice lie side by side, input after input, each once: what a module calls its weight is then a
view. Prompts multiply by the same memory.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from tomoe.moe.kernels.build import INT32, INT64, POINTER, function, load
from tomoe.moe.kernels.native import DTYPES, obstacle_of, trial
from tomoe.moe.modeling_tomoe import Choice, Choosing, chosen_inputs, few, learns, matrix_of, stamp_of

SOURCE = Path(__file__).with_name("inputs.cpp")
PREPARING = threading.Lock()  # held while matrices are laid elsewhere


# What torch.compile traces has no shapes in its signature: x is [.., D], what it returns [.., n].
def suits(projection: Choosing, x: Tensor) -> bool:
    """Whether the kernel can run this, and not more tokens than it is for."""
    return few(x) and _fits(projection.choice, x) and available()


def obstacle(projection: Choosing, x: Tensor) -> str | None:
    """What a user could change, so that the kernel ran this; None if there is nothing."""
    projections = projection.choice.projections
    if not few(x) or learns(x, (p.weight for p in projections)):
        return None
    return obstacle_of(SOURCE, kernel() is not None, x, projections[0].weight)


def product(projection: Choosing, x: Tensor) -> Tensor:
    """What a projection gives whose tokens choose their inputs, by the kernel."""
    choice = projection.choice
    if torch.compiler.is_compiling():
        bias = getattr(projection, "bias", None)
        return inputs(x, choice.norms(), matrix_of(projection), bias, choice.count)
    with PREPARING:
        # Another thread may have prepared it meanwhile: a second time would free the memory that it reads.
        ready = choice.kept.get("ready", (None, None))[1]
        y: Tensor | None = ready(projection, x) if isinstance(ready, Ready) else None
        if y is None:
            ready = Ready(choice)
            choice.kept["ready"] = "native", ready
            y = ready.product(projection, x, choice.count)
    return y


class Ready:
    """A choice whose matrices lie side by side [D, n]; asked first for every token, for as long as nothing of it changes.

    So a token pays for a few comparisons and the product. The modules' weights are views of the one matrix, of which nothing
    else is kept here: when they get other memory, this one is free.
    """

    def __init__(self, choice: Choice):
        self.choice = choice
        self.norms, self.bias = choice.norms(), _bias(choice)
        packed = _packed(choice)
        self.sizes = [len(matrix_of(projection)) for projection in choice.projections]
        self.dtype, self.width = packed.dtype, packed.shape[0]
        bind = kernel()
        assert bind is not None
        self.run = bind(self.norms, packed, self.bias)
        self.watched = [
            (projection._parameters, name, parameter, None if parameter is None else stamp_of(parameter))
            for projection in choice.projections
            for name, parameter in projection._parameters.items()
        ]
        # the same numbers elsewhere
        choice.kept["norms"] = [stamp_of(projection.weight) for projection in choice.projections], self.norms
        # What the first projection computed for the others: of which x, its stamp, the number of inputs, and their parts.
        self.left: tuple[Tensor | None, Any, int, dict[Any, Tensor]] = None, None, 0, {}

    def __call__(self, projection: Choosing, x: Tensor) -> Tensor | None:
        """y [.., n] of x [.., D]; None if this is for another way, or the choice has changed."""
        count = self.choice.count
        if not few(x):
            return None
        if x.dtype != self.dtype or not x.is_cpu or x.shape[-1] != self.width or not x.numel():
            return None
        for parameters, name, parameter, stamp in self.watched:
            if parameters.get(name) is not parameter or (parameter is not None and stamp_of(parameter) != stamp):
                self.choice.kept.pop("ready", None)
                return None
        if learns(x, (projection.weight for projection in self.choice.projections)):
            return None
        return self.product(projection, x, count)

    def product(self, projection: Choosing, x: Tensor, count: int) -> Tensor:
        """Projections of a choice run one after another on the same x: the first computes for all, each takes its own once."""
        of, stamp, inputs, parts = self.left
        if of is x and inputs == count and stamp == stamp_of(x) and (part := parts.pop(projection, None)) is not None:
            return part
        y = self.run(x, count).split(self.sizes, -1)
        parts = dict(zip(self.choice.projections, y, strict=True))
        part = parts.pop(projection)
        self.left = x, stamp_of(x), count, parts  # one tuple, so that another thread never finds half of it
        return part


def _fits(choice: Choice, x: Tensor) -> bool:
    """Whether this is on a CPU, in one dtype that the kernel knows, without gradients."""
    if x.device.type != "cpu" or x.dtype not in DTYPES or not x.numel():
        return False
    # a weight that is computed anew at each use, or read from a disk, cannot be laid elsewhere
    if any("weight" not in p._parameters or hasattr(p, "_hf_hook") for p in choice.projections):
        return False
    weights = [projection.weight for projection in choice.projections]
    if any(weight.device.type != "cpu" or weight.dtype != x.dtype for weight in weights):
        return False
    return not learns(x, weights)


def _packed(choice: Choice) -> Tensor:
    """Lay the matrices of a choice side by side [D, n], and make the modules' weights views of it."""
    matrices = [matrix_of(projection) for projection in choice.projections]
    # weights that can be trained later are no tensors of inference mode
    with torch.inference_mode(False), torch.no_grad():
        packed = torch.cat([matrix.t() for matrix in matrices], 1)
        parts = packed.split([len(matrix) for matrix in matrices], 1)
        for projection, own in zip(choice.projections, parts, strict=True):
            projection.weight.data = own if isinstance(projection, Conv1D) else own.t()
    return packed


def _bias(choice: Choice) -> Tensor | None:
    """The biases side by side; None if there is none."""
    biases = [getattr(projection, "bias", None) for projection in choice.projections]
    if all(bias is None for bias in biases):
        return None
    weights = [matrix_of(projection) for projection in choice.projections]
    parts = [
        weight.new_zeros(len(weight)) if bias is None else bias.detach().to(weight.dtype)
        for bias, weight in zip(biases, weights, strict=True)
    ]
    return torch.cat(parts)


SCHEMA = "(Tensor x, Tensor norms, Tensor weight, Tensor? bias, int count) -> Tensor"


@torch.library.custom_op("tomoe::inputs", mutates_args=(), schema=SCHEMA)
def inputs(x: Tensor, norms: Tensor, weight: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """The kernel as a PyTorch operator, for graphs; weight [n, D], which it reads by columns where they are rows in memory.
    Raises RuntimeError if it could not be compiled."""
    columns, bind = weight.t(), kernel()
    if columns.stride(1) != 1:
        return F.linear(chosen_inputs(x, norms, count), weight, bias)
    if bind is None:
        raise RuntimeError("the kernel for inputs is missing (no C++ compiler, or TOMOE_NATIVE=0)")
    return bind(norms, columns, bias)(x, count)


@inputs.register_fake
def _like(x: Tensor, norms: Tensor, weight: Tensor, bias: Tensor | None, count: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


Product = Callable[[Tensor, int], Tensor]  # y [.., n] of x [.., D] and the number of its inputs that each token uses
Kernel = Callable[[Tensor, Tensor, Tensor | None], Product]
"""The product by a matrix, of norms [D], the matrix [D, n] and its bias [n]; it does not keep the matrix alive."""


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
    bind = _typed(library)
    agrees = all(_agrees_with_pytorch(bind, dtype, tokens) for dtype in DTYPES for tokens in (1, 2, 3, 4))
    return bind if agrees else None


def _typed(library: ctypes.CDLL) -> Kernel:
    tokens = [POINTER, INT64, INT64]
    arguments = [INT32, *tokens, POINTER, INT64, POINTER, INT64, INT64, POINTER, POINTER, INT32]
    compiled = function(library, "tomoe_inputs", arguments, "the sums of a projection")

    def bind(norms: Tensor, packed: Tensor, bias: Tensor | None) -> Product:
        width, columns = packed.shape
        is_bfloat16 = packed.dtype == torch.bfloat16
        weight, stride = packed.data_ptr(), packed.stride(0)

        def product(x: Tensor, count: int) -> Tensor:
            x = x.contiguous()
            y = x.new_empty(*x.shape[:-1], columns)
            compiled(
                is_bfloat16,
                *(x.data_ptr(), x.numel() // width, width),
                *(norms.data_ptr(), count),
                *(weight, stride, columns, None if bias is None else bias.data_ptr()),
                *(y.data_ptr(), torch.get_num_threads()),
            )
            return y

        return product

    return bind


def _agrees_with_pytorch(bind: Kernel, dtype: torch.dtype, tokens: int) -> bool:
    """Compare what the compiler made of the source with PyTorch: 70 of 150 inputs, 107 outputs and a bias."""
    width, columns, count = 150, 107, 70
    sizes = ((tokens, width, 977), (width, columns, 1009), (1, columns, 1511))
    x, weight, bias = (trial(*size).to(dtype) for size in sizes)
    norms = torch.linspace(1, 2, width)
    y = bind(norms, weight, bias)(x, count).float()
    meant = chosen_inputs(x, norms, count).float() @ weight.float() + bias.float()
    return bool((y - meant).abs().max() <= (1e-5 if dtype == torch.float32 else 1e-2) * meant.abs().max())
