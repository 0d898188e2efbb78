"""How experts divide the neurons of a layer: decided once, from a recipe and the sizes of a model, before a weight is read.

The mask network, the carve, the extraction and the estimate of memory all receive the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from tomoe.budget import BUDGET_TOLERANCE, attention_params, decoder_params, mlp_params, router_params
from tomoe.errors import UserError
from tomoe.model.shape import ModelShape, ceil_div
from tomoe.recipe.conversion import AttentionSection, ExpertsSection, Recipe
from tomoe.recipe.target_rules import (
    FINE_MULTIPLE,
    GPU_EXPERTS_PER_TOKEN,
    GPU_WIDTH,
    MAX_EXPERTS_PER_TOKEN,
    STOCK_MULTIPLE,
    TARGET_RULES,
    TargetRules,
)

FINE_EXPERTS = (256, 128, 64)
"""Numbers of fine-grained experts unless the recipe gives one: more are better as long as routers cost little (docs/lab/log.md):
each expert costs a token as much as a third of a gated neuron. Any model and any stock format takes the last number."""
GPU_NUMBERS = (256, 128, 64, 32, 16)  # the same for a GPU, whose kernels want a power of two
NEURONS_PER_EXPERT = 18
"""Neurons of a layer that there must be for each of the larger numbers: the router then costs at most 1/54 of the dense MLP."""
FEWER_EXPERTS = 0.25
"""Share of the fine-grained experts that a stock format may do without, to be held without zeros and to meet the budget."""
SHARED_SLACK = 0.25
"""How far the shared part may be from the wanted one, as a share of a token's neurons, to get a rounder expert size."""
NEAR_ACTIVE = 0.05  # how far from an active that no layout meets another is looked for
STORED_ZEROS = 0.02
"""Neurons of zeros that a stock format may hold, as a share of a layer's, if another layout needs no more than that."""


@dataclass(frozen=True)
class OverlappingLayout:
    """Experts of which a token uses one; the calibration text decides their width and which neurons they share."""

    num_experts: int
    width_multiple: int  # neurons that widths are multiples of
    common_multiple: int = 0
    """Divisor of the width that all layers share if the budget allows; 0: layers may differ in width."""
    counts_routers: bool = True
    """Whether the budget counts routers (`Recipe.counts_routers`)."""
    allows_dense: ClassVar[bool] = True  # whether a layer is dense if the allocation gives it every expert

    @property
    def uniform(self) -> bool:
        """Whether all layers have one width."""
        return self.common_multiple > 0

    @property
    def advice(self) -> str:
        """What to change if widths are too coarse for a budget."""
        return f"widths are multiples of experts.width_multiple = {self.width_multiple}: choose a smaller one"

    def widths(self, mlp_size: int) -> list[int]:
        """Neurons per token with 0, 1, .. multiples, up to the dense layer."""
        return [min(n * self.width_multiple, mlp_size) for n in range(ceil_div(mlp_size, self.width_multiple) + 1)]


@dataclass(frozen=True)
class FineLayout:
    """How fine-grained experts divide the F neurons of a layer: shared + num_experts * expert_size = F."""

    num_experts: int
    expert_size: int
    shared: int
    top_k: int  # experts of a token if layers use equally many
    uniform: bool = False  # whether they must
    dense_layers: int = 0  # if they must: this many of the first layers use all experts
    router_bias: bool = True  # whether routers have biases
    allows_dense: bool = True  # whether a layer is dense if the allocation gives it every expert
    counts_routers: ClassVar[bool] = True

    @property
    def advice(self) -> str:
        """What to change if experts are too coarse for a budget."""
        return (
            f"experts have {self.expert_size} neurons: set a smaller experts.expert_size, or more experts.num_experts"
        )

    def widths(self, mlp_size: int) -> list[int]:
        """Neurons per token with 0, 1, .. experts, up to the dense layer."""
        return [*range(self.shared, mlp_size + 1, self.expert_size)]

    def width(self, top_k: int) -> int:
        """Neurons per token with so many experts."""
        return self.shared + top_k * self.expert_size

    def top_ks(self, num_layers: int) -> list[int]:
        """Experts per token in every layer, if layers must use equally many."""
        return [self.num_experts] * self.dense_layers + [self.top_k] * (num_layers - self.dense_layers)


