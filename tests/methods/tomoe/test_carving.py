"""The carved start: its parts against brute force, its budget, and that it is the plan at step 0."""

from __future__ import annotations

import pytest
import torch

from conftest import PAIRS, make_network, make_pico, tokens
from tomoe.budget import active_params, decoder_params, mlp_params
from tomoe.methods.tomoe.attention import attention_importance
from tomoe.methods.tomoe.carving import carve_
from tomoe.methods.tomoe.extract import extract_plan
from tomoe.methods.tomoe.gumbel import keep_probability
from tomoe.methods.tomoe.objective import sampled_fraction, sampled_masks
from tomoe.methods.tomoe.overlapping import (
    ROUTER_CONFIDENCE,
    confident_scale,
    rank_neurons,
    spherical_kmeans,
)
from tomoe.methods.tomoe.projection import initial_logits
from tomoe.model.structure import shape_of
from tomoe.plans.partition.elimination import backward_elimination


def test_backward_elimination_counts_the_joint_loss() -> None:
    """The loss of every prefix equals s^T M s of the set that is gone, and each drop is the cheapest there was."""
    torch.manual_seed(0)
    factor = torch.randn(9, 6, dtype=torch.float64)
    error = factor.T @ factor
    ranks, loss = backward_elimination(error)
    assert sorted(ranks.tolist()) == list(range(6))
    for kept in range(7):
        gone = (ranks >= kept).double()
        torch.testing.assert_close(loss[kept], gone @ error @ gone)
    for kept in range(5, 0, -1):  # of all sets one larger than the last, none costs less
        gone = ranks >= kept + 1
        costs = []
        for i in (~gone).nonzero().flatten():
            trial = gone.clone()
            trial[i] = True
            costs.append(float(trial.double() @ error @ trial.double()))
        assert min(costs) == pytest.approx(float(loss[kept]))


def test_a_pair_that_cancels_itself_goes_for_nothing() -> None:
    """Alone each of the two weighs more than neuron 2; once one of them is gone, the other is worse than none."""
    torch.manual_seed(0)
    pair, other, last = torch.linalg.qr(torch.randn(300, 3)).Q.T * 300**0.5
    h = torch.stack([pair, pair, 0.9 * other, 1.1 * last], 1)
    down = torch.tensor([[1.0, -1.0, 1.0, 1.0]])
    ranks, loss = rank_neurons(h, torch.zeros(300, dtype=torch.long), torch.ones(300), down, 1, range(5))
    assert int(ranks[0, 3]) == 0
    assert loss == pytest.approx([2.02, 0.81, 1.81, 0.81, 0.0], abs=1e-4)


def test_experts_are_ranked_on_their_own_tokens_only() -> None:
    h = torch.rand(40, 6) + 0.1
    ids = torch.arange(40) % 2
    h[ids == 0, :3] = 0  # expert 0 never sees the first three, expert 1 never the last three
    h[ids == 1, 3:] = 0
    ranks, loss = rank_neurons(h, ids, torch.ones(40), torch.eye(6), 2, range(7))
    assert {int(n) for n in (ranks[0] < 3).nonzero()} == {3, 4, 5}
    assert {int(n) for n in (ranks[1] < 3).nonzero()} == {0, 1, 2}
    assert loss[3] == pytest.approx(0, abs=1e-6)
    assert loss[0] == pytest.approx(float(h.square().sum() / 40), rel=1e-5)


def test_kmeans_finds_directions_and_no_length_matters() -> None:
    torch.manual_seed(0)
    directions = torch.eye(5)[:3]
    x = directions[torch.arange(90) % 3] + 0.05 * torch.randn(90, 5)
    centroids = spherical_kmeans(x * (1 + 9 * torch.rand(90, 1)), 3, 7)
    torch.testing.assert_close(centroids.norm(dim=-1), torch.ones(3))
    assert sorted(centroids.argmax(-1).tolist()) == [0, 1, 2]
    labels = (x @ centroids.T).argmax(-1)
    assert all(len(labels[torch.arange(90) % 3 == k].unique()) == 1 for k in range(3))


