"""Routers in the compiled kernel: their logits, and the experts with the largest of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_native import TILES, library_with
from torch import Tensor

from tomoe.moe.kernels import build, native, router
from tomoe.moe.kernels.native import Algorithm
from tomoe.moe.modeling_tomoe import BACKENDS, Router, compute

pytestmark = pytest.mark.slow
compiled = pytest.mark.skipif(
    build.load_library(native.SOURCE) is None, reason="this machine has no C++ compiler with OpenMP"
)


@pytest.fixture(
    params=[Algorithm.ROWS, *TILES], ids=["rows", "tiles of the processor", "plain tiles", "plain tiles, narrow"]
)
def algorithm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Algorithm:
    """The algorithm that everything goes that fits, whatever was the fastest here; PyTorch multiplies nothing."""
    rows = request.param == Algorithm.ROWS
    multiply = router._typed(library_with(*(() if rows else request.param)))
    monkeypatch.setattr(router, "multiplier", lambda: multiply)

    def fastest(tokens: int, size: int, dtype: torch.dtype) -> Algorithm:
        fits = dtype == torch.bfloat16 and size % native.MATRIX_DIMS == 0
        return Algorithm.MATRIX if fits and not rows else Algorithm.ROWS

    monkeypatch.setattr(router, "fastest_algorithm", fastest)
    monkeypatch.delitem(BACKENDS["router logits"], "pytorch")
    return request.param


@compiled
def test_what_was_compiled_agrees_with_pytorch_and_is_used() -> None:
    assert router.finder() is not None
    assert router.multiplier() is not None


@compiled
@pytest.mark.parametrize("shape", [(1, 128, 28), (300, 128, 74), (40, 256, 140), (5, 7, 7), (5, 7, 1), (0, 8, 3)])
def test_the_largest_logits_are_those_that_pytorch_finds(shape: tuple[int, int, int]) -> None:
    tokens, experts, top_k = shape
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))
    expected = logits.topk(top_k).indices.sort(1).values
    assert torch.equal(compute("largest logits", logits, top_k).sort(1).values, expected)
    assert torch.equal(compute("largest logits", logits.double(), top_k).sort(1).values, expected)
    wide = torch.cat([logits, logits + 9], 1)
    assert torch.equal(compute("largest logits", wide[:, :experts], top_k).sort(1).values, expected)  # not contiguous


@compiled
def test_equal_logits_at_the_border_are_left_to_pytorch() -> None:
    """Experts that score alike must fall as they fell in training, where PyTorch chooses."""
    logits = torch.zeros(3, 9)
    logits[:, 4], logits[1] = 1.0, -0.0
    logits[2, :3] = torch.tensor([-torch.inf, torch.inf, 2.0])
    assert torch.equal(compute("largest logits", logits, 4), logits.topk(4, sorted=False).indices)
    assert compute("largest logits", logits[2:], 3).tolist() == [[1, 2, 4]]  # no two are equal there


def make(tokens: int, size: int, experts: int, dtype: torch.dtype, bias: bool = True) -> tuple[Router, Tensor]:
    generator = torch.Generator().manual_seed(experts)
    made = Router(size, experts, bias=bias).requires_grad_(False)
    for p in made.parameters():
        p.copy_(torch.randn(p.shape, generator=generator))
    made.weight.copy_(made.weight.bfloat16())
    return made, torch.randn(tokens, size, generator=generator).to(dtype)


def exact(made: Router, x: Tensor) -> Tensor:
    logits = x.double() @ made.weight.double().t()
    return logits if made.bias is None else logits + made.bias.double()


def error(made: Router, x: Tensor) -> float:
    """Of the logits, relative to the longest sum of products."""
    logits = made(x)
    assert logits.dtype == torch.float32
    scale = (x.double().abs() @ made.weight.double().abs().t()).max()
    return float((logits.double() - exact(made, x)).abs().max() / scale)


SHAPES = [(1, 576, 256), (7, 64, 8), (13, 70, 37), (100, 33, 33), (300, 128, 64), (6, 15, 1), (50, 96, 70)]


@compiled
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", native.DTYPES)
def test_logits_are_sums_in_float32_of_exact_products(
    dtype: torch.dtype, shape: tuple[int, int, int], bias: bool, algorithm: Algorithm
) -> None:
    made, x = make(*shape, dtype, bias)
    assert error(made, x) < 1e-6


@compiled
@pytest.mark.parametrize("dtype", native.DTYPES)
def test_weights_that_bfloat16_cannot_hold_are_not_rounded(dtype: torch.dtype, algorithm: Algorithm) -> None:
    made, x = make(50, 96, 70, dtype)
    made.weight[40] += 2.0**-12  # in a later block of rows
    made.weight[40, 5] += 1.0
    assert error(made, x) < 1e-6


@compiled
@pytest.mark.parametrize("dtype", native.DTYPES)
def test_a_logit_does_not_depend_on_other_tokens_or_on_threads(
    dtype: torch.dtype, algorithm: Algorithm, set_threads: Callable[[int], None]
) -> None:
    """As long as it goes one algorithm."""
    made, x = make(77, 200 if algorithm == Algorithm.ROWS else 192, 50, dtype)
    together = made(x)
    assert torch.equal(together, torch.cat([made(x[i : i + 1]) for i in range(len(x))]))
    set_threads(5)
    assert torch.equal(together, made(x))


@compiled
def test_tokens_and_weights_need_not_be_contiguous(algorithm: Algorithm) -> None:
    made, x = make(9, 64, 40, torch.bfloat16)
    expected = made(x)
    made.weight = torch.nn.Parameter(made.weight.t().contiguous().t(), requires_grad=False)
    strided = torch.stack([x, x], -1)[..., 0]
    assert not made.weight.is_contiguous()
    assert not strided.is_contiguous()
    assert torch.equal(made(strided), expected)


@compiled
def test_a_router_that_changes_is_not_remembered(algorithm: Algorithm) -> None:
    made, x = make(9, 64, 40, torch.bfloat16)
    before = made(x)
    made.weight.data.mul_(2)
    made.bias.data.mul_(2)
    torch.testing.assert_close(made(x), 2 * before)


def test_routers_that_learn_and_other_dtypes_are_left_to_pytorch() -> None:
    made, x = make(9, 64, 40, torch.float32)
    made.requires_grad_(True)
    made(x).sum().backward()
    assert made.weight.grad is not None
    torch.testing.assert_close(made.weight.grad, x.sum(0).expand(40, 64))
    made.requires_grad_(False)
    assert made.double()(x.double()).dtype == torch.float64
    assert made.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_a_gpu_rounds_no_factor_of_a_router() -> None:
    """TF32 holds tokens of 16 bits and weights that bfloat16 holds; anything else is multiplied in full."""
    settings = torch.backends.cuda.matmul
    made, _ = make(1, 16, 4, torch.bfloat16)
    settings.fp32_precision = "tf32"
    try:
        for dtype, precision in ((torch.bfloat16, "tf32"), (torch.float32, "ieee")):
            with router.exact_products(made, dtype):
                assert settings.fp32_precision == precision
        made.weight[1, 2] = 1 + 2.0**-12
        with router.exact_products(made, torch.bfloat16):
            assert settings.fp32_precision == "ieee"
        assert settings.fp32_precision == "tf32"
    finally:
        settings.fp32_precision = "none"
