"""Extraction: the asked budget, exactly; equal widths; the best dims; the same bytes twice."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import PreTrainedModel

from conftest import make_network, make_pico, tokens
from tomoe.budget import BUDGET_TOLERANCE, active_fraction
from tomoe.errors import UserError
from tomoe.methods.tomoe.extract import Extraction, extract_plan
from tomoe.methods.tomoe.network import MaskNetwork
from tomoe.model.shape import ModelShape
from tomoe.model.structure import shape_of
from tomoe.plans import Plan
from tomoe.plans.masking import planned_masks
from tomoe.plans.partition.allocation import Site, common_offset, whole_units
from tomoe.plans.partition.layouts import layout_of, least_active
from tomoe.plans.routing import largest
from tomoe.recipe.conversion import AttentionSection, ExpertsSection, Recipe

MULTIPLE = 8
IDS = tokens(4, 16)
CALIBRATION = (IDS, torch.ones_like(IDS, dtype=torch.bool))


@functools.cache
def model() -> PreTrainedModel:
    """Fine enough for the budget: eight neurons of one layer are 0.35 % of the decoder parameters."""
    return make_pico("llama", hidden_size=64, intermediate_size=512, num_hidden_layers=4, num_key_value_heads=2)


def network(attention: str, spread: float = 1.0, **sizes: int) -> MaskNetwork:
    return make_network(model(), attention, spread, width_multiple=MULTIPLE, **sizes)


@functools.cache
def plan_of(attention: str) -> Plan:
    return extract_plan(network(attention), model(), 0.6, CALIBRATION)


@pytest.mark.slow
@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize(
    ("attention", "active", "spread"),
    [
        ("off", 0.5, 0.2),
        ("static", 0.85, 1.0),
        ("per_token", 0.3, 1.0),
        ("per_token", 0.62, 3.0),
        ("per_token", 1.0, 1.0),
    ],
)
def test_the_budget_is_met(attention: str, active: float, spread: float, counts: bool) -> None:
    """With routers, or without them as the paper counts; a layer that keeps all V/O dims has no router for them."""
    net = network(attention, spread, counts_routers=counts)
    plan = extract_plan(net, model(), active, CALIBRATION)
    assert abs(plan.active_fraction(routers=counts) - active) <= BUDGET_TOLERANCE == 0.002
    for layer, counts in zip(plan.layers, plan.counts, strict=True):
        assert layer.expert_masks.sum(1).unique().numel() == 1
        assert counts.width % MULTIPLE == 0
        assert counts.width >= MULTIPLE
        assert bool(layer.qk_kept.any())
        assert 1 <= layer.value_top_k <= int(layer.value_kept.sum())
        assert bool(layer.value_router) == (attention == "per_token" and layer.value_top_k < plan.shape.head_dim)
    if attention == "off":
        assert {(qk, values) for _, qk, values in plan.widths()} == {(16, 16)}


@pytest.mark.parametrize("attention", ["static", "per_token"])
def test_the_kept_dims_are_the_best(attention: str) -> None:
    net, plan = network(attention), plan_of(attention)
    with torch.no_grad():
        embeddings = net.hypernetwork()
        for i, layer in enumerate(plan.layers):
            logits = net.neurons[i](embeddings[2 * i + 1])
            for row, kept in zip(logits, layer.expert_masks, strict=True):
                assert row[kept].min() >= row[~kept].max()
            dims = net.attention.dims[i](net.attention.embeddings(embeddings)[i])
            values, qk = dims[: plan.shape.head_dim], dims[plan.shape.head_dim :]
            if not layer.qk_kept.all():
                assert qk[layer.qk_kept].min() >= qk[~layer.qk_kept].max()
            if not layer.value_kept.all():
                assert values[layer.value_kept].min() >= values[~layer.value_kept].max()
    widths = {layer.width for layer in plan.counts}
    assert len(widths) > 1, "all layers alike: nothing was learned from the logits"


def test_every_token_keeps_exactly_k() -> None:
    plan = plan_of("per_token")
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer, masks in zip(plan.layers, planned_masks(plan), strict=True):
            actual = masks.attention.values(x)
            assert layer.value_top_k < 16
            assert torch.equal(actual.sum(-1), torch.full((200,), float(layer.value_top_k)))
            assert len(actual.unique(dim=0)) > 1
    tied = largest(torch.zeros(5, 16), 3)
    assert torch.equal(tied.sum(-1), torch.full((5,), 3.0))


def test_the_plan_decides_as_the_network_does() -> None:
    """The value router of a plan gives the logits that training had, and the router is the trained one."""
    net, plan = network("per_token"), plan_of("per_token")
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        embeddings = net.attention.embeddings(net.hypernetwork())
        for i, masks in enumerate(planned_masks(plan)):
            found = masks.attention.value_logits(x)
            torch.testing.assert_close(found, net.attention.value_logits(i, x, embeddings[i]))
            assert torch.equal(masks.experts.router.weight, net.routers[i].weight.bfloat16().float())


def test_calibration_reads_real_tokens_only() -> None:
    attention, (ids, valid) = Extraction(network("per_token")).attention, CALIBRATION
    padded, real = (torch.nn.functional.pad(t, (0, 9), value=value) for t, value in ((ids, 7), (valid, False)))
    with torch.no_grad():
        for plan in (None, plan_of("per_token")):
            bare, among_padding = (
                attention.value_logits(model(), *text, plan) for text in ((ids, valid), (padded, real))
            )
            for one, other in zip(bare, among_padding, strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_network_and_model_are_left_alone() -> None:
    net, dense = network("per_token"), model()
    before, logits = {name: t.clone() for name, t in net.state_dict().items()}, dense(IDS).logits
    extract_plan(net, dense, 0.6, CALIBRATION)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert torch.equal(dense(IDS).logits, logits)
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in dense.modules())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "kind"), [("off", "neurons"), ("static", "qk"), ("static", "values"), ("per_token", "values")]
)
def test_higher_logits_make_a_wider_layer(attention: str, kind: str) -> None:
    """... and, as the budget stays, the others no wider."""
    net, before = network(attention), plan_of(attention).widths()
    if kind == "neurons":
        net.neurons[2].start += 1.0
    else:
        net.attention.dims[2].start[slice(0, 16) if kind == "values" else slice(16, None)] += 2.0
    after, place = extract_plan(net, model(), 0.6, CALIBRATION).widths(), ["neurons", "qk", "values"].index(kind)
    assert after[2][place] > before[2][place]
    others = [(a, b) for i, (a, b) in enumerate(zip(after, before, strict=True)) if i != 2]
    assert sum(a[0] for a, _ in others) <= sum(b[0] for _, b in others)


@pytest.mark.parametrize("attention", ["off", "static"])
def test_budgets_out_of_reach(attention: str) -> None:
    net = network(attention, counts_routers=True)
    experts = ExpertsSection(form="overlapping", width_multiple=MULTIPLE, num_experts=4)
    section = AttentionSection(pruning=attention)
    least = least_active(net.shape, Recipe(experts=experts, attention=section))
    with pytest.raises(UserError, match=r"needs at least .* but the budget allows .*; set a larger"):
        extract_plan(net, model(), 0.98 * least, CALIBRATION)
    plan = extract_plan(net, model(), least, CALIBRATION)
    assert plan.active_fraction() == pytest.approx(least)
    assert {width for width, _, _ in plan.widths()} == {MULTIPLE}


def test_widths_too_coarse_for_the_budget() -> None:
    net = make_network(model(), "off", width_multiple=256)
    with pytest.raises(UserError, match=r"0\.6000; .*width_multiple = 256: choose a smaller one"):
        extract_plan(net, model(), 0.6, CALIBRATION)


@pytest.mark.parametrize("multiple", [8, 256])
def test_what_is_known_of_a_budget_is_what_extraction_finds(multiple: int) -> None:
    """With attention whole, the sizes alone tell which budgets can be met; they are refused in the same words."""
    net = make_network(model(), "off", width_multiple=multiple, num_experts=8, counts_routers=True)
    outcomes, s = set(), net.shape
    half = active_fraction(s, [(s.mlp_size // 2, s.head_dim, s.head_dim)] * s.num_layers, net.counted_routers())
    for active in (0.05, half, 0.6, 1.0):
        recipe = Recipe(active=active, experts={"form": "overlapping", "width_multiple": multiple})
        errors = []
        for check in (
            lambda r: layout_of(r, net.shape),
            lambda r: extract_plan(net, model(), r.active, CALIBRATION),
        ):
            try:
                check(recipe)
            except UserError as error:
                errors.append(str(error))
        assert len(errors) in (0, 2), (active, errors)
        assert not errors or errors[0] == errors[1] or "can be cut to" in errors[0]
        outcomes.add(len(errors))
    assert outcomes == {0, 2}


def test_a_multiple_that_does_not_divide_the_layer() -> None:
    net = make_network(model(), "off", width_multiple=24)  # 512 = 21 x 24 + 8
    plan = extract_plan(net, model(), 1.0, CALIBRATION)
    assert {layer.width for layer in plan.counts} == {512}
    assert all(
        width % 24 == 0 or width == 512 for width, _, _ in extract_plan(net, model(), 0.6, CALIBRATION, 0.01).widths()
    )


def solve(sites: list[Site], target: int) -> list[int]:
    return whole_units(sites, common_offset(sites, target), target)


def sigmoid_site(most: int, cost: int, shift: float) -> Site:
    return Site(lambda o: most / (1 + 2.718281828 ** -(o + shift)), lambda n: n * cost, most)


@pytest.mark.parametrize("seed", range(10))
def test_unequal_costs_miss_by_half_a_unit_at_most(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randint, size=(), generator=generator)
    sites = [sigmoid_site(int(draw(2, 30)), int(draw(1, 50)), float(draw(-3, 4))) for _ in range(6)]
    least, most = sum(s.params(1) for s in sites), sum(s.params(s.max_units) for s in sites)
    largest = max(s.params(2) - s.params(1) for s in sites)
    for target in range(least, most + 1, max(1, (most - least) // 12)):
        units = solve(sites, target)
        assert abs(sum(s.params(n) for n, s in zip(units, sites, strict=True)) - target) <= largest / 2 + 1
    with pytest.raises(UserError, match="set a larger active fraction"):
        solve(sites, least - 1)


def test_all_sites_move_by_one_offset() -> None:
    """Widths are the expected ones at a common shift of the logits, to a unit."""
    sites = [sigmoid_site(1000, 3, shift) for shift in (-2.0, 0.0, 1.0)]
    units = solve(sites, 3 * 1400)
    offsets = [
        torch.logit(torch.tensor(n / 1000)).item() - shift for n, shift in zip(units, (-2.0, 0.0, 1.0), strict=True)
    ]
    assert max(offsets) - min(offsets) < 0.02


def test_the_plan_remembers_how_wide_training_left_each_expert() -> None:
    net = make_network(model(), "off", spread=2.0, width_multiple=MULTIPLE)
    plan = extract_plan(net, model(), 0.6, CALIBRATION)
    logits, offsets = Extraction(net).experts.neuron_logits, torch.arange(-5, 5, 0.01)[:, None, None]
    for row, layer, layer_logits in zip(plan.notes["expert_widths"], plan.counts, logits, strict=True):
        mean = sum(row) / len(row)
        assert abs(mean - layer.width) <= MULTIPLE / 2 + 1  # one width for all is their mean, but for whole units
        shifted = (1 - torch.exp(-torch.exp(layer_logits.detach() + 3.0 + offsets))).sum(-1)
        nearest = shifted[(shifted.mean(1) - mean).abs().argmin()]
        torch.testing.assert_close(torch.tensor(row).float(), nearest, atol=2.0, rtol=0.0)
        assert max(row) > min(row)


@pytest.mark.parametrize("attention", ["off", "static"])
def test_least_active_counts_one_unit_of_everything(attention: str) -> None:
    whole = ModelShape(2, 32, 48, 4, 2, 8, 8, True)
    partly = ModelShape(2, 32, 48, 4, 2, 8, 4, False)
    per_layer = {"off": 16, "static": 3}[attention]  # dims of Q/K and V/O; a pair is two
    total = 3 * 32 * 48 + 32 * 6 * 16

    def least(shape: ModelShape, width: int, **keys: object) -> float:
        experts = ExpertsSection(form="overlapping", width_multiple=width)
        return least_active(shape, Recipe(experts=experts, attention=AttentionSection(pruning=attention), **keys))

    routers = 8 * 32
    assert least(whole, 8) == pytest.approx((3 * 32 * 8 + 32 * 6 * per_layer + routers) / total)
    # the paper's budget
    paper = {"start": "random", "train": {"steps": 1}}
    assert least(whole, 8, **paper) == pytest.approx((3 * 32 * 8 + 32 * 6 * per_layer) / total)
    alone = 16 if attention == "off" else 2  # a dim that RoPE leaves alone is one
    assert least(partly, 100) == pytest.approx((2 * 32 * 48 + 32 * 6 * alone + routers) / (total - 32 * 48))
    assert shape_of(model()).num_qk_choices == 8
