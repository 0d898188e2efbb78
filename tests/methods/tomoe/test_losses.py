"""The penalties of the objective against their plain formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import ATTENTION_MODES, make_network, make_pico, projections, tokens
from tomoe.methods.tomoe.attention import SampledAttention
from tomoe.methods.tomoe.objective import (
    SampledLayerMasks,
    _Product,
    budget_penalty,
    coverage_penalty,
    layer_widths,
    log_ratio,
    objective,
    sampled_fraction,
    sampled_masks,
)
from tomoe.methods.tomoe.overlapping import SampledOverlapping
from tomoe.model.structure import shape_of
from tomoe.plans.masking import masked
from tomoe.plans.routing import ExpertRouter, Routing, balance_penalty
from tomoe.recipe.conversion import LossSection


def test_log_ratio() -> None:
    a = torch.tensor([0.2, 0.5, 0.7, 1.0])
    assert torch.equal(log_ratio(a, a.clone()), torch.zeros(4))
    torch.testing.assert_close(log_ratio(a, 0.5), log_ratio(torch.full((4,), 0.5), a))
    torch.testing.assert_close(log_ratio(3 * a, 1.5), log_ratio(a, 0.5))  # scale-free
    assert (log_ratio(torch.tensor([1.0, 0.6]), 0.5).diff() < 0).all()
    # floor: finite for an empty layer
    assert log_ratio(torch.tensor(0.0), 0.5).isfinite()
    far = torch.tensor([0.9, 0.9], requires_grad=True)
    log_ratio(far, torch.tensor([0.5, 0.1])).sum().backward()
    torch.testing.assert_close(far.grad, torch.tensor([1 / 0.9, 1 / 0.9]))  # as strong far away as near


def drawn(neuron_masks: Tensor, **of_attention: Tensor) -> SampledLayerMasks:
    """What the penalties read of sampled masks, without a network behind them."""
    masks = SampledLayerMasks(SampledOverlapping(ExpertRouter(1, len(neuron_masks)), neuron_masks, 1.0, seed=0))
    if of_attention:
        masks.attention = object.__new__(SampledAttention)
        vars(masks.attention).update(
            {"value_masks": None, "qk_mask": torch.ones(8), "static_values": None} | of_attention
        )
    return masks


def test_widths_are_those_of_the_widest_expert_and_token() -> None:
    shape = shape_of(make_pico("llama"))
    neurons, values = torch.zeros(2, 48), torch.zeros(3, 8)
    neurons[0, :5], neurons[1, 7:19] = 1.0, 1.0
    values[0, :2], values[2, 1:6] = 1.0, 1.0
    assert layer_widths([drawn(neurons, value_masks=values)], shape) == (12, 8, 5)
    assert layer_widths([drawn(neurons, qk_mask=values[2], static_values=values[0])], shape) == (12, 5, 2)


@pytest.mark.parametrize("rows", [8, 512])
def test_a_product_of_logarithms_is_that_of_torch(rows: int) -> None:
    """To 1e-5 of its size and gradient for any numbers; of the zeros and ones that masks are made of, bit by bit."""
    generator = torch.Generator().manual_seed(0)
    soft = 1 - torch.rand(3, rows, 40, generator=generator) / rows
    soft[:, 0, :20], soft[:, 1, :10] = 0, 0
    hard = (torch.rand(3, rows, 40, generator=generator) < 1 / rows).float()
    for masks, tolerance in ((soft, 1e-5), (1 - hard, 0)):
        found = []
        for product in (_Product.apply, lambda s: s.prod(-2)):
            s = masks.clone().requires_grad_()
            value = product(s)
            found.append((value, *torch.autograd.grad(value.square().sum() + value.sum(), s)))
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * 1e-2)
        assert bool(found[0][1].any())


def test_coverage_is_the_mean_over_sites_that_have_it() -> None:
    half = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    whole = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    assert coverage_penalty([drawn(neuron_masks=whole)]) == pytest.approx(0.0)
    assert coverage_penalty([drawn(neuron_masks=half)]) == pytest.approx(0.6931, abs=1e-4)  # |log 1/2|
    three = [drawn(neuron_masks=half), drawn(neuron_masks=whole, value_masks=whole)]
    assert coverage_penalty(three) == pytest.approx(0.6931 / 3, abs=1e-4)


def test_balance_is_least_where_tokens_spread_evenly() -> None:
    def penalty(shares: list[float]) -> float:
        p = torch.tensor(shares)
        ids = torch.repeat_interleave(torch.arange(4), (p * 100).round().long())
        one_hot = F.one_hot(ids, 4).float()
        return float(balance_penalty([Routing(one_hot, p.expand(100, 4))]))

    assert penalty([0.25] * 4) == pytest.approx(1 / 4)
    assert 1 / 4 < penalty([0.3, 0.2, 0.25, 0.25]) < penalty([0.7, 0.1, 0.1, 0.1]) < penalty([1.0, 0, 0, 0])
    assert penalty([1.0, 0, 0, 0]) == pytest.approx(1.0)


@pytest.mark.parametrize("attention", ATTENTION_MODES)
def test_budget_penalty_narrows_and_widens(attention: str) -> None:
    """Its gradient lowers every kind of mask logit above the budget, and raises it below."""
    dense = make_pico("llama")
    net = make_network(dense, attention)
    watched = projections(net)
    for projection in watched:
        projection.linear.weight.requires_grad_(False)
        del projection._buffers["start"]
        projection.start = nn.Parameter(torch.full((4, 48) if projection in [*net.neurons] else (8 + 4,), -3.0))
    for target, sign in ((0.05, 1), (1.0, -1)):
        masks = sampled_masks(net, 0)
        with masked(dense, masks):
            dense(tokens())
        fraction = sampled_fraction(masks, shape_of(dense))
        assert 0.05 < fraction.item() < 1.0
        starts = [projection.start for projection in watched]
        for grad in torch.autograd.grad(budget_penalty(fraction, target), starts):
            assert (sign * grad).sum() > 0
            # choices of V/O see what layers before them gave, so single neurons may count either way there
            assert attention == "per_token" or (sign * grad >= 0).all()


@pytest.mark.parametrize("off", ["budget_weight", "coverage_weight", "balance_weight"])
def test_a_weight_of_zero_is_an_ablation(off: str) -> None:
    """The term is still reported, and gives no gradient."""
    dense = make_pico("llama")
    net = make_network(dense, "per_token")
    for projection in net.neurons:
        projection.start -= 2  # few enough neurons that some are in no expert

    def gradients(weights: LossSection) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        masks = sampled_masks(net, 0)
        with masked(dense, masks):
            dense(tokens())
        loss, terms = objective(torch.zeros(()), masks, shape_of(dense), 0.5, weights)
        trained = [p for p in net.parameters() if p.requires_grad]
        return list(torch.autograd.grad(loss, trained, allow_unused=True)), terms

    only = {name: 0.0 for name in ("budget_weight", "coverage_weight", "balance_weight")}
    whole, _ = gradients(LossSection(budget_weight=3.0, coverage_weight=3.0, balance_weight=3.0))
    without, terms = gradients(LossSection(**{name: 0.0 if name == off else 3.0 for name in only}))
    alone, _ = gradients(LossSection(**only | {off: 3.0}))
    assert terms[off.removesuffix("_weight")] > 0
    assert any(g is not None and g.any() for g in alone)
    for all_, rest, one in zip(whole, without, alone, strict=True):
        parts = [g for g in (rest, one) if g is not None]
        torch.testing.assert_close(
            all_ if all_ is not None else torch.zeros(()), sum(parts) if parts else torch.zeros(())
        )
