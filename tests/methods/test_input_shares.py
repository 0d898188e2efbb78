"""How many inputs each projection gets: what leaving some out costs, and the search that divides a budget."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from conftest import make_pico, tokens
from tomoe.methods import inputs
from tomoe.methods.inputs import LEVELS, Costs, cheapest_path, group_norms, input_costs, inputs_at_level
from tomoe.model.projections import Group, Layer, groups_of

WIDTH = 40  # an input for each level


def layers_of(*columns: int) -> list[Layer]:
    """A layer with one projection each, of so many outputs."""
    return [{"up": Group(("up",), (nn.Linear(WIDTH, n, bias=False),))} for n in columns]


def costs_of(*curves: list[float]) -> Costs:
    return {(i, "up"): torch.tensor(curve) for i, curve in enumerate(curves)}


def quadratic(scale: float) -> list[float]:
    return [scale * (1 - level) ** 2 for level in LEVELS]


def test_costs_are_the_squares_of_what_dropped_inputs_change() -> None:
    """Against a product of each token's own, input by input."""
    model = make_pico("qwen2")
    layers, ids = groups_of(model), tokens(1, 12)
    found = input_costs(model, layers, ids, torch.ones_like(ids, dtype=torch.bool), seed=3)
    assert found.keys() == {(i, kind) for i, layer in enumerate(layers) for kind in layer}
    kept = inputs._with_gradients(model, layers, ids[0], torch.Generator().manual_seed(3))
    for (i, kind), x in kept.items():
        assert x.grad is not None
        x_TD, changes_TD = x[0].detach(), (x[0] * x.grad[0]).detach()
        norms = group_norms(layers[i][kind])
        looked_at = range(0, 12, inputs.THINNED)
        for level, cost in enumerate(found[i, kind].tolist()):
            expected = 0.0
            for t in looked_at:
                order = (x_TD[t].abs() * norms).sort(stable=True).indices
                dropped = order[: len(norms) - inputs_at_level(len(norms), level)]
                expected += float(changes_TD[t, dropped].double().square().sum()) / 2
            assert cost == pytest.approx(expected / len(looked_at), rel=1e-4, abs=1e-12)


def test_the_path_is_the_cheapest_where_no_floor_is_met() -> None:
    """Of convex costs: against all combinations of levels that save as much."""
    scales, columns = (1.0, 1.3, 0.8), (8, 8, 8)
    layers, curves = layers_of(*columns), costs_of(*map(quadratic, scales))
    total = WIDTH * sum(columns)
    for point in cheapest_path(layers, curves, total, 0.8):
        if point.active < 0.6:
            continue
        # between two levels a point has a part of a step
        levels = [LEVELS.index(min(LEVELS, key=lambda share: abs(share - n / WIDTH))) for n in point.inputs["up"]]
        cost = sum(float(curves[i, "up"][level]) for i, level in enumerate(levels))
        used = sum(point.inputs["up"])
        others = (
            sum(float(curves[i, "up"][level]) for i, level in enumerate(combination))
            for combination in itertools.product(range(len(LEVELS)), repeat=3)
            if sum(inputs_at_level(WIDTH, level) for level in combination) == used
        )
        assert cost == pytest.approx(min(others), abs=1e-6)


def test_no_projection_is_starved() -> None:
    """One that costs least, the less the further it goes, keeps FLOOR of the mean share at every budget."""
    columns = (16, 8, 4, 8)
    layers = layers_of(*columns)
    total = WIDTH * sum(columns)
    concave = [1e-4 * (1 - level) ** 0.5 for level in LEVELS]
    path = cheapest_path(layers, costs_of(concave, *map(quadratic, (1.0, 5.0, 2.0))), total, 0.45)
    assert min(abs(point.active - 0.45) for point in path) < max(columns) / total
    assert path[-1].inputs["up"] == [inputs_at_level(WIDTH, len(LEVELS) - 1)] * 4
    for point in path:
        used = sum(n * c for n, c in zip(point.inputs["up"], columns, strict=True))
        assert point.active == pytest.approx(used / total)
        least = min(point.inputs["up"]) / WIDTH
        # a point between two steps has a part of the next one, and no level is lower than the floor was before it
        assert least >= inputs.MIN_SHARE * point.active - 1e-9
        if point.active > 0.2 and min(point.inputs["up"][1:]) < WIDTH:
            assert least < inputs.MIN_SHARE * point.active + 0.05, "it gives what it may"
    for before, after in itertools.pairwise(path):
        assert all(a <= b for a, b in zip(after.inputs["up"], before.inputs["up"], strict=True))
