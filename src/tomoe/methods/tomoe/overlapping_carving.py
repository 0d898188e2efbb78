"""The carved start of overlapping experts: a router, and a ranking of the neurons for the tokens of each expert.

Per layer, on dense activations. Router: spherical k-means of the MLP's inputs, so a router row is a centroid and needs no bias.
Experts: backward elimination, which drops one neuron after another, always the one that adds least to the squared error of
the MLP's output on the tokens of the expert, correlations between neurons included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tomoe.plans.partition.activations import Activations
from tomoe.plans.partition.allocation import bisected
from tomoe.plans.partition.clusters import spherical_kmeans
from tomoe.plans.partition.elimination import backward_elimination, error_matrix

ROUTER_CONFIDENCE = 0.9
"""Mean probability of the expert that a token chooses: high enough that noise seldom sends it elsewhere."""


@dataclass(frozen=True)
class OverlappingStart:
    """The carved start of one layer."""

    router_weight: Float[Tensor, "N D"]
    ranks: Int[Tensor, "N F"]  # the rank of each neuron in each expert; 0 is dropped last
    loss: Float[Tensor, " u"]
    """Relative squared error of the MLP's output, summed over experts, at each of the widths that were asked for (float64)."""


def carve_overlapping(seen: Activations, num_experts: int, widths: Sequence[int], seed: int) -> OverlappingStart:
    """Carve the experts of one layer. The weight of a token makes losses of layers comparable."""
    router = spherical_kmeans(seen.x_TD, num_experts, seed)
    logits = seen.x_TD @ router.T
    chosen_T, h_TF = logits.argmax(-1), seen.h_TF.float()
    ranks, loss = rank_neurons(h_TF, chosen_T, seen.weight_T, seen.down_DF, num_experts, widths)
    return OverlappingStart(router * confident_scale(logits), ranks, loss)


def rank_neurons(
    h: Float[Tensor, "T F"],
    expert_ids: Int[Tensor, " T"],
    weight: Float[Tensor, " T"],
    down: Float[Tensor, "D F"],
    num_experts: int,
    widths: Sequence[int],
) -> tuple[Int[Tensor, "N F"], Float[Tensor, " u"]]:
    """Rank the neurons of every expert on its own tokens; returns ranks, and the sum of the losses at each width."""
    down_gram = down.T @ down
    ranks = []
    total = torch.zeros(len(widths), dtype=torch.float64)
    for n in range(num_experts):
        own = expert_ids == n
        # freed before the next expert
        expert_ranks, loss = backward_elimination(error_matrix(h[own], weight[own], down_gram, len(h)))
        ranks.append(expert_ranks)
        total = total + loss[list(widths)].double().cpu()
    return torch.stack(ranks), total


def confident_scale(logits: Float[Tensor, "T N"]) -> float:
    """Find the factor that makes the mean largest probability ROUTER_CONFIDENCE; noise-free decisions stay the same.

    Cosines differ by hundredths, Gumbel noise by ones: without the factor, sampling would route at random.
    """
    return bisected(0.0, 1e4, 50, lambda x: float((x * logits).softmax(-1).amax(-1).mean()) < ROUTER_CONFIDENCE)
