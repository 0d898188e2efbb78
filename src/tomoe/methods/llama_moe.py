"""LLaMA-MoE v2: tokens are clustered, and each cluster picks the neurons that its language-modeling loss depends on most.

Router: k-means of the MLP's inputs, so a router row is a centroid, and a token belongs to the cluster of its largest logit.
Importance of a neuron to a cluster: the mean of |h dL/dh| over the cluster's tokens. Shared: the neurons that most clusters have
among their best, an expert's worth each, picked again among those that are left until the shared part is full. Experts: of all
pairs of a cluster and a neuron the most important first, until each cluster has its expert. This is the authors' "residual" split
without overlap; their other one lets experts share neurons.

What differs: clusters are by cosine and of any size (the authors keep their sizes within 40% of equal), of the most important
neurons those are shared that matter most in sum where several are picked equally often, and nothing is trained afterwards.

Shapes, and the letters at the ends of names: S tokens of a sequence, D hidden size, F neurons, N experts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from tomoe.methods.base import Method, Task
from tomoe.methods.registry import method
from tomoe.model.activation_memory import activation_bytes
from tomoe.model.hooks import hooked, input_of
from tomoe.model.shape import ModelShape
from tomoe.model.structure import layer_parts
from tomoe.plans import AnyPlan
from tomoe.plans.partition.activations import Activations, visit_layers
from tomoe.plans.partition.clusters import spherical_kmeans
from tomoe.plans.partition.experts import FLOAT32, SHARED, Experts, Room
from tomoe.plans.partition.layouts import FineLayout
from tomoe.plans.routing import bfloat16_values
from tomoe.progress import StageCallback, no_stage_progress, stage_callback
from tomoe.recipe.conversion import Recipe
from tomoe.seeds import derive_seed


@dataclass(frozen=True)
class Gates:
    """The clusters of the tokens of one layer."""

    weight: Float[Tensor, "N D"]


@method("llama_moe", paper="https://arxiv.org/abs/2411.15708")
class LlamaMoE(Method):
    """Clusters tokens; each expert has the neurons that the language-modeling loss depends on most for one cluster, the clusters
    are the router, and the neurons that most clusters need are shared."""

    # as 1 + 1/7: one of eight parts is shared, and a token uses one more
    defaults: ClassVar[Mapping[str, Any]] = {"experts.num_experts": 7, "experts.shared": 0.5}
    # gradients need all layers in memory
    requires: ClassVar[Mapping[str, Any]] = {**Method.requires, "train.shard": False, "offload": False}

    def plan(self, task: Task) -> AnyPlan:
        layout, text = self.layout(task.recipe, task.shape), task.calibration(task.model)
        assert isinstance(layout, FineLayout)
        self.gates = clusters(task.model, *text, layout.num_experts, task.recipe.seed)
        progress = stage_callback(task.on_progress, "importance of neurons")
        self.importance = importance_of_neurons(task.model, *text, self.gates, progress)
        return super().plan(task)

    def experts(self, seen: Activations, room: Room) -> Experts:
        gate_ND, importance_NF = self.gates[room.layer], self.importance[room.layer]
        expert_F = split(importance_NF, room).to(seen.x_TD.device)
        return Experts(expert_F, (gate_ND, gate_ND.new_zeros(len(gate_ND))))

    def peak(self, recipe: Recipe, shape: ModelShape, dtype: torch.dtype, vocabulary: int) -> dict[str, int]:
        layout = self.layout(recipe, shape)
        assert isinstance(layout, FineLayout)
        tokens = min(recipe.data.seq_len, recipe.data.calibration_tokens)
        importance = FLOAT32 * shape.num_layers * layout.num_experts * (shape.mlp_size + shape.hidden_size)
        carving = sum(super().peak(recipe, shape, dtype, vocabulary).values())
        # the logits in their own dtype and in float32, and the gradients of both
        backward = activation_bytes(shape, dtype, tokens) + 2 * tokens * vocabulary * (FLOAT32 + dtype.itemsize)
        return {
            "importance of neurons": importance,
            "activations of one layer, or of one sequence with its gradients": max(carving, backward),
        }


@torch.no_grad()
def clusters(
    model: PreTrainedModel, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], num_clusters: int, seed: int
) -> list[Float[Tensor, "N D"]]:
    """Return the centroids of the inputs of each MLP, as the router will store them."""

    def visit(i: int, seen: Activations) -> Gates:
        return Gates(bfloat16_values(spherical_kmeans(seen.x_TD, num_clusters, derive_seed(seed, "clusters", i))))

    def blank(device: torch.device) -> Gates:
        return Gates(torch.empty(num_clusters, layer_parts(model)[0].mlp.up.in_features, device=device))

    return [gates.weight for gates in visit_layers(model, ids, mask, visit, blank)]


def importance_of_neurons(
    model: PreTrainedModel,
    ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    gates: Sequence[Float[Tensor, "N D"]],
    progress: StageCallback = no_stage_progress,
) -> list[Float[Tensor, "N F"]]:
    """Return the mean of |h dL/dh| over the tokens of each cluster, layer by layer; 0 for an empty cluster.

    L is the sum of the next tokens' negative log-likelihoods. One sequence at a time runs forward and backward.
    """
    mlps = [parts.mlp for parts in layer_parts(model)]
    sums = [gate.new_zeros(len(gate), mlp.down.in_features) for gate, mlp in zip(gates, mlps, strict=True)]
    counts = [gate.new_zeros(len(gate), 1) for gate in gates]
    members: dict[int, Tensor] = {}
    inputs: dict[int, Tensor] = {}

    def hooks() -> Iterator[RemovableHandle]:
        # frozen weights alone would leave nothing to differentiate
        embedding = model.get_input_embeddings()
        yield embedding.register_forward_hook(lambda _, __, out: out.detach().requires_grad_())
        for i, mlp in enumerate(mlps):

            def assign(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], i: int = i) -> None:
                x_SD = input_of(args, kwargs).detach().flatten(0, -2).float()
                members[i] = F.one_hot((x_SD @ gates[i].T).argmax(1), len(gates[i])).float()

            def keep(_: nn.Module, args: tuple[Any, ...], i: int = i) -> None:
                inputs[i] = args[0]
                args[0].retain_grad()

            yield mlp.module.register_forward_pre_hook(assign, with_kwargs=True)
            yield mlp.down.register_forward_pre_hook(keep)

    for b, (row, real) in enumerate(zip(ids, mask, strict=True)):
        sequence = row[real]
        with hooked(hooks()), torch.enable_grad():
            logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1].float()
            F.cross_entropy(logits, sequence[1:], reduction="sum").backward()
        for i, h in inputs.items():
            assert h.grad is not None
            sums[i] += members[i].T @ (h.detach() * h.grad).abs().flatten(0, -2).float()
            counts[i] += members[i].sum(0)[:, None]
        # or the next sequence would run beside what this one keeps
        inputs.clear()
        del logits, h
        progress(b + 1, len(ids))
    return [total / count.clamp_min(1) for total, count in zip(sums, counts, strict=True)]


def split(importance_NF: Float[Tensor, "N F"], room: Room) -> Int[Tensor, " F"]:
    """Return the expert of each neuron, or SHARED, from the importance of neurons to clusters."""
    importance_NF = importance_NF.cpu()
    shared = most_picked(importance_NF, room.expert_size, room.shared)
    expert_F = torch.full((importance_NF.shape[1],), SHARED)
    free = [room.expert_size] * room.num_experts
    left = set(range(importance_NF.shape[1])) - set(shared.tolist())
    wishes = {f: [(-score, n) for n, score in enumerate(importance_NF[:, f].tolist())] for f in left}
    # the best place that each neuron could still get, the most important on top
    heap = [(*min(places), f) for f, places in wishes.items()]
    heapq.heapify(heap)
    while heap:
        _, n, f = heapq.heappop(heap)
        if free[n]:
            expert_F[f] = n
            free[n] -= 1
        else:
            heapq.heappush(heap, (*min(place for place in wishes[f] if free[place[1]]), f))
    return expert_F


def most_picked(importance_NF: Float[Tensor, "N F"], size: int, number: int) -> Int[Tensor, " number"]:
    """Pick the neurons among the best `size` of most clusters, then among the best of the rest, until there are enough."""
    left_NF = importance_NF.clone()
    found: list[Tensor] = []
    while missing := number - sum(len(neurons) for neurons in found):
        best = left_NF.topk(min(size, left_NF.shape[1] - (number - missing)), dim=1).indices
        picks_F = best.flatten().bincount(minlength=left_NF.shape[1])
        most = (picks_F == picks_F.max()).nonzero().squeeze(1)
        order = importance_NF[:, most].sum(0).argsort(descending=True, stable=True)
        found.append(most[order[:missing]])
        left_NF[:, found[-1]] = -torch.inf
    return torch.cat([torch.empty(0, dtype=torch.long), *found])
