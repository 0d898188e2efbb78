"""The output matrix by the kernel, against its definition, and where it is taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tomoe.moe.kernels import logits
from tomoe.moe.modeling_tomoe import choose

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.skipif(logits.multiplier() is None, reason="no C++ compiler"),
]
EXPERTS = SimpleNamespace(chooses_inputs=False)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 32), (37, 70), (1100, 64), (2049, 33)]
)  # odd ones, several pieces of rows
def test_it_computes_its_definition(tokens: int, rows: int, size: int) -> None:
    multiply = logits.multiplier()
    assert multiply is not None
    x, weight = draw(1, tokens, size, seed=0), draw(rows, size, seed=1)
    meant = x.double() @ weight.double().t()
    # half a step of bfloat16 by the rounding, and what sums in float32 lose
    assert bool(((multiply(x, weight).double() - meant).abs() <= meant.abs() * 2**-8 + 1e-4).all())


def test_neither_threads_nor_other_tokens_change_a_byte() -> None:
    multiply = logits.multiplier()
    assert multiply is not None
    x, weight = draw(3, 96, seed=0), draw(5000, 96, seed=1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([multiply(x[t : t + 1], weight) for t in range(3)])
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(multiply(x, weight), alone)
    finally:
        torch.set_num_threads(before)


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """For few tokens of bfloat16, of a plain output matrix that nothing learns, on processors where it was faster."""
    monkeypatch.setattr(logits, "PROCESSOR", {})
    head, x = nn.Linear(32, 48, bias=False).bfloat16().requires_grad_(False), draw(1, 1, 32, seed=0)

    class Another(nn.Linear):
        pass

    other = Another(32, 48, bias=False).bfloat16().requires_grad_(False)
    biased = nn.Linear(32, 48).bfloat16().requires_grad_(False)
    learns = nn.Linear(32, 48, bias=False).bfloat16()
    whole, part = (SimpleNamespace(chooses_inputs=True, tomoe_active=active) for active in (1, 0.6))
    assert (
        choose("logits", head, EXPERTS, x)
        == choose("logits", head, part, x)
        == choose("logits", learns, part, x)
        == "native"
    )
    for refused in ((head, whole, x), (other, part, x), (biased, part, x), (head, part, x.expand(1, 5, 32))):
        assert choose("logits", *refused) == "pytorch"
    assert choose("logits", head.float(), part, x.float()) == "pytorch"
    with torch.enable_grad():
        assert choose("logits", learns, part, x) == "pytorch"
    monkeypatch.setattr(logits, "PROCESSOR", {"amx_bf16": True})
    assert choose("logits", head.bfloat16(), part, x) == "pytorch"
