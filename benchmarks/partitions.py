"""Experts as other methods make them from a dense MLP, as masks: for rows of baselines.py. Nothing here is learned by gradients.

Every layer gets the same sizes. Shapes: T tokens, D hidden size, F neurons, N experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from tomoe.data.corpus import Sequences
from tomoe.model.hooks import hooked
from tomoe.model.structure import LayerParts, layer_parts, run_model
from tomoe.pruning.fine_carving import RidgeRegression, balanced_assignment

MARKED = 10
"""Neurons that count as active for a token: those of the largest activations."""
CLUSTERED = 15, 3
"""Routed experts and those of a token; about as many neurons are shared as a token gets from its experts."""
SPLIT = 12
"""Experts of a random split, which shares nothing."""
STEPS = 10


class ExpertMasks:
    """Masks of one layer: a shared part, and the k experts of a token that `score` puts first."""

    value_rotation = None

    def __init__(self, expert: Int[Tensor, " F"], top_k: int, score: Callable[[Tensor], Tensor]):
        self.top_k, self.score = top_k, score
        self.shared = (expert < 0).float()
        self.members = F.one_hot(expert + 1)[:, 1:].T.float()

    def neurons(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        scores = self.score(x).float()
        chosen = torch.zeros_like(scores).scatter_(1, scores.topk(self.top_k, dim=1).indices, 1.0)
        return chosen @ self.members + self.shared

    def qk(self) -> None:
        return None

    def values(self, x: Float[Tensor, "T D"]) -> None:
        return None


def clustered(model: PreTrainedModel, text: Sequences, width: int) -> list[ExpertMasks]:
    """Clusters of neurons that are active for the same tokens, in the manner of CMoE.

    The neurons that are most often among a token's largest activations are shared; the others are clustered by the tokens
    that mark them, in equal sizes. The router is the neuron next to the center of each cluster: an expert scores as high
    as that neuron's activation is large.
    """
    experts, top_k = CLUSTERED

    def make(p: LayerParts, x: Tensor, h: Tensor) -> ExpertMasks:
        size = (h.shape[1] - width) // (experts - top_k)
        marks = torch.zeros_like(h).scatter_(1, h.abs().topk(MARKED, dim=1).indices, 1.0)
        order = marks.mean(0).argsort(descending=True, stable=True)
        routed = order[h.shape[1] - experts * size :]
        assigned, nearest = equal_clusters(marks[:, routed].T, experts)
        expert = torch.full((h.shape[1],), -1)
        expert[routed] = assigned
        rows = routed[nearest]

        def score(x: Float[Tensor, "T D"]) -> Float[Tensor, "T N"]:
            up = x @ p.up.weight[rows].T
            return (up if p.gate is None else p.activation(x @ p.gate.weight[rows].T) * up).abs()

        return ExpertMasks(expert, top_k, score)

    return by_layer(model, text, make)


def equal_clusters(x: Float[Tensor, "n t"], clusters: int) -> tuple[Int[Tensor, " n"], Int[Tensor, " N"]]:
    """Clusters of one size by distance, from the first rows on, and the row next to each center."""
    centers = x[:clusters]
    for _ in range(STEPS):
        assigned = balanced_assignment(-torch.cdist(x, centers), len(x) // clusters)
        members = F.one_hot(assigned, clusters).T.to(x.dtype)
        centers = members @ x / members.sum(1, keepdim=True)
    distance = torch.cdist(x, centers).masked_fill(members.T == 0, torch.inf)
    return assigned, distance.argmin(0)


def random_split(model: PreTrainedModel, text: Sequences, width: int) -> list[ExpertMasks]:
    """Neurons dealt out at random, nothing shared, and a linear router, in the manner of LLaMA-MoE.

    The router is fitted to the experts' shares of the output's energy by least squares, as that of the carved start; there
    it is learned, with all weights, on many tokens.
    """
    generator = torch.Generator().manual_seed(0)

    def make(p: LayerParts, x: Tensor, h: Tensor) -> ExpertMasks:
        size = h.shape[1] // SPLIT
        expert = torch.randperm(h.shape[1], generator=generator) % SPLIT
        energy = (h * p.down.weight.float().norm(dim=0)).square() @ F.one_hot(expert, SPLIT).float()
        weight, bias = RidgeRegression(x).fit(F.normalize(energy.sqrt(), dim=1))
        return ExpertMasks(expert, round(width / size), lambda x: x.float() @ weight.T + bias)

    return by_layer(model, text, make)


def by_layer(
    model: PreTrainedModel, text: Sequences, make: Callable[[LayerParts, Tensor, Tensor], ExpertMasks]
) -> list[ExpertMasks]:
    """Call `make` with the parts, the inputs [T, D] and the activations [T, F] of every layer of the dense model."""
    made: list[ExpertMasks] = []
    inputs: dict[str, Tensor] = {}
    valid: Bool[Tensor, "B S"] = text.mask

    def handles() -> Iterator[RemovableHandle]:
        for p in layer_parts(model):

            def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                inputs["x"] = args[0][valid].float()

            def carve(_: nn.Module, args: tuple[Tensor, ...], p: LayerParts = p) -> None:
                made.append(make(p, inputs["x"], args[0][valid].float()))

            yield p.mlp.register_forward_pre_hook(note)
            yield p.down.register_forward_pre_hook(carve)

    with torch.no_grad(), hooked(handles()):
        run_model(model, text.input_ids, text.mask)
    return made
