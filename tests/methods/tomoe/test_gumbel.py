"""Samples: how often they keep, what gradient they give, and that a seed says everything."""

from __future__ import annotations

import itertools

import pytest
import torch

from tomoe.methods.tomoe.gumbel import (
    gumbel_noise,
    gumbel_sigmoid,
    gumbel_softmax,
    keep_logit,
    keep_probability,
)
from tomoe.seeds import derive_seed

DRAWS = 200_000


@pytest.mark.parametrize("keep_bias", [0.0, 3.0])
def test_keep_probability_is_how_often_a_dim_is_kept(keep_bias: float) -> None:
    logits = torch.tensor([-6.0, -3.0, -1.0, 0.0, 0.5])
    kept = gumbel_sigmoid(logits.expand(DRAWS, -1), 0.4, keep_bias, seed=0).mean(0)
    expected = keep_probability(logits, keep_bias)
    deviation = (expected * (1 - expected) / DRAWS).sqrt()
    assert ((kept - expected).abs() <= 5 * deviation + 1e-6).all()


@pytest.mark.parametrize("keep_bias", [0.0, 3.0])
def test_keep_logit_is_the_inverse(keep_bias: float) -> None:
    probability = torch.tensor([1e-6, 0.01, 0.3, 0.5, 0.9, 1 - 1e-6], dtype=torch.float64)
    logits = keep_logit(probability, keep_bias)
    torch.testing.assert_close(keep_probability(logits, keep_bias), probability, rtol=1e-9, atol=0)
    assert (logits.diff() > 0).all()


def test_noise_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends of what `rand` may return as well."""
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor([0.0, 1e-30, 0.5, 1 - 2**-24]))
    assert gumbel_noise(torch.zeros(4), 0).isfinite().all()


def test_mask_is_hard_and_its_gradient_soft() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(2))
    mask = gumbel_sigmoid(logits, 0.4, 1.0, seed=3)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    (actual,) = torch.autograd.grad((mask * weight).sum(), logits)

    x = logits.detach().clone().requires_grad_()
    drawn = gumbel_noise(x, 3)
    soft = torch.sigmoid((x + drawn + 1.0) / 0.4)
    assert torch.equal(mask, (x + drawn + 1.0 > 0).float())
    (expected,) = torch.autograd.grad((soft * weight).sum(), x)
    torch.testing.assert_close(actual, expected)


def test_assignment_is_one_hot_and_its_gradient_soft() -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    assignment, probs = gumbel_softmax(logits, 0.4, seed=3)
    assert torch.equal(assignment.detach().sum(-1), torch.ones(6))
    assert set(assignment.detach().unique().tolist()) == {0.0, 1.0}
    (actual,) = torch.autograd.grad((assignment * weight).sum(), logits, retain_graph=True)

    x = logits.detach().clone().requires_grad_()
    soft = torch.softmax((x + gumbel_noise(x, 3)) / 0.4, -1)
    torch.testing.assert_close(probs, soft)
    assert torch.equal(assignment.argmax(-1), soft.argmax(-1))
    (expected,) = torch.autograd.grad((soft * weight).sum(), x)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("temperature", [0.1, 0.4, 2.0])
def test_experts_are_drawn_as_often_as_softmax_says(temperature: float) -> None:
    """Whatever the temperature: it sharpens the gradient, not the draw."""
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    drawn = gumbel_softmax(logits.expand(DRAWS, -1), temperature, seed=0)[0].mean(0)
    expected = logits.softmax(-1)
    assert ((drawn - expected).abs() <= 5 * (expected * (1 - expected) / DRAWS).sqrt()).all()


def test_derived_seeds_differ() -> None:
    parts: list[tuple[int | str, ...]] = [
        *itertools.product(range(20), range(20)),
        *((n,) for n in range(20)),
        *itertools.product(("router", "values"), range(20)),
        *(("1", 1), ("11",), (11, "x"), (1, "1x")),
    ]
    seeds = {derive_seed(*p) for p in parts}
    assert len(seeds) == len(set(parts))
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "step", 1) == derive_seed(0, "step", 1)
