"""Clusters of one size: the best assignment against every other one."""

from __future__ import annotations

import itertools

import pytest
import torch

from tomoe.plans.partition.clusters import optimal_assignment


@pytest.mark.parametrize("values", [3, 1000])
@pytest.mark.parametrize(("rows", "columns", "size"), [(9, 3, 3), (8, 4, 2), (7, 4, 2), (4, 1, 4), (5, 5, 1)])
def test_the_optimal_assignment_has_the_largest_sum(values: int, rows: int, columns: int, size: int) -> None:
    """Of all assignments of rows to columns that have room; with few values there are many ties."""
    generator = torch.Generator().manual_seed(values)
    places = [column for column in range(columns) for _ in range(size)]
    for _ in range(4):
        # all rows like some columns more, so that they have to move
        scores = torch.randint(values, (rows, columns), generator=generator) + 2.0 * torch.arange(columns)
        assigned = optimal_assignment(scores, size)
        assert int(assigned.bincount(minlength=columns).max()) <= size
        table = scores.tolist()
        largest = max(
            sum(row[c] for row, c in zip(table, chosen, strict=True))
            for chosen in set(itertools.permutations(places, rows))
        )
        assert float(scores.gather(1, assigned[:, None]).sum()) == largest
