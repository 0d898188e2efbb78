"""The learned partition of fine-grained experts, and learning with a number of experts that is drawn."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from conftest import make_network, tokens
from tomoe.moe.fold import fold
from tomoe.plan import LayerPlan, Plan
from tomoe.pruning.extract import extract_plan
from tomoe.pruning.losses import layer_widths
from tomoe.pruning.mask_network import MaskNetwork
from tomoe.pruning.masking import masked, planned_masks
from tomoe.pruning.partition import SHARED, partition, sinkhorn

N, SIZE, SHARED_NEURONS = 6, 5, 4


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def carved(seed: int = 0) -> Tensor:
    """A partition as a carve gives it: neurons in no order, four of them shared."""
    expert = torch.cat([torch.arange(N).repeat_interleave(SIZE), torch.full((SHARED_NEURONS,), SHARED)])
    return expert[torch.randperm(len(expert), generator=torch.Generator().manual_seed(seed))]


def fine_network(model: PreTrainedModel, **keys: object) -> MaskNetwork:
    return make_network(model, "off", form="fine", **keys)


def plan_of(net: MaskNetwork, model: PreTrainedModel, active: float = 0.6) -> Plan:
    ids = tokens()
    return extract_plan(net, model, active, (ids, torch.ones_like(ids, dtype=torch.bool)), tolerance=1.0)


def parts(layer: LayerPlan) -> list[Tensor | None]:
    return [layer.expert_masks, layer.shared_mask, layer.router_weight, layer.router_bias]


@pytest.mark.parametrize(("spread", "off"), [(0.1, 1e-5), (1.0, 0.01), (3.0, 0.2)])
def test_rows_add_up_to_one_and_columns_to_the_size(spread: float, off: float) -> None:
    """Columns nearly: a few steps do not balance logits that are far from it."""
    soft = sinkhorn(spread * random(N * SIZE, N), SIZE).exp()
    torch.testing.assert_close(soft.sum(1), torch.ones(N * SIZE))
    torch.testing.assert_close(soft.sum(0), torch.full((N,), float(SIZE)), atol=0, rtol=off)


def test_logits_that_are_balanced_stay_as_they_are() -> None:
    soft = random(12, 12).exp()
    for _ in range(500):
        soft = soft / soft.sum(0)
        soft = soft / soft.sum(1, keepdim=True)
    torch.testing.assert_close(sinkhorn(soft.log() + 3, 1).exp(), soft)


@pytest.mark.slow
def test_the_gradient_of_the_soft_assignment_is_that_of_finite_differences() -> None:
    expert, learned = carved(), 0.3 * random(N * SIZE + SHARED_NEURONS, N, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z: partition(expert, z)[1], learned.requires_grad_())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [0.0, 0.5, 20.0])
def test_every_expert_has_one_size_whatever_was_learned(seed: int, spread: float) -> None:
    start = carved(seed)
    expert, soft = partition(start, spread * random(len(start), N, seed=seed))
    assert torch.equal(expert == SHARED, start == SHARED)
    assert expert[expert != SHARED].bincount(minlength=N).tolist() == [SIZE] * N
    assert torch.equal(expert, start) == (spread == 0)
    assert not soft[:, start == SHARED].any()


def test_learning_finds_the_partition_that_a_loss_asks_for() -> None:
    """From another one, by gradient steps through whole neurons."""
    start, wanted = carved(0), carved(0)
    routed = (start != SHARED).nonzero().squeeze(1)
    wanted[routed] = wanted[routed].roll(7)
    assert (start != wanted).sum() > SIZE
    learned = torch.zeros(len(start), N, requires_grad=True)
    optimizer = torch.optim.Adam([learned], lr=0.1)
    for _ in range(40):
        expert, soft = partition(start, learned)
        hard = (torch.arange(N)[:, None] == expert).float()
        used = hard + (soft - soft.detach())
        loss = (used[:, routed] - (torch.arange(N)[:, None] == wanted[routed]).float()).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.equal(expert, wanted)


def test_nothing_learned_is_the_plan_of_the_carve(llama: PreTrainedModel) -> None:
    """The keys add parameters, or none; whatever a run without them has, it has with them."""
    plain = fine_network(llama)
    keyed = fine_network(llama, learn_partition=True, random_top_k=True)
    for learned in keyed.assignments:
        learned.data.zero_()
    plans = [plan_of(net, llama).layers for net in (plain, keyed)]
    for one, other in zip(*plans, strict=True):
        assert one.top_k == other.top_k
        assert all(torch.equal(a, b) for a, b in zip(parts(one), parts(other), strict=True))
    extra = {f"assignments.{i}" for i in range(plain.shape.num_layers)}
    assert keyed.state_dict().keys() - plain.state_dict().keys() == extra
    assert all(torch.equal(keyed.state_dict()[name], t) for name, t in plain.state_dict().items())
    assert [name for name, _ in keyed.named_parameters() if name not in extra] == [
        n for n, _ in plain.named_parameters()
    ]


def masks_of_tokens(net: MaskNetwork, model: PreTrainedModel) -> list[Float[Tensor, "T F"]]:
    x = random(24, net.shape.hidden_size)
    return [layer.neurons(x) for layer in net(seed=0)]


def test_what_is_learned_is_what_the_plan_holds(llama: PreTrainedModel) -> None:
    """Without other noise: the masks of a step are those of the plan, and the plan is no longer the carve's."""
    net = fine_network(llama, learn_partition=True)
    plan = plan_of(net, llama)
    x = random(24, net.shape.hidden_size)
    for i, (found, meant) in enumerate(zip(masks_of_tokens(net, llama), planned_masks(plan), strict=True)):
        assert torch.equal(found, meant.neurons(x))
        assert (plan.layers[i].expert_masks.T.int().argmax(1) != net.expert_of_neuron[i]).any()
    ids = tokens(2, 24, seed=5)
    with torch.no_grad(), masked(llama, planned_masks(plan)):
        meant = llama(ids).logits
    with torch.no_grad():
        torch.testing.assert_close(fold(llama, plan)(ids).logits, meant, atol=1e-5, rtol=0)


