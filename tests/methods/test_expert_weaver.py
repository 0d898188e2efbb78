"""ExpertWeaver: which neurons are universal, how many of them are shared, and the experts that are always used."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, stdev

import pytest
import torch

import tomoe as api
from conftest import activations, make_pico, tokens
from grouping_methods import plan_by
from tomoe.errors import UserError
from tomoe.methods.expert_weaver import ExpertWeaver, _leaving_a_choice
from tomoe.plans import ALWAYS
from tomoe.plans.partition.experts import Room

ROOM = Room(
    layer=0, num_layers=1, num_experts=6, expert_size=4, shared=5, top_k=4, router_bias=True, seed=0
)  # fmt: skip


def test_universal_neurons_by_hand() -> None:
    """Sequence by sequence; the most active universal neurons first, then the others by their variation."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(*size, generator=generator) for size in ((60, 16), (60, 29), (16, 29)))
    x, h, down = drawn
    sequence = torch.arange(60) // 9
    # sequence 3 is all padding
    seen = replace(activations(x, h, torch.ones(60), down), sequence_T=sequence + (sequence >= 3))
    gates = torch.nn.functional.silu(x @ seen.mlp.gate.weight.T).T.tolist()
    profiles = [[mean(gate[i] for i in range(60) if sequence[i] == s) for s in range(7)] for gate in gates]
    means = [abs(mean(profile)) for profile in profiles]
    variations = [stdev(profile) / m for profile, m in zip(profiles, means, strict=True)]
    threshold = sorted(variations)[9] * 1.01
    universal = sorted((f for f in range(29) if variations[f] <= threshold), key=lambda f: -means[f])
    others = sorted(set(range(29)) - set(universal), key=lambda f: variations[f])
    # 10 of 29 are universal, and a token has 21 neurons: 7.2 of them, of which the layout shares 5
    method = ExpertWeaver(threshold=threshold)
    assert method.always_used(10 / 29, ROOM) == 1
    made = method.experts(seen, ROOM)
    order = [*universal, *others]
    assert sorted(order[:5]) == (made.expert_of_neuron == -1).nonzero().flatten().tolist()
    assert sorted(order[5:9]) == (made.expert_of_neuron == 0).nonzero().flatten().tolist()
    assert made.router is not None
    weight, bias = made.router
    assert bias.tolist() == [ALWAYS, 0, 0, 0, 0, 0]
    for n in range(6):
        rows = seen.mlp.gate.weight[made.expert_of_neuron == n]
        torch.testing.assert_close(weight[n], rows.mean(0), atol=2**-8, rtol=2**-8)


@pytest.mark.parametrize(
    ("universal", "room", "experts"),
    [
        (0.0, ROOM, 0),
        (10 / 21, ROOM, 1),
        (11.5 / 21, ROOM, 2),
        # a token chooses one at least
        (1.0, ROOM, 3),
        (1.0, replace(ROOM, router_bias=False), 0),
    ],
)
def test_the_shared_part_of_a_layer_is_as_large_as_its_universal_part(
    universal: float, room: Room, experts: int
) -> None:
    assert ExpertWeaver().always_used(universal, room) == experts


def test_a_layer_with_fewer_experts_than_its_room_said_leaves_one_to_choose() -> None:
    plan = plan_by("expert_weaver", make_pico("qwen2"), **{"method.threshold": 1e9})
    # all neurons are universal, so of the three experts of a token two are always used
    assert [layer.always_used for layer in plan.counts] == [min(2, layer.top_k - 1) for layer in plan.layers]
    layer = plan.layers[0]
    fewer = _leaving_a_choice(replace(layer, top_k=2))
    assert fewer.always_used.tolist() == [True, *[False] * 7]
    assert torch.equal(fewer.router_weight, layer.router_weight)
    assert float(fewer.router_bias[1]) == 0


def test_one_sequence_is_refused() -> None:
    with pytest.raises(UserError, match="between sequences of calibration text, but there is only one"):
        api.plan(make_pico("qwen2"), "expert_weaver", tokens(1, 24), active=0.7)
