"""The division of a budget among layers."""

from __future__ import annotations

import itertools

import pytest
import torch

from tomoe.plans.partition.allocation import allocate, spread_evenly


def test_allocation_is_the_best_for_convex_losses() -> None:
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(3):
        drops = torch.rand(4, generator=generator).sort(descending=True).values
        losses.append(torch.cat([drops.flip(0).cumsum(0).flip(0), torch.zeros(1)]))
    units = allocate(losses, [0, 10, 20, 30, 40], 80.0)
    assert sum(units) == 8
    best = min(
        (u for u in itertools.product(range(1, 5), repeat=3) if sum(u) == 8),
        key=lambda u: sum(loss[n] for loss, n in zip(losses, u, strict=True)),
    )
    assert tuple(units) == best


@pytest.mark.parametrize(
    ("units", "even"),
    [
        ([8, 6, 1, 2, 2], [8, 3, 3, 3, 2]),
        ([1, 8, 5, 8], [3, 8, 3, 8]),
        ([8, 8], [8, 8]),
        ([1], [1]),
    ],
)
def test_spread_units_keep_the_sum_and_dense_layers(units: list[int], even: list[int]) -> None:
    assert spread_evenly(units, most=8) == even
    assert sum(even) == sum(units)