def test_a_neuron_is_pulled_to_the_expert_whose_tokens_want_it(llama: PreTrainedModel) -> None:
    """A neuron that the loss wants for the tokens of one expert: this one's logit grows most."""
    net = fine_network(llama, learn_partition=True)
    layer = net(seed=0)[0]
    mask = layer.neurons(random(24, net.shape.hidden_size))
    chosen = layer.routing.assignment.detach()
    neuron, wanted = int((net.expert_of_neuron[0] == 2).nonzero()[0]), 5
    chosen_alone = (chosen[:, wanted] > 0.5) & (chosen[:, 2] < 0.5)
    assert chosen_alone.any()
    (-mask[chosen_alone, neuron].sum()).backward()
    grad = net.assignments[0].grad
    assert int(grad[neuron].argmin()) == wanted
    assert not grad[net.expert_of_neuron[0] == SHARED].any()


@pytest.mark.slow
def test_a_step_draws_how_many_experts_a_token_uses(llama: PreTrainedModel) -> None:
    net = fine_network(llama, random_top_k=True)
    net.experts_per_token = torch.tensor([3, 2])
    drawn = [tuple(layer.top_k for layer in net(seed=seed)) for seed in range(100)]
    assert drawn == [tuple(layer.top_k for layer in net(seed=seed, token_seed=1)) for seed in range(100)]
    assert {ks[0] for ks in drawn} == {2, 3, 4, 5, 6}
    assert {ks[1] for ks in drawn} == {1, 2, 3, 4}
    assert sum(ks[0] < 3 for ks in drawn) == pytest.approx(sum(ks[0] > 3 for ks in drawn), abs=35), (
        "as often fewer as more"
    )
    assert all(abs(ks[0] / 3 - ks[1] / 2) <= 0.5 / 3 + 0.5 / 2 for ks in drawn), "one ratio for all layers"
    assert [layer.top_k for layer in plan_of(net, llama).layers] == [3, 2]
    net.experts_per_token = torch.tensor([8, 6])
    assert {tuple(layer.top_k for layer in net(seed=seed)) for seed in range(100)} == {(8, k) for k in range(3, 9)}


def test_tokens_use_what_was_drawn_and_the_budget_counts_what_was_planned(llama: PreTrainedModel) -> None:
    net = fine_network(llama, random_top_k=True)
    own = [net.fine_width(i) for i in range(2)]
    for seed in range(6):
        layers = net(seed=seed)
        for i, layer in enumerate(layers):
            used = layer.neurons(random(24, net.shape.hidden_size)).round().sum(1)
            assert used.unique().tolist() == [own[i] + 4 * (layer.top_k - int(net.experts_per_token[i]))]
            assert float(layer_widths(layer, net.shape)[0]) == own[i]
