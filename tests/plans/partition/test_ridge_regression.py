"""Routers by ridge regression, beside direct solutions."""

from __future__ import annotations

import pytest
import torch

from tomoe.plans.partition import routers
from tomoe.plans.partition.routers import ROUTER_RIDGE, RidgeRegression


def test_dims_of_massive_activations_spoil_no_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Gram matrix whose largest entries are a billion times the others, as some models' inputs make it."""
    monkeypatch.setattr(routers, "ROUTER_RIDGE", 1e-9)  # wide models get as far with the usual one
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 24, generator=generator)
    x[:, 3] *= 3e4
    y = torch.rand(400, 6, generator=generator)
    weight, _ = RidgeRegression(x).fit(y)
    wide, gap = x.double() - x.double().mean(0), y.double() - y.double().mean(0)
    gram = wide.T @ wide
    gram.diagonal().add_(1e-9 * gram.diagonal().mean())
    exact = torch.linalg.solve(gram, wide.T @ gap).T
    scale = (weight.double() * exact).sum() / exact.square().sum()
    assert (weight - scale * exact).norm() <= 1e-2 * weight.norm()


def test_ridge_regression_is_least_squares_with_a_ridge() -> None:
    """Against the least squares of the problem with a row for each ridge; the scale makes logits vary by 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator) + torch.tensor([9.0, 0, 0, 0, 0, -3.0])
    y = torch.rand(200, 4, generator=generator) + (x[:, :4] > 0).float()
    weight, bias = RidgeRegression(x).fit(y)
    centered = x - x.mean(0)
    ridge = ROUTER_RIDGE * (centered.T @ centered).diagonal().mean()
    rows = torch.cat([centered, ridge.sqrt() * torch.eye(6)])
    solution = torch.linalg.lstsq(rows, torch.cat([y - y.mean(0), torch.zeros(6, 4)])).solution.T
    scale = 1 / (centered @ solution.T).std()
    # weights are rounded to bfloat16, and the bias belongs to the rounded ones
    torch.testing.assert_close(weight, scale * solution, rtol=2**-8, atol=1e-5)
    assert torch.equal(weight, weight.bfloat16().float())
    logits = x @ weight.T + bias
    torch.testing.assert_close(logits.mean(0), scale * y.mean(0), rtol=1e-4, atol=1e-4)
    assert float((logits - logits.mean(0)).std()) == pytest.approx(1, rel=1e-2)
