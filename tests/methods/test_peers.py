"""The methods that group neurons into experts: what holds for all, and a planted structure for those that look for one."""

from __future__ import annotations

import itertools

import pytest
import torch
from jaxtyping import Int
from torch import Tensor, nn

from conftest import make_pico
from grouping_methods import EXPERTS, METHODS, SIZE, USED, plan_by
from tomoe.methods import registry
from tomoe.model.mlp import Mlp, MlpNames, WeightMatrix
from tomoe.plans.partition.activations import Activations
from tomoe.plans.partition.experts import Room
from tomoe.recipe.target_rules import TARGET_RULES

BLOCKS, SHARED_NEURONS, TOKENS = 6, 5, 60
ROOM = Room(
    layer=0, num_layers=1, num_experts=BLOCKS, expert_size=SIZE, shared=SHARED_NEURONS, top_k=1, router_bias=True, seed=0
)  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", ["qwen2", "phi"])
def test_groups_fill_the_room_and_are_the_same_again(name: str, family: str) -> None:
    """With a gate and without one."""
    model = make_pico(family)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    plan, same, other = (plan_by(name, model, seed=seed) for seed in (0, 0, 1))
    for layer, again in zip(plan.layers, same.layers, strict=True):
        assert layer.expert_masks.sum(1).tolist() == [SIZE] * EXPERTS
        assert layer.shared_mask is not None
        assert torch.equal(layer.expert_masks.sum(0), (~layer.shared_mask).long())
        for field in ("expert_masks", "shared_mask", "router_weight", "router_bias", "top_k"):
            assert torch.equal(torch.as_tensor(getattr(layer, field)), torch.as_tensor(getattr(again, field))), field
    assert sum(layer.top_k for layer in plan.layers) == USED * len(plan.layers)
    assert plan.notes["method"]["summary"].endswith(".")
    first, second = (p.layers[0].expert_masks for p in (plan, other))
    # what draws nothing is the same whatever the seed
    assert METHODS[name] or not torch.equal(first, second)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", METHODS)
def test_a_target_without_router_biases_gets_none(name: str) -> None:
    assert not TARGET_RULES["granitemoeshared"].router_bias
    model = make_pico("qwen2", num_hidden_layers=3)
    plan = plan_by(name, model, target="granitemoeshared")
    assert all(not layer.router_bias.any() for layer in plan.layers)


def planted(seed: int) -> tuple[Activations, Int[Tensor, " T"], Int[Tensor, " F"]]:
    """An MLP with a block of neurons for each of six kinds of tokens, and five neurons that are on for all.

    A sequence has tokens of one kind. The first neuron of every block is on for a seventh kind, too: more often than the others.
    """
    generator = torch.Generator().manual_seed(seed)
    kind = torch.arange(BLOCKS + 1).repeat_interleave(TOKENS)
    hidden, everywhere = 16, 15
    x = 0.1 * torch.randn(len(kind), hidden, generator=generator)
    x += 3 * torch.eye(hidden)[kind] + 3 * torch.eye(hidden)[everywhere]
    block = torch.cat([torch.arange(BLOCKS).repeat_interleave(SIZE), torch.full((SHARED_NEURONS,), -1)])
    leads = torch.arange(len(block)) % SIZE == 0
    gate = 0.02 * torch.randn(len(block), hidden, generator=generator)
    for f, b in enumerate(block.tolist()):
        gate[f, everywhere if b < 0 else b] += 4
        gate[f, BLOCKS] += 4 * leads[f] * (b >= 0)
    order = torch.randperm(len(block), generator=generator)
    up = 0.02 * torch.randn(len(block), hidden, generator=generator) + torch.eye(hidden)[everywhere]
    down = torch.randn(hidden, len(block), generator=generator)
    weights = {"gate": gate[order], "up": up[order], "down": down / down.norm(dim=0)}
    module = nn.ModuleDict({name: nn.Linear(*weight.T.shape, bias=False) for name, weight in weights.items()})
    module.requires_grad_(False)
    for name, weight in weights.items():
        module[name].weight.copy_(weight)
    parts = [WeightMatrix(module[name]) for name in ("gate", "up", "down")]
    mlp = Mlp(0, module, "mlp", module, MlpNames("gate", "up", "down"), *parts, nn.functional.silu, None)
    h = nn.functional.silu(x @ weights["gate"].T) * (x @ weights["up"].T)
    return Activations(mlp, x, h, torch.ones(len(x)), weights["down"], kind), kind, block[order]


@pytest.mark.parametrize("name", [name for name, looks in METHODS.items() if looks])
@pytest.mark.parametrize("seed", range(4))
def test_neurons_that_are_on_for_the_same_tokens_form_an_expert(name: str, seed: int) -> None:
    seen, kind, block = planted(seed)
    made = registry.find(name)().experts(seen, ROOM)
    found = made.expert_of_neuron
    assert torch.equal(found == -1, block == -1), "the shared part is what is on for all tokens"
    expert = {b: found[block == b].unique().tolist() for b in range(BLOCKS)}
    assert all(len(experts) == 1 for experts in expert.values()), "an expert is a block"
    assert sorted(itertools.chain(*expert.values())) == list(range(BLOCKS))
    if made.router is not None:
        weight, bias = made.router
        own = kind < BLOCKS
        chosen = (seen.x_TD[own] @ weight.T + bias).argmax(1)
        assert torch.equal(chosen, torch.tensor([expert[int(k)][0] for k in kind[own]])), "tokens go to their block"
