"""From groups of neurons to a plan: the error of every number of experts, and the budget among layers."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from conftest import make_pico, tokens
from tomoe.budget import BUDGET_TOLERANCE, active_fraction, router_params
from tomoe.errors import UserError
from tomoe.methods.carve import Carve
from tomoe.methods.tomoe.carving import carve_
from tomoe.methods.tomoe.extract import extract_plan
from tomoe.methods.tomoe.method import new_network
from tomoe.model.structure import shape_of
from tomoe.plans import Plan
from tomoe.plans.partition import experts as partition
from tomoe.plans.partition.experts import error_curve, plan_fine
from tomoe.plans.partition.layouts import layout_of
from tomoe.recipe.conversion import ExpertsSection, Recipe

TEXT = tokens(4, 24), torch.ones(4, 24, dtype=torch.bool)


def fine(**keys: object) -> ExpertsSection:
    return ExpertsSection(**({"form": "fine", "num_experts": 64} | keys))


def direct_losses(
    logits: Float[Tensor, "t N"], h: Float[Tensor, "t F"], down: Float[Tensor, "D F"], expert: Int[Tensor, " F"]
) -> list[float]:
    """The squared error with 0, 1, .. N experts, token by token."""
    losses = []
    for k in range(logits.shape[1] + 1):
        total = 0.0
        for t in range(len(h)):
            chosen = set(logits[t].topk(k).indices.tolist()) | {-1}
            gone = torch.tensor([int(e) not in chosen for e in expert])
            total += float((down[:, gone] @ h[t, gone]).square().sum())
        losses.append(total)
    return losses


def lower_hull(values: list[float]) -> list[float]:
    """By brute force: the smallest value that a chord between two points has."""
    points = range(len(values))
    return [
        min(
            values[x] if a == b else values[a] + (values[b] - values[a]) * (x - a) / (b - a)
            for a in points
            for b in points
            if a <= x <= b and (a < b or a == x)
        )
        for x in points
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_error_curve_is_the_convex_hull_of_what_is_computed_directly(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, h = (torch.randn(20, n, generator=generator) for n in (8, 19))
    down = torch.randn(5, 19, generator=generator)
    expert = torch.tensor([-1] * 3 + [n // 2 for n in range(16)])[torch.randperm(19, generator=generator)]
    expected = direct_losses(logits, h, down, expert)
    # a neuron can cancel another, so errors need not be convex, nor even fall
    routed = expert >= 0
    curve = error_curve(logits, h[:, routed], down[:, routed], expert[routed]).tolist()
    assert curve == pytest.approx(lower_hull(expected), rel=1e-4, abs=1e-4)
    assert all(b - a <= c - b + 1e-6 for a, b, c in zip(curve, curve[1:], curve[2:], strict=False))


def carved(model: PreTrainedModel, recipe: Recipe, tolerance: float = BUDGET_TOLERANCE) -> Plan:
    """The plan of a recipe, the same from `carve`, the default, and from `tomoe` before its first step. Raises UserError, before
    the carve, if no layout meets the budget."""
    net = new_network(recipe, model)
    carve_(net, model, *TEXT, recipe.active, recipe.seed)
    plan = extract_plan(net, model, recipe.active, TEXT, tolerance)
    if recipe.attention.pruning == "off":
        layout = layout_of(recipe, shape_of(model))
        default = plan_fine(Carve().experts, model, plan.shape, layout, TEXT, recipe.active, tolerance, recipe.seed)
        for one, other in zip(plan.layers, default.layers, strict=True):
            assert all(same(value, getattr(other, name)) for name, value in vars(one).items())
    return plan


def same(one: object, other: object) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["off", "per_token"])
def test_what_is_known_of_a_budget_is_what_the_carve_finds(attention: str) -> None:
    """The sizes alone tell which budgets can be met, and a carve that begins ends in a plan that meets it."""
    model = make_pico("llama", intermediate_size=512)
    experts = dict(form="fine", num_experts=32, width_multiple=8)
    met = set()
    # a router of V/O dims is larger than what is left of a pico model near 1
    for active in (0.05, 0.3, 0.6, 1.0 if attention == "off" else 0.6):
        recipe = Recipe(active=active, experts=experts, attention=dict(pruning=attention))
        # attention of a pico model has few dims, which cannot take up every rest
        tolerance = BUDGET_TOLERANCE if attention == "off" else 0.01
        try:
            layout_of(recipe, shape_of(model))
        except UserError:
            continue
        plan = carved(model, recipe, tolerance)
        assert plan.active_fraction() == pytest.approx(active, abs=tolerance)
        assert all(1 <= layer.top_k <= 32 for layer in plan.layers)
        met.add(active)
    assert met >= ({0.3, 1.0} if attention == "off" else {0.3, 0.6})
    assert 0.05 not in met


@pytest.mark.parametrize("dense_layers", [0, 1, 9])
def test_one_number_of_experts_for_all_layers_but_the_first(dense_layers: int) -> None:
    """As stock targets need it; the first layers may stay whole, but not the last one."""
    model = make_pico("llama", intermediate_size=512, num_hidden_layers=3)
    shape = shape_of(model)
    whole = min(dense_layers, 2)
    widths = [(512, 8, 8)] * whole + [(128 + 10 * 12, 8, 8)] * (3 - whole)
    active = active_fraction(shape, widths, 3 * router_params(shape, 32))
    experts = fine(num_experts=32, expert_size=12, dense_layers=dense_layers)
    plan = carved(model, Recipe(active=active, experts=experts, target="glm4_moe"))
    assert {(layer.expert_size, layer.shared_size) for layer in plan.counts} == {(12, 128)}
    assert [layer.top_k for layer in plan.layers] == [32] * whole + [10] * (3 - whole)


def test_layers_get_equally_many_experts_unless_their_error_leaves_them_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_pico("llama", intermediate_size=512, num_hidden_layers=4)
    recipe, wanted = Recipe(active=0.599, experts=fine(num_experts=32, expert_size=12)), list[int]()
    given = partition.spread_evenly
    monkeypatch.setattr(partition, "spread_evenly", lambda units, most: wanted.extend(units) or given(units, most))
    used = [layer.top_k for layer in carved(model, recipe).layers]
    # once for each method
    assert wanted[:4] == wanted[4:]
    del wanted[4:]
    others = [(own, even) for own, even in zip(wanted, used, strict=True) if own < 32]
    assert sum(wanted) == sum(used)
    assert len({own for own, _ in others}) > 2
    assert max(even for _, even in others) - min(even for _, even in others) <= 1


def test_a_layout_for_a_gpu_leaves_no_layer_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole layer would use more experts than fused routing takes, and leave the others few."""
    model = make_pico("llama", intermediate_size=2304, num_hidden_layers=4)
    monkeypatch.setattr(partition, "allocate", lambda losses, params, budget: [16, 5, 2, 2])
    shape = shape_of(model)
    widths = [(256 + 128 * top_k, shape.head_dim, shape.head_dim) for top_k in (7, 6, 6, 6)]
    active = active_fraction(shape, widths, 4 * router_params(shape, 16))
    plan = carved(model, Recipe(active=active, target="gpu"))
    assert plan.num_experts == 16
    assert [layer.top_k for layer in plan.layers] == [7, 6, 6, 6]
