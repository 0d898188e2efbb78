"""Routers: their logits and the experts with the largest ones, on the CPU in a kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tomoe.moe.kernels.build import INT32, INT64, POINTER, function, load_library
from tomoe.moe.kernels.native import DTYPES, MATRIX_DIMS, PROCESSOR, SOURCE, Algorithm, has_matrix_units, kernel, trial
from tomoe.moe.modeling_tomoe import BACKENDS, Router, keep, learns

# On a processor with matrix units, products of tiles were faster than PyTorch's from so many tokens on.
MATRIX_TOKENS = 16


# What torch.compile traces has no shapes in its signature: x is [T, D], what it returns [T, N].
def supports_native(router: Router, x: Tensor) -> bool:
    """Whether the kernel can compute the logits and was faster than PyTorch on this kind of processor."""
    if torch.compiler.is_compiling() or not _fits(router, x):
        return False
    return fastest_algorithm(len(x), x.shape[1], x.dtype) is not None and multiplier() is not None


def native_logits(router: Router, x: Tensor) -> Tensor:
    """Compute the router's logits in the kernel, with float32 sums.

    Weights with bfloat16 values, as tomoe writes them, are multiplied with bfloat16 tokens as such: each product is exact.
    """
    algorithm, multiply = fastest_algorithm(len(x), x.shape[1], x.dtype), multiplier()
    assert algorithm is not None
    assert multiply is not None, "the native kernel is missing"
    return multiply(x.contiguous(), router.weight.contiguous(), router.bias, algorithm)


def supports_precise(router: Router, x: Tensor) -> bool:
    """Whether this is on a GPU, where matrix products may be configured to round."""
    return not torch.compiler.is_compiling() and x.device.type != "cpu"


def precise_logits(router: Router, x: Tensor) -> Tensor:
    """Compute the router's logits in PyTorch without rounding a factor."""
    with exact_products(router, x.dtype):
        return BACKENDS["router logits"]["pytorch"].run(router, x)


@contextmanager
def exact_products(router: Router, dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, float32 matrix products on a GPU use TF32 only where that rounds no factor."""
    settings: Any = torch.backends.cuda.matmul
    before = settings.fp32_precision
    # TF32 holds tokens of 16 bits, and bfloat16 values
    exact = dtype in (torch.bfloat16, torch.float16) and holds_bfloat16(router)
    settings.fp32_precision = "tf32" if exact else "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


def holds_bfloat16(router: Router) -> bool:
    """Whether all weights are bfloat16 values; checked again when they were replaced or written to, because a GPU would have to
    be waited for. Writes through `.data` go unseen: at worst TF32 rounds factors."""
    weight = router.weight
    version = None if weight.is_inference() else weight._version
    exact = lambda: torch.equal(weight, weight.bfloat16().to(weight.dtype))  # noqa: E731
    return bool(keep(router.__dict__, "holds_bfloat16", (id(weight), weight.data_ptr(), version), exact))


def fastest_algorithm(tokens: int, size: int, dtype: torch.dtype) -> Algorithm | None:
    """Return the algorithm that was fastest on this kind of processor; None if PyTorch was, or none was measured."""
    if PROCESSOR.get("amx_bf16"):
        fits = dtype == torch.bfloat16 and tokens >= MATRIX_TOKENS and size % MATRIX_DIMS == 0
        return Algorithm.MATRIX if fits and has_matrix_units() else None
    return Algorithm.ROWS if PROCESSOR.get("avx512_bf16") else None


def _fits(router: Router, x: Tensor) -> bool:
    """Whether this is on a CPU, in dtypes that the kernel supports, without gradients."""
    parameters = [p for p in (router.weight, router.bias) if p is not None]
    if x.device.type != "cpu" or x.dtype not in DTYPES or x.dim() != 2:
        return False
    if any(p.device.type != "cpu" or p.dtype != torch.float32 for p in parameters):
        return False
    return not learns(x, parameters)


# No shapes here either: logits are [T, N], what it returns is [T, k].
def finds_largest(logits: Tensor, top_k: int) -> bool:
    """Whether the kernel can find the experts with the largest logits: float32 on a CPU, and a compiler."""
    if torch.compiler.is_compiling() or logits.device.type != "cpu" or logits.dtype != torch.float32:
        return False
    return finder() is not None


def largest(logits: Tensor, top_k: int) -> Tensor:
    """Return the experts with the largest logits of each token, in any order; PyTorch's if logits tie at the border."""
    find, logits = finder(), logits.contiguous()
    ids = torch.empty(len(logits), top_k, dtype=torch.long)
    if find and not find(logits.data_ptr(), *logits.shape, top_k, ids.data_ptr()):
        return ids
    return BACKENDS["largest logits"]["pytorch"].run(logits, top_k)


@cache
def finder() -> Callable[..., int] | None:
    """The compiled search for the largest logits; None if it does not compile or disagrees with PyTorch."""
    library = load_library(SOURCE) if kernel() else None
    return None if library is None else function(library, "tomoe_largest", [POINTER, INT64, INT32, INT32, POINTER])


Multiplier = Callable[[Tensor, Tensor, Tensor | None, Algorithm], Tensor]


@cache
def multiplier() -> Multiplier | None:
    """The compiled product of x [T, D] and weight [N, D], plus bias [N]; None where `finder` is."""
    library = load_library(SOURCE) if kernel() else None
    if library is None:
        return None
    multiply = _typed(library)
    algorithms = [(dtype, Algorithm.ROWS) for dtype in DTYPES]
    if has_matrix_units():
        algorithms.append((torch.bfloat16, Algorithm.MATRIX))
    return multiply if all(_agrees_with_pytorch(multiply, dtype, how) for dtype, how in algorithms) else None


def _typed(library: ctypes.CDLL) -> Multiplier:
    arguments = [INT32, INT32, POINTER, INT64, INT64, POINTER, POINTER, INT64, POINTER, INT32]
    compiled = function(library, "tomoe_router", arguments, "the weights of a router")

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, algorithm: Algorithm) -> Tensor:
        out = torch.empty(len(x), len(weight), dtype=torch.float32)
        compiled(
            x.dtype == torch.bfloat16,
            algorithm,
            x.data_ptr(),
            *x.shape,
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            len(weight),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    return multiply


def _agrees_with_pytorch(multiply: Multiplier, dtype: torch.dtype, algorithm: Algorithm) -> bool:
    """Compare with PyTorch: 19 tokens of 70 or 96 dims, 37 experts; those before the 33rd have bfloat16 values, or all have."""
    size = 70 if algorithm == Algorithm.ROWS else 96
    x, weight = (trial(n, size, seed) for n, seed in ((19, 977), (37, 1009)))
    x, bias, short = x.to(dtype), torch.linspace(-1, 1, 37), slice(32 if algorithm == Algorithm.ROWS else None)
    weight[short] = weight[short].bfloat16().float()
    return torch.allclose(multiply(x, weight, bias, algorithm), F.linear(x.float(), weight, bias), atol=1e-4, rtol=0)
