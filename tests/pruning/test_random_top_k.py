"""Learning with a number of fine-grained experts that is drawn."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from conftest import make_network, tokens
from tomoe.plan import Plan
from tomoe.pruning.extract import extract_plan
from tomoe.pruning.losses import layer_widths
from tomoe.pruning.mask_network import MaskNetwork


def fine_network(model: PreTrainedModel, **keys: object) -> MaskNetwork:
    return make_network(model, "off", form="fine", **keys)


def plan_of(net: MaskNetwork, model: PreTrainedModel) -> Plan:
    ids = tokens()
    return extract_plan(net, model, 0.6, (ids, torch.ones_like(ids, dtype=torch.bool)), tolerance=1.0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


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