def test_the_router_is_as_sure_as_asked() -> None:
    logits = torch.randn(500, 8, generator=torch.Generator().manual_seed(0)) * 0.01
    scaled = logits * confident_scale(logits)
    assert float(scaled.softmax(-1).amax(-1).mean()) == pytest.approx(ROUTER_CONFIDENCE, abs=1e-3)
    assert torch.equal(scaled.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("width", [1, 20, 63, 64])
def test_start_logits_keep_the_width_on_average_and_the_order(width: int) -> None:
    ranks = torch.stack([torch.randperm(64), torch.randperm(64)])
    logits = initial_logits(ranks, width, 3.0)
    kept = keep_probability(logits, 3.0).sum(-1)
    torch.testing.assert_close(kept, torch.full((2,), float(width)), rtol=2e-3, atol=2e-3)
    if width < 64:
        assert torch.equal(logits.argsort(-1, descending=True), ranks.argsort(-1))


def test_attention_importance_sees_pairs_and_groups() -> None:
    """A V/O dim that the output matrix ignores, and a pair that K never fills, weigh nothing."""
    model = make_pico("qwen2")
    s = shape_of(model)
    q, k, o = (torch.randn(30, n * s.head_dim) for n in (s.num_heads, s.num_kv_heads, s.num_heads))
    k.view(30, s.num_kv_heads, -1)[..., [1, 1 + s.rotary_size // 2]] = 0
    weight = torch.randn(s.hidden_size, s.num_heads * s.head_dim)
    weight.view(s.hidden_size, s.num_heads, -1)[..., 2] = 0
    qk, values = attention_importance(q, k, o, weight, s)
    assert qk[1] == 0
    assert (qk > 0).sum() == s.num_qk_choices - 1
    assert values[2] == 0
    assert (values > 0).sum() == s.head_dim - 1


@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_step_0_is_the_carved_plan(family: str, attention: str) -> None:
    dense, ids = make_pico(family), tokens(8, 24)
    net = make_network(dense, attention)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[-1, 15:] = False
    before = {name: t.clone() for name, t in dense.state_dict().items()}
    carve_(net, dense, ids, mask, 0.7, seed=5)
    assert all(torch.equal(t, before[name]) for name, t in dense.state_dict().items())
    plan = extract_plan(net, dense, 0.7, (ids, mask), tolerance=0.02)
    for i, layer in enumerate(plan.layers):  # each expert keeps the first of its ranking
        lowest_kept = net.neurons[i].start.masked_fill(~layer.expert_masks, torch.inf).amin(1)
        highest_gone = net.neurons[i].start.masked_fill(layer.expert_masks, -torch.inf).amax(1)
        assert bool((lowest_kept >= highest_gone).all())


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_sampling_keeps_the_widths_of_the_plan_on_average(family: str, attention: str) -> None:
    """And so meets the budget, but for the maximum over experts that it is counted with (Eq. 8)."""
    dense, ids, draws = make_pico(family), tokens(8, 24), 16
    net = make_network(dense, attention)
    mask = torch.ones_like(ids, dtype=torch.bool)
    carve_(net, dense, ids, mask, 0.7, seed=5)
    s, c = net.shape, net.shape.head_dim
    chosen, excess = [], 0.0
    for i, (width, qk, values) in enumerate(extract_plan(net, dense, 0.7, (ids, mask), tolerance=0.02).widths()):
        kept = keep_probability(net.neurons[i].start, 3.0)
        means, variance = kept.sum(-1), float((kept * (1 - kept)).sum(-1).max())
        torch.testing.assert_close(means, means[0].round().expand_as(means), rtol=2e-3, atol=0)
        assert abs(width - float(means[0])) < 1.01
        dims = (
            keep_probability(net.attention.dims[i].start, 3.0)
            if attention != "off"
            else torch.ones(c + s.num_qk_choices)
        )
        chosen.append((means[0], s.expand_qk(dims[c:]).sum(), dims[:c].sum()))
        assert abs(qk - float(chosen[i][1])) < 2.01  # a rotary pair
        assert abs(values - float(chosen[i][2])) < 1.01
        # the largest of n draws exceeds their mean by no more than this (Hartley and David), whatever they are drawn from
        n = len(means)
        excess += float(mlp_params(s, (n - 1) / (2 * n - 1) ** 0.5 * variance**0.5)) / decoder_params(s)
    unit = mlp_params(s, 1) / decoder_params(s)
    assert float(active_params(s, chosen)) / decoder_params(s) == pytest.approx(0.7, abs=unit / 2 + 1e-3)

    def sampled(seed: int) -> float:
        masks = sampled_masks(net, seed)
        for m in masks:
            if m.attention is not None:
                m.attention.values(ids.new_zeros(1, s.hidden_size).float())  # one token: no maximum over tokens
        return float(sampled_fraction(masks, s))

    actual = torch.tensor([sampled(seed) for seed in range(draws)])
    # Over 90 cases with five seeds the mean was at most 1.6 standard errors above, and never below: 5 are never passed by chance.
    noise = 5 * float(actual.std()) / draws**0.5 + unit / 2
    assert 0.7 - noise <= float(actual.mean()) <= 0.7 + excess + noise
    assert excess + noise < 0.07
