"""Losses of a student against their plain formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tomoe.training.distillation import CHUNK, kl_loss, language_model_loss, shift_targets

D, V = 16, 50
LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 37]  # around the borders of chunks


def states(length: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(length, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def head(dtype: torch.dtype = torch.float32, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(D, V, bias=bias).to(dtype).requires_grad_(False)


def padding(length: int) -> Tensor:
    """Every third token is padding; the first never is."""
    return torch.arange(length) % 3 != 2


def plain_distillation(student: Tensor, teacher: Tensor, out: nn.Module, valid: Tensor) -> Tensor:
    p, q = (out(h[valid]).log_softmax(-1) for h in (teacher, student))
    return F.kl_div(q, p, log_target=True, reduction="batchmean")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_distillation_is_the_divergence_from_the_teacher(length: int, bias: bool) -> None:
    student, teacher = states(length, 1).requires_grad_(), states(length, 2)
    valid, out = padding(length), head(bias=bias)
    loss = kl_loss(student, teacher, out, valid)
    expected = plain_distillation(student, teacher, out, valid)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    # a factor in front, as gradient accumulation puts there
    (actual,), (grad,) = (torch.autograd.grad(value / 3, student) for value in (loss, expected))
    torch.testing.assert_close(actual, grad, rtol=1e-4, atol=1e-7)
    assert not actual[~valid].any()


def test_distillation_with_a_bfloat16_head_computes_in_float32() -> None:
    student, teacher = states(CHUNK + 5, 1, torch.bfloat16).requires_grad_(), states(CHUNK + 5, 2, torch.bfloat16)
    valid, out = padding(CHUNK + 5), head(torch.bfloat16)
    loss = kl_loss(student, teacher, out, valid)
    expected = plain_distillation(student, teacher, lambda h: out(h).float(), valid)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    (actual,), (grad,) = (torch.autograd.grad(value, student) for value in (loss, expected))
    assert actual.dtype == torch.bfloat16
    assert (actual - grad).float().norm() <= 0.01 * grad.float().norm()  # two roundings of 2^-9 each


@pytest.mark.parametrize("length", LENGTHS)
def test_language_model_loss_is_the_cross_entropy(length: int) -> None:
    student, valid, out = states(length, 1).requires_grad_(), padding(length), head()
    targets = torch.randint(V, (length,), generator=torch.Generator().manual_seed(3))
    loss = language_model_loss(student, targets, out, valid)
    expected = F.cross_entropy(out(student[valid]), targets[valid])
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    (actual,), (grad,) = (torch.autograd.grad(value, student) for value in (loss, expected))
    torch.testing.assert_close(actual, grad, rtol=1e-4, atol=1e-7)


class Sizes(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


@pytest.mark.parametrize("kind", ["kl", "lm"])
def test_no_tensor_of_all_logits_ever_exists(kind: str) -> None:
    length = 5 * CHUNK
    student, valid, out, batches = states(length, 1).requires_grad_(), torch.ones(length, dtype=torch.bool), head(), []

    def recording(h: Tensor) -> Tensor:
        batches.append(len(h))
        return out(h)

    with Sizes() as sizes:
        if kind == "kl":
            loss = kl_loss(student, states(length, 2), recording, valid)
        else:
            loss = language_model_loss(student, torch.zeros(length, dtype=torch.long), recording, valid)
        loss.backward()
    assert student.grad is not None
    assert max(batches) <= CHUNK
    assert sizes.largest <= max(CHUNK * V, length * D)


def test_targets_are_the_next_tokens() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
    targets, valid = shift_targets(ids, torch.tensor([[True] * 4, [True, True, False, False]]))
    assert targets[valid].tolist() == [6, 7, 8, 6]
    assert valid.tolist() == [True, True, True, False, True, False, False, False]
    left = torch.tensor([[False, False, True, True]])
    targets, valid = shift_targets(torch.tensor([[0, 0, 5, 6]]), left)
    assert targets[valid].tolist() == [6]
