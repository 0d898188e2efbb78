"""LLaMA-MoE v2: the importance of neurons against another way to compute it, and the split by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conftest import make_pico, tokens
from grouping_methods import plan_by
from tomoe.methods.llama_moe import clusters, importance_of_neurons, most_picked, split
from tomoe.model.structure import layer_parts
from tomoe.plans.partition.experts import Room


def room(num_experts: int, size: int, shared: int) -> Room:
    return Room(
        layer=0, num_layers=1, num_experts=num_experts, expert_size=size, shared=shared, top_k=1, router_bias=True, seed=0
    )  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2", "phi"])
def test_importance_is_how_the_loss_changes_with_the_scale_of_each_neuron(family: str) -> None:
    """Each neuron of each token gets a scale of 1; the loss is differentiated by it, and padding changes nothing."""
    model = make_pico(family)
    ids = tokens(3, 10)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 7:] = False
    gates = clusters(model, ids, mask, 4, seed=0)
    found = importance_of_neurons(model, ids, mask, gates)
    for i, parts in enumerate(layer_parts(model)):
        total, count = torch.zeros(4, parts.mlp.down.in_features), torch.zeros(4)
        for row, real in zip(ids, mask, strict=True):
            read: list[Tensor] = []
            scale = torch.ones(int(real.sum()), parts.mlp.down.in_features, requires_grad=True)
            handles = [
                parts.mlp.module.register_forward_pre_hook(lambda _, args, read=read: read.append(args[0][0])),
                parts.mlp.down.register_forward_pre_hook(lambda _, args, scale=scale: (args[0] * scale,)),
            ]
            logits = model(row[real][None]).logits[0]
            for handle in handles:
                handle.remove()
            loss = -sum(logits[t].log_softmax(0)[row[t + 1]] for t in range(int(real.sum()) - 1))
            (gradient,) = torch.autograd.grad(loss, scale)
            for t, x in enumerate(read[0]):
                own = int((gates[i] @ x).argmax())
                total[own] += gradient[t].abs()
                count[own] += 1
        assert int(count.sum()) == 27
        torch.testing.assert_close(found[i], total / count.clamp_min(1)[:, None], rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in model.parameters())


def test_what_most_clusters_pick_is_shared() -> None:
    importance = torch.tensor(
        [
            [9.0, 8, 1, 0, 0, 3, 2, 0],
            [9.0, 0, 7, 8, 0, 2, 3, 0],
            [9.0, 1, 0, 7, 8, 3, 2, 0],
        ]
    )
    # the best two of the clusters are 0 and 1, 0 and 3, 0 and 4; then, of those left, 1 and 5, 3 and 2, 4 and 3
    assert most_picked(importance, 2, 1).tolist() == [0]
    assert most_picked(importance, 2, 2).tolist() == [0, 3]
    # now 1 and 5, 2 and 6, 4 and 5
    assert most_picked(importance, 2, 3).tolist() == [0, 3, 5]
    assert most_picked(importance, 2, 0).tolist() == []
    # fewer are left than an expert has: all clusters pick them, and the one that matters more in sum goes first
    assert most_picked(importance, 8, 8).tolist() == importance.sum(0).argsort(descending=True, stable=True).tolist()
    assert split(importance, room(3, 2, 2)).tolist() == [-1, 0, 1, -1, 2, 0, 1, 2]


@pytest.mark.parametrize("seed", range(3))
def test_the_most_important_pairs_are_served_first(seed: int) -> None:
    """Pair after pair of a cluster and a neuron, in the order of their importance."""
    generator = torch.Generator().manual_seed(seed)
    importance = torch.rand(5, 23, generator=generator) * torch.rand(23, generator=generator)
    shared = most_picked(importance, 4, 3).tolist()
    expected = dict.fromkeys(shared, -1)
    held = [0] * 5
    for pair in importance.flatten().argsort(descending=True).tolist():
        n, f = divmod(pair, 23)
        if f not in expected and held[n] < 4:
            expected[f] = n
            held[n] += 1
    assert split(importance, room(5, 4, 3)).tolist() == [expected[f] for f in range(23)]


def test_the_router_holds_the_clusters() -> None:
    model = make_pico("qwen2")
    plan = plan_by("llama_moe", model)
    ids = tokens(8, 24)
    centroids = clusters(model, ids, torch.ones_like(ids, dtype=torch.bool), 8, seed=0)
    for layer, weight in zip(plan.layers, centroids, strict=True):
        assert torch.equal(layer.router_weight, weight)
        assert layer.router_bias is not None
        assert not layer.router_bias.any()