Layout = OverlappingLayout | FineLayout


def layout_of(recipe: Recipe, shape: ModelShape) -> Layout:
    """Return the layout that a recipe asks for. Raises UserError if no plan can meet the budget, whatever its masks."""
    return _fine_layout(shape, recipe) if recipe.experts.form == "fine" else _overlapping_layout(shape, recipe)


def _overlapping_layout(shape: ModelShape, recipe: Recipe) -> OverlappingLayout:
    uniform, active = TARGET_RULES[recipe.target].uniform, recipe.active
    multiple = recipe.experts.width_multiple
    least = _checked_least(shape, recipe)
    common = max(STOCK_MULTIPLE, multiple) if uniform else 0
    layout = OverlappingLayout(recipe.experts.num_experts, multiple, common, recipe.counts_routers)
    if recipe.attention.pruning == "off" and not uniform and shape.mlp_size % multiple == 0:
        # every layer has one unit at least, and all units cost the same: the plan has the nearest number of them
        total, unit = decoder_params(shape), int(mlp_params(shape, multiple))
        smallest = round(least * total)
        extra_units = max(0, round((active * total - smallest) / unit))
        check_tolerance((smallest + extra_units * unit) / total, active, BUDGET_TOLERANCE, layout)
    return layout


def _fine_layout(shape: ModelShape, recipe: Recipe) -> FineLayout:
    rules, experts, asked = TARGET_RULES[recipe.target], recipe.experts, recipe.active
    dense_layers = min(experts.dense_layers, shape.num_layers - 1) if rules.uniform else 0

    def search(active: float) -> _Search:
        return _search(shape, experts, recipe.attention, active, rules, dense_layers)

    numbers = _numbers_to_try(shape, experts, rules)
    layout = search(asked).best(numbers)
    if layout is None:
        least = _checked_least(shape, recipe)
        nearby = (near for near in _near(asked) if near >= least)
        raise search(asked).refusal(numbers[-1], next((near for near in nearby if search(near).best(numbers)), None))
    if rules.bounded and layout.top_k > MAX_EXPERTS_PER_TOKEN:
        raise UserError(
            f"a token would use {layout.top_k} experts of {layout.expert_size} neurons, and llama.cpp takes at most "
            f"{MAX_EXPERTS_PER_TOKEN}; leave experts.expert_size out, or make it larger"
        )
    layout = replace(layout, uniform=rules.uniform, dense_layers=dense_layers)
    return replace(layout, router_bias=rules.router_bias, allows_dense=not rules.gpu)


def _near(active: float) -> list[float]:
    """Other shares within NEAR_ACTIVE, in thousandths, the nearest first."""
    first, last = math.ceil(1000 * (active - NEAR_ACTIVE)), math.floor(1000 * (active + NEAR_ACTIVE))
    nearby = (n / 1000 for n in range(max(1, first), min(1000, last) + 1))
    return sorted(nearby, key=lambda near: abs(near - active))


def _numbers_to_try(shape: ModelShape, experts: ExpertsSection, rules: TargetRules) -> Sequence[int]:
    """Numbers of fine-grained experts, the best first: the given one, or the usual ones for a layer of this width."""
    if experts.num_experts:
        return [experts.num_experts]
    if rules.gpu:
        return GPU_NUMBERS
    if rules.numbers and not experts.expert_size:
        return rules.numbers
    *more, fewest = FINE_EXPERTS
    wide_enough = [] if rules.uniform else [n for n in more if n * NEURONS_PER_EXPERT <= shape.mlp_size]
    return [*wide_enough, fewest]


def _search(
    shape: ModelShape,
    experts: ExpertsSection,
    attention: AttentionSection,
    active: float,
    rules: TargetRules,
    dense_layers: int,
) -> _Search:
    """Collect what a layout must meet. Pruned attention, where layers may differ, absorbs the remainder of integer experts."""
    choices, dims = attention_units(shape, attention, active)
    qk_dims = round(shape.head_dim * choices / max(1, shape.num_qk_choices))
    total = shape.other_params + shape.num_layers * attention_params(shape, qk_dims, dims)
    total += value_router_params(shape, experts, attention, dims)
    left = active * decoder_params(shape) - total - dense_layers * mlp_params(shape, shape.mlp_size)
    neuron = mlp_params(shape, 1) * (shape.num_layers - dense_layers)
    exact = rules.uniform or attention.pruning == "off"
    slack = tolerance_of(rules) * decoder_params(shape) / neuron if exact else math.inf
    return _Search(experts, rules, shape, left, neuron, slack, 1 if rules.uniform else shape.num_layers)


