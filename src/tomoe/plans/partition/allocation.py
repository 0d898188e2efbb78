"""How many units each layer of a carved start, or each width of a plan, gets. A unit is the step of a width."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tomoe.errors import UserError


def allocate(losses: Sequence[Float[Tensor, " n1"]], params: Sequence[int], budget: float) -> list[int]:
    """Allocate units to layers, each where it saves most error, until the budget is spent.

    `losses` are the errors of each layer with 0, 1, .. units, `params` the parameters of so many units of any layer.
    """
    units = [1] * len(losses)
    errors = [loss.tolist() for loss in losses]
    spent = params[1] * len(losses)
    most = len(params) - 1

    def gain(i: int) -> float:
        n = units[i]
        loss = errors[i]
        return -max(0.0, loss[n] - loss[n + 1]) / (params[n + 1] - params[n])

    heap = [(gain(i), i) for i in range(len(losses)) if most > 1]
    heapq.heapify(heap)
    while heap:
        _, i = heapq.heappop(heap)
        added = params[units[i] + 1] - params[units[i]]
        if spent + added > budget + added / 2:
            continue
        units[i], spent = units[i] + 1, spent + added
        if units[i] < most:
            heapq.heappush(heap, (gain(i), i))
    return units


def spread_evenly(units: Sequence[int], most: int) -> list[int]:
    """Redistribute the units of layers below `most` evenly (to within one; the first layers get the remainder)."""
    others = [i for i, n in enumerate(units) if n < most]
    if not others:
        return list(units)
    each, left = divmod(sum(units[i] for i in others), len(others))
    even = dict(zip(others, [each + 1] * left + [each] * (len(others) - left), strict=True))
    return [even.get(i, n) for i, n in enumerate(units)]


def common_widths(mean: float, multiple: int, most: int) -> Iterator[int]:
    """Yield widths near `mean`, the nearest first: multiples of `multiple`, then of its half, its quarter, down to 1."""
    while multiple:
        below = int(mean // multiple) * multiple
        yield from sorted({min(max(w, 1), most) for w in (below, below + multiple)}, key=lambda w: abs(w - mean))
        multiple //= 2


def bisected(low: float, high: float, steps: int, too_low: Callable[[float], bool]) -> float:
    """Bisect for the smallest value that is high enough."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return high


@dataclass(frozen=True)
class Site:
    """One width that extraction chooses, in units (a multiple of neurons, a Q/K choice, a V/O dim)."""

    expected_units: Callable[[float], float]  # units that sampling would keep on average at a common logit offset
    params: Callable[[int], int]  # parameters of a number of units
    max_units: int

    def clipped_units(self, offset: float) -> float:
        return min(max(self.expected_units(offset), 1.0), float(self.max_units))

    def expected_params(self, offset: float) -> float:
        """Interpolate `params` between integer units."""
        units = self.clipped_units(offset)
        low = int(units)
        high = min(low + 1, self.max_units)
        return self.params(low) + (self.params(high) - self.params(low)) * (units - low)


def common_offset(sites: Sequence[Site], target: int) -> float:
    """Find the logit offset at which all sites together have `target` expected parameters. Raises UserError if even the smallest
    widths cost more."""
    least = sum(site.params(1) for site in sites)
    if least > target:
        raise UserError(
            f"the plan needs at least {least:,} active decoder parameters, but the budget allows {target:,}; "
            "set a larger active fraction"
        )
    return bisected(-60.0, 60.0, 60, lambda offset: sum(site.expected_params(offset) for site in sites) < target)


def whole_units(sites: Sequence[Site], offset: float, target: int) -> list[int]:
    """Round the expected units of every site at `offset` so that the parameters come nearest to `target`."""
    expected = [site.clipped_units(offset) for site in sites]
    units = [int(n) for n in expected]
    total = sum(site.params(n) for site, n in zip(sites, units, strict=True))
    # round up those with the largest remainder, as long as that comes nearer to the target
    for i in sorted(range(len(sites)), key=lambda i: (units[i] - expected[i], i)):
        if units[i] < sites[i].max_units:
            added = sites[i].params(units[i] + 1) - sites[i].params(units[i])
            if abs(total + added - target) < abs(total - target):
                units[i], total = units[i] + 1, total + added
    return units


def units_by_layer(layers: Sequence[Sequence[Site]], offset: float, target: int) -> list[list[int]]:
    """Return `whole_units` of the sites of all layers, layer by layer."""
    units = iter(whole_units(list(itertools.chain(*layers)), offset, target))
    return [list(itertools.islice(units, len(sites))) for sites in layers]
