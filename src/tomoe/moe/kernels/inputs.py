"""The inputs that tokens choose, and projections that read only the columns of these.

For the latter a projection's matrix is stored column by column (`prepare_`), as an image is in `channels_last`: its shape, values
and writes to it are unaffected. A matrix with another memory layout is multiplied by PyTorch.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tomoe.moe.kernels.build import INT32, INT64, POINTER, function, load_library
from tomoe.moe.kernels.linear import hooks_of
from tomoe.moe.kernels.native import DTYPES, obstacle_of, trial
from tomoe.moe.modeling_tomoe import Choice, chosen_inputs, few, learns, matrix_of, multiplies, sum_rows

SOURCE = Path(__file__).with_name("inputs.cpp")
UNPREPARED = "it was loaded by transformers alone; load it by `tomoe.load`, or give it to `tomoe.prepare`"


# What torch.compile traces has no shapes in its signature: x is [.., D], norms are [D].
def finds_largest(x: Tensor, norms: Tensor, count: int) -> bool:
    """Whether the kernel can find the largest inputs: on a CPU, in a supported dtype."""
    if torch.compiler.is_compiling() or not x.is_cpu or x.dtype not in DTYPES or not x.numel():
        return False
    return kernel() is not None


def obstacle(x: Tensor, norms: Tensor, count: int) -> str | None:
    """Say what a user could change so that the kernel reads only the columns of the largest inputs; None if nothing."""
    return obstacle_of(SOURCE, kernel() is not None, x, x) or UNPREPARED


def largest(x: Tensor, norms: Tensor, count: int) -> Tensor:
    """Zero all entries of x but the largest of each token, in the kernel. Gradients flow through these."""
    found = kernel()
    assert found is not None
    kept = found.keep(x.detach(), norms.float(), count)
    if not learns(x, ()):
        return kept
    which = kept != 0
    # a zero may have been chosen, too, and its gradient counts
    return x * which if bool((which.sum(-1) == count).all()) else chosen_inputs(x, norms, count)


class InputsLinear(nn.Linear):
    """A linear layer whose weight is stored column by column, and whose tokens choose their inputs."""

    choice: Choice  # the layer's, not a module of this one

    def forward(self, x: Tensor) -> Tensor:
        return product(self, x)


class InputsConv1D(Conv1D):
    """The same for Conv1D, whose weight is always stored this way."""

    choice: Choice

    def forward(self, x: Tensor) -> Tensor:
        return product(self, x)


def prepare_(model: nn.Module) -> None:
    """Run projections whose tokens choose inputs in the kernel, where possible. Not at construction: quantizers look for
    PyTorch's own class."""
    names = {module: name for name, module in model.named_modules()}
    for choice, projections in getattr(model, "choices", tuple)():
        for projection in projections:
            if _can_lie_by_inputs(projection, choice) and kernel() is not None:
                model.set_submodule(names[projection], _by_inputs(projection, choice))


def _can_lie_by_inputs(projection: nn.Module, choice: Choice) -> bool:
    """Whether a projection is a plain linear layer whose weights may be stored by columns and whose tokens choose."""
    if type(projection) not in (nn.Linear, Conv1D) or hooks_of(projection) != [choice.before]:
        return False
    weight: Any = projection.weight
    return weight.is_cpu and weight.dtype in DTYPES and type(weight.data) is Tensor


def _by_inputs(projection: Any, choice: Choice) -> nn.Module:
    outputs, width = matrix_of(projection).shape
    made: Any
    if isinstance(projection, Conv1D):
        with torch.device("meta"):
            made = InputsConv1D(outputs, width)
    else:
        made = InputsLinear(width, outputs, bias=projection.bias is not None, device="meta")
        # weights that can be trained later are no tensors of inference mode
        with torch.inference_mode(False), torch.no_grad():
            projection.weight.data = projection.weight.t().contiguous().t()
    made.weight, made.bias = projection.weight, projection.bias
    made.__dict__["choice"] = choice
    return made.train(projection.training)


# What torch.compile traces has no shapes in its signature: x is [.., D], what it returns [.., n].
def product(projection: Any, x: Tensor) -> Tensor:
    """Compute a projection whose tokens choose their inputs, in the kernel for a few tokens."""
    choice: Choice = projection.choice
    rows = kernel_rows(projection, x)
    if rows is not None:
        if torch.compiler.is_compiling():
            return inputs(x, choice.norms, matrix_of(projection), projection.bias, choice.count)
        found = kernel()
        assert found is not None
        return found.product(x, choice.norms.float(), rows, projection.bias, choice.count)
    x, rows = choice(x), matrix_of(projection).t()
    if torch.compiler.is_compiling() or rows.stride(-1) != 1 or multiplies(x.dtype) or not x.is_cpu:
        return F.linear(x, rows.t(), projection.bias)
    # PyTorch is slow at matrices that lie so
    y = sum_rows(x.flatten(0, -2), rows).unflatten(0, x.shape[:-1])
    return y if projection.bias is None else y + projection.bias