@dataclass(frozen=True)
class _Search:
    """The search for a layout in which a token uses the neurons that routers leave it, to within `slack`, on average over layers
    with their own top k."""

    experts: ExpertsSection
    rules: TargetRules
    shape: ModelShape
    left: float  # parameters for the routers of all layers, and the MLPs of these layers
    neuron: float  # parameters of one neuron in each of these layers
    slack: float
    layers: int  # 1: all use equally many experts

    def best(self, numbers: Sequence[int]) -> FineLayout | None:
        """The layout for the first of these numbers of experts that has one; for a GPU for any of them."""
        if self.rules.gpu:
            return self.for_gpu(numbers)
        if not self.rules.uniform or self.experts.expert_size:
            return next(filter(None, (self.roundest([n]) for n in numbers)), None)
        # few experts only where their rows are whole blocks; the last number takes what there is
        *few, last = numbers
        return next(filter(None, map(self._in_blocks, few)), None) or self.for_stock(last)

    @property
    def mlp_size(self) -> int:
        return self.shape.mlp_size

    def width(self, number: int) -> float:
        """Neurons per token beside the routers of so many experts."""
        return (self.left - self.shape.num_layers * router_params(self.shape, number)) / self.neuron

    def wanted(self, number: int) -> float:
        """Desired neurons of the shared part with so many experts."""
        return self.experts.shared * self.width(number)

    def for_stock(self, number: int) -> FineLayout | None:
        """The layout of a stock format, which may have a quarter fewer experts, and fewer still if a token would use too many.

        With fewer if only that meets the width, or if the format has to hold more than STORED_ZEROS of zeros otherwise, or if
        only these have the rows that its blocks divide.
        """
        fewest = math.ceil(number * (1 - FEWER_EXPERTS))
        most_zeros = STORED_ZEROS * self.mlp_size
        numbers = range(number, fewest - 1, -1)
        return (
            (self._in_blocks(number) if self.rules.block > 1 else None)
            or self.roundest([number], most_zeros, MAX_EXPERTS_PER_TOKEN)
            or self.roundest(numbers, most_zeros, MAX_EXPERTS_PER_TOKEN)
            or self._with_fewest_zeros(numbers)
            or self._with_fewest_zeros(range(fewest - 1, MAX_EXPERTS_PER_TOKEN - 1, -1))
        )

    def _in_blocks(self, number: int) -> FineLayout | None:
        """The layout with so many experts, or more than half as many, whose rows the format's blocks divide."""
        fewest = math.ceil(number * (1 - FEWER_EXPERTS))
        ranges = ([number], range(number, fewest - 1, -1), range(fewest - 1, number // 2, -1))
        most_zeros = STORED_ZEROS * self.mlp_size
        found = (self.roundest(some, most_zeros, MAX_EXPERTS_PER_TOKEN, self.rules.block) for some in ranges)
        return next(filter(None, found), None)

    def for_gpu(self, numbers: Sequence[int]) -> FineLayout | None:
        """The layout for a GPU: near the wanted shared part if possible, then of most experts, then of the roundest size."""

        def worth(layout: FineLayout) -> tuple[bool, int, int, float]:
            round_size = math.gcd(layout.expert_size, GPU_WIDTH)
            return self._near(layout), layout.num_experts, round_size, -self._off(layout)

        return max((layout for n in numbers for layout in self._wide_layouts(n)), key=worth, default=None)

    def refusal(self, number: int, near: float | None) -> UserError:
        """Say that there is no layout; `near`: another active fraction that has one, if known."""
        would_do = "" if near is None else f" (active = {near:g} would do)"
        if self.rules.gpu:
            return UserError(
                f"no layout for a GPU divides the {self.mlp_size:,} neurons of a layer so that a token uses "
                f"{self.width(number):,.0f} of them: it wants a power of two of experts, at least {GPU_NUMBERS[-1]}, of at least "
                f"{GPU_WIDTH} neurons, at most {GPU_EXPERTS_PER_TOKEN} of them for a token, and a multiple of their width as "
                f"the shared part; set target to hf, or another active{would_do}"
            )
        given_size = "" if not self.experts.expert_size else f" of {self.experts.expert_size} neurons"
        exactly = "" if math.isinf(self.slack) else f" (to {self.slack:,.1f} exactly)"
        return UserError(
            f"{number} fine-grained experts{given_size} cannot divide {self.mlp_size:,} neurons so that a token uses "
            f"{self.width(number):,.0f} of them{exactly}; change experts.num_experts, experts.expert_size or active{would_do}"
        )

    def roundest(
        self, numbers: Sequence[int], most_zeros: float = math.inf, max_used: float = math.inf, block: int = 1
    ) -> FineLayout | None:
        """The layout whose expert size is a multiple of the largest possible divisor of `width_multiple`."""
        multiple = self.experts.width_multiple
        while multiple and multiple % block == 0:
            found = [x for x in self._layouts(numbers, multiple, max_used) if stored_zeros(x) <= most_zeros]
            if found:
                return min(found, key=self._off)
            multiple //= 2
        return None

    def _with_fewest_zeros(self, numbers: Sequence[int]) -> FineLayout | None:
        found = self._layouts(numbers, 1, MAX_EXPERTS_PER_TOKEN)
        return min(found, key=lambda layout: (stored_zeros(layout), self._off(layout)), default=None)

    def _off(self, layout: FineLayout) -> float:
        return abs(layout.shared - self.wanted(layout.num_experts))

    def _near(self, layout: FineLayout) -> bool:
        # more than is wanted only up to half of the layer: beyond, there is too little left to choose from
        number = layout.num_experts
        most_shared = max(self.wanted(number), self.mlp_size / 2)
        return self._off(layout) <= SHARED_SLACK * self.width(number) and layout.shared <= most_shared

    def _layouts(self, numbers: Sequence[int], multiple: int, max_used: float) -> Iterator[FineLayout]:
        """Yield layouts with expert sizes that are a multiple of so many neurons, or the given size, and meet the width."""
        given = self.experts.expert_size
        for n in numbers:
            for size in [given] if given else range(multiple, self.mlp_size // n + 1, multiple):
                layout = self._layout(n, size)
                in_experts = math.ceil(layout.shared / size) if self.rules.shared_in_experts else 0
                few = layout.top_k + in_experts <= max_used
                if few and (given or self._near(layout)) and self._meets(layout):
                    yield layout

    def _wide_layouts(self, number: int) -> Iterator[FineLayout]:
        """Yield layouts of so many experts that a GPU runs well and that meet the width."""
        given = self.experts.expert_size
        for size in [given] if given else range(GPU_WIDTH, self.mlp_size // number + 1, FINE_MULTIPLE):
            layout = self._layout(number, size)
            # layers may differ by one
            most_used = math.ceil((self.width(number) - layout.shared) / size)
            if (
                number.bit_count() == 1
                and number >= GPU_NUMBERS[-1]
                and size >= GPU_WIDTH
                and layout.shared % size == 0
                and most_used <= GPU_EXPERTS_PER_TOKEN
                and self._meets(layout)
            ):
                yield layout

    def _layout(self, number: int, size: int) -> FineLayout:
        shared = self.mlp_size - number * size
        top_k = round((self.width(number) - shared) / size)
        return FineLayout(number, size, shared, min(max(1, top_k), number))

    def _meets(self, layout: FineLayout) -> bool:
        """Whether the parts fill a layer and a token can have the width."""
        n, size, shared = layout.num_experts, layout.expert_size, layout.shared
        width = self.width(n)
        used = min(round(self.layers * (width - shared) / size), self.layers * n) / self.layers
        fits = shared == 0 or (shared > 0 and self.rules.holds_shared)
        return fits and shared + size <= width and abs(shared + used * size - width) <= self.slack


def stored_zeros(layout: FineLayout) -> int:
    """Neurons of zeros with which a stock format pads the experts of a layer, and its shared part to a multiple of them."""
    size = ceil_div(layout.expert_size, FINE_MULTIPLE) * FINE_MULTIPLE
    return layout.num_experts * (size - layout.expert_size) + -layout.shared % size


def attention_units(shape: ModelShape, attention: AttentionSection, active: float) -> tuple[int, int]:
    """Return the Q/K choices and V/O dims that a carved start keeps in every layer."""
    if attention.pruning == "off":
        return shape.num_qk_choices, shape.head_dim
    kept = 1 - attention.share * (1 - active)
    return max(1, round(kept * shape.num_qk_choices)), max(1, round(kept * shape.head_dim))


def value_router_params(shape: ModelShape, experts: ExpertsSection, attention: AttentionSection, dims: int) -> int:
    """Count the weights of all routers that choose `dims` V/O dims for each token; 0 where none chooses."""
    chooses = attention.pruning == "per_token" and dims < shape.head_dim
    return shape.num_layers * router_params(shape, 0, experts.embedding_size) if chooses else 0


def least_active(shape: ModelShape, recipe: Recipe) -> float:
    """Return the smallest active fraction of any plan: the narrowest MLP, one unit at every other site, and routers if the budget
    counts them."""
    experts, attention = recipe.experts, recipe.attention
    smallest_qk = 2 if shape.rotary_size == shape.head_dim else 1
    dims = (shape.head_dim, shape.head_dim) if attention.pruning == "off" else (smallest_qk, 1)
    total = shape.num_layers * attention_params(shape, *dims) + shape.other_params
    if recipe.counts_routers:
        total += value_router_params(shape, experts, attention, dims[1])
    mlps = min(mlp + recipe.counts_routers * router for mlp, router in _least_mlps(shape, recipe))
    return float(total + shape.num_layers * mlps) / decoder_params(shape)


def _least_mlps(shape: ModelShape, recipe: Recipe) -> Iterator[tuple[int, int]]:
    """Parameters of the narrowest MLP and its router, for each possible number of experts."""
    experts = recipe.experts
    if experts.form == "overlapping":
        width = min(experts.width_multiple, shape.mlp_size)
        yield mlp_params(shape, width), router_params(shape, experts.num_experts)
        return
    for n in _numbers_to_try(shape, experts, TARGET_RULES[recipe.target]):
        # the shared part and one expert
        width = shape.mlp_size - (n - 1) * (experts.expert_size or max(1, shape.mlp_size // n))
        yield mlp_params(shape, min(width, shape.mlp_size)), router_params(shape, n)


def _checked_least(shape: ModelShape, recipe: Recipe) -> float:
    """`least_active`. Raises UserError if the recipe asks for less."""
    least = least_active(shape, recipe)
    if recipe.active < least:
        condition = " with dense attention (attention.pruning = off)" if recipe.attention.pruning == "off" else ""
        raise UserError(
            f"active is {recipe.active}, but this model{condition} can be cut to {math.ceil(1000 * least) / 1000:.3f} of its "
            f"decoder parameters and no further{_share_of_routers(shape, recipe)}"
        )
    return least


def _share_of_routers(shape: ModelShape, recipe: Recipe) -> str:
    """Say what routers take of the smallest budget, and what to change."""
    number = recipe.experts.num_experts
    share = shape.num_layers * router_params(shape, number) / decoder_params(shape)
    if not recipe.counts_routers or share < BUDGET_TOLERANCE:
        return "; set a larger active"
    return f", of which the routers of {number} experts take {share:.3f}; set a larger active, or fewer experts.num_experts"


def tolerance_of(rules: TargetRules) -> float:
    """Largest distance between the active fraction of a plan for this target and the requested one."""
    return max(BUDGET_TOLERANCE, rules.tolerance)


def check_tolerance(nearest: float, active: float, tolerance: float, layout: Layout) -> None:
    """Raise UserError if the nearest plan is too far from the budget."""
    if abs(nearest - active) > tolerance:
        raise UserError(
            f"the nearest plan has {nearest:.4f} of the decoder parameters active, requested {active:.4f}; {layout.advice}"
        )