def kernel_rows(projection: Any, x: Tensor) -> Tensor | None:
    """Return the matrix [D, n] if the kernel can multiply x by it now, and x has few enough tokens."""
    if not (few(x) and x.is_cpu and x.dtype in DTYPES and x.numel()):
        return None
    weight, bias = projection._parameters.get("weight"), projection.bias
    # a weight may be computed anew at each use, or have got another dtype, device, kind or layout
    if weight is None or weight.dtype != x.dtype or not weight.is_cpu or type(weight.data) is not Tensor:
        return None
    rows: Tensor = matrix_of(projection).t()
    if rows.stride(1) != 1 or (bias is not None and (bias.dtype != x.dtype or not bias.is_cpu)):
        return None
    return rows if not learns(x, [weight]) and available() else None


SCHEMA = "(Tensor x, Tensor norms, Tensor weight, Tensor? bias, int count) -> Tensor"


@torch.library.custom_op("tomoe::inputs", mutates_args=(), schema=SCHEMA)
def inputs(x: Tensor, norms: Tensor, weight: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """The kernel as a PyTorch operator, for graphs; weight [n, D], read by columns, which are contiguous in memory. Raises
    RuntimeError if it could not be compiled."""
    columns, found = weight.t(), kernel()
    if columns.stride(1) != 1:
        return F.linear(chosen_inputs(x, norms, count), weight, bias)
    if found is None:
        raise RuntimeError("the kernel for inputs is missing (no C++ compiler, or TOMOE_NATIVE=0)")
    return found.product(x, norms.float(), columns, bias, count)


@inputs.register_fake
def _like(x: Tensor, norms: Tensor, weight: Tensor, bias: Tensor | None, count: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def available() -> bool:
    """Whether the kernel could be compiled and computes what PyTorch computes."""
    return kernel() is not None


@cache
def kernel() -> Kernel | None:
    """The compiled functions; None if they do not compile or disagree with PyTorch on this machine."""
    library = load_library(SOURCE)
    if library is None:
        return None
    found = Kernel(library)
    return (
        found
        if all(_agrees_with_pytorch(found, dtype, tokens) for dtype in DTYPES for tokens in (1, 2, 3, 4))
        else None
    )


class Kernel:
    """The compiled functions, for tensors of one dtype of DTYPES on the CPU; norms are float32."""

    def __init__(self, library: ctypes.CDLL):
        tokens = [INT32, POINTER, INT64, INT64, POINTER, INT64]
        self._keep = function(library, "tomoe_chosen", [*tokens, POINTER, INT32], "the choice of inputs")
        matrix = [POINTER, INT64, INT64, POINTER]
        self._product = function(
            library, "tomoe_inputs", [*tokens, *matrix, POINTER, INT32], "the sums of a projection"
        )

    def keep(self, x: Tensor, norms: Tensor, count: int) -> Tensor:
        """Zero all entries of x [.., D] but the `count` largest of each token."""
        x = x.contiguous()
        y = torch.empty_like(x)
        self._keep(*_tokens(x, norms, count), y.data_ptr(), torch.get_num_threads())
        return y

    def product(self, x: Tensor, norms: Tensor, rows: Tensor, bias: Tensor | None, count: int) -> Tensor:
        """Compute y [.., n] from at most four tokens x [.., D], a matrix [D, n] with contiguous rows, and a bias [n]."""
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], rows.shape[1])
        matrix = rows.data_ptr(), rows.stride(0), rows.shape[1], None if bias is None else bias.data_ptr()
        self._product(*_tokens(x, norms, count), *matrix, y.data_ptr(), torch.get_num_threads())
        return y


def _tokens(x: Tensor, norms: Tensor, count: int) -> tuple[int, ...]:
    width = x.shape[-1]
    return x.dtype == torch.bfloat16, x.data_ptr(), x.numel() // width, width, norms.data_ptr(), count


def _agrees_with_pytorch(found: Kernel, dtype: torch.dtype, tokens: int) -> bool:
    """Compare the compiled kernel with PyTorch: 70 of 150 inputs, 107 outputs and a bias."""
    width, columns, count = 150, 107, 70
    sizes = ((tokens, width, 977), (width, columns, 1009), (1, columns, 1511))
    x, weight, bias = (trial(*size).to(dtype) for size in sizes)
    norms = torch.linspace(1, 2, width)
    chosen = chosen_inputs(x, norms, count)
    y = found.product(x, norms, weight, bias, count).float()
    meant = chosen.float() @ weight.float() + bias.float()
    near = (y - meant).abs().max() <= (1e-5 if dtype == torch.float32 else 1e-2) * meant.abs().max()
    return bool(near) and torch.equal(found.keep(x, norms, count), chosen)
