"""Overlapping experts, the paper's: a token uses one of them, and they share neurons. Masks of neurons are learned.

Their carved start is made layer by layer, on dense activations. Router: spherical k-means of the MLP's inputs, so a router row
is a centroid and needs no bias. Experts: backward elimination, which drops one neuron after another, always the one that adds
least to the squared error of the MLP's output on the tokens of the expert, correlations between neurons included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tomoe.budget import mlp_params
from tomoe.methods.tomoe.gumbel import gumbel_sigmoid, gumbel_softmax, keep_probability
from tomoe.methods.tomoe.network import MaskNetwork, per_layer
from tomoe.methods.tomoe.projection import Projection, initial_logits
from tomoe.model.shape import ModelShape
from tomoe.plans.partition.activations import Activations
from tomoe.plans.partition.allocation import Site, bisected, common_offset, common_widths, units_by_layer
from tomoe.plans.partition.clusters import spherical_kmeans
from tomoe.plans.partition.elimination import backward_elimination, error_matrix
from tomoe.plans.partition.layouts import OverlappingLayout
from tomoe.plans.routing import ExpertRouter, Routing
from tomoe.recipe.conversion import SamplingSection
from tomoe.seeds import derive_seed


class OverlappingNetwork(MaskNetwork):
    """A mask network with one mask of neurons for each expert."""

    layout: OverlappingLayout
    neurons: Sequence[Projection]

    def __init__(self, shape: ModelShape, layout: OverlappingLayout, sampling: SamplingSection, embedding_size: int):
        super().__init__(shape, layout, sampling)
        s, n = shape, layout.num_experts
        self.routers = per_layer(s.num_layers, lambda: ExpertRouter(s.hidden_size, n))
        self.neurons = per_layer(s.num_layers, lambda: Projection(embedding_size, torch.zeros(n, s.mlp_size)))

    def carve(self, i: int, seen: Activations, seed: int) -> OverlappingStart:
        widths = self.layout.widths(self.shape.mlp_size)
        return carve_overlapping(seen, self.layout.num_experts, widths, derive_seed(seed, "k-means", i))

    def blank_start(self, device: torch.device) -> OverlappingStart:
        s, n = self.shape, self.layout.num_experts
        ranks = torch.empty(n, s.mlp_size, dtype=torch.long, device=device)
        loss = torch.empty(len(self.layout.widths(s.mlp_size)), dtype=torch.float64)
        return OverlappingStart(torch.empty(n, s.hidden_size, device=device), ranks, loss)

    def initialize_experts_(self, starts: Sequence[OverlappingStart], units: Sequence[int] | None, left: float) -> None:
        """Start from carved experts with this many units in each layer; None: layers share `left` parameters equally."""
        s = self.shape
        equal = min(max(1, round(left / (s.num_layers * mlp_params(s, 1)))), s.mlp_size)
        widths = self.layout.widths(s.mlp_size)
        for i, start in enumerate(starts):
            width = equal if units is None else widths[units[i]]
            self.routers[i].weight.copy_(start.router_weight)
            self.neurons[i].initialize_(initial_logits(start.ranks, width, self.sampling.keep_bias))

    def sample_experts(
        self, i: int, embeddings: Float[Tensor, "sites N E"] | None, seed: int, token_seed: int
    ) -> SampledOverlapping:
        """Sample the experts of layer i for one step; both seeds are the layer's own."""
        assert embeddings is not None
        s = self.sampling
        logits = self.neurons[i](embeddings[2 * i + 1])
        masks = gumbel_sigmoid(logits, s.temperature, s.keep_bias, derive_seed(seed, "neurons"))
        return SampledOverlapping(self.routers[i], masks, s.temperature, derive_seed(token_seed, "router"))

    def extract_experts(self, embeddings: Float[Tensor, "sites N E"] | None) -> ExtractedOverlapping:
        assert embeddings is not None
        logits = [neurons(embeddings[2 * i + 1]) for i, neurons in enumerate(self.neurons)]
        return ExtractedOverlapping(self, logits)


@dataclass(eq=False)
class SampledOverlapping:
    """One layer in one step: masks drawn for all tokens, and a router that draws for each."""

    router: ExpertRouter
    neuron_masks: Float[Tensor, "N F"]
    temperature: float
    seed: int
    neurons = 0  # the masks tell how many there are

    def choose(self, x_TD: Float[Tensor, "T D"]) -> tuple[Routing, Float[Tensor, "T F"]]:
        # one-hot samples (Eq. 3, Sec. 3.2)
        routing = Routing(*gumbel_softmax(self.router(x_TD), self.temperature, self.seed))
        return routing, routing.assignment @ self.neuron_masks


class ExtractedOverlapping:
    """Every expert of a layer keeps the same number of neurons, those with the largest logits."""

    params = 0  # of MLPs whose width is fixed

    def __init__(self, net: OverlappingNetwork, neuron_logits: Sequence[Float[Tensor, "N F"]]):
        self.shape, self.layout, self.keep_bias = net.shape, net.layout, net.sampling.keep_bias
        self.neuron_logits = neuron_logits
        self.widths = self.layout.widths(self.shape.mlp_size)

    def _kept(self, i: int, offset: float) -> Float[Tensor, " N"]:
        """Count the neurons that sampling keeps on average in each expert of layer i, with `offset` added to every logit."""
        return keep_probability(self.neuron_logits[i] + offset, self.keep_bias).sum(-1)

    def _expected_units(self, i: int, offset: float) -> float:
        return float(self._kept(i, offset).mean()) / self.layout.width_multiple

    def _params(self, units: int) -> int:
        return int(mlp_params(self.shape, self.widths[units]))

    def sites(self, i: int) -> list[Site]:
        return [Site(partial(self._expected_units, i), self._params, len(self.widths) - 1)]

    def choose(
        self, layers: Sequence[Sequence[Site]], offset: float, target: int, slack: int
    ) -> list[tuple[int, list[int]]]:
        """As for fine-grained experts; one width for all layers may be off by `slack` parameters."""
        if self.layout.uniform:
            width, dims = self._common_width(layers, offset, target, slack)
            return [(width, dims_of_layer) for dims_of_layer in dims]
        return [(self.widths[units], dims) for units, *dims in units_by_layer(layers, offset, target)]

    def _common_width(
        self, layers: Sequence[Sequence[Site]], offset: float, target: int, slack: int
    ) -> tuple[int, list[list[int]]]:
        """Choose one width for all layers near their mean at `offset`; the attention sites take up the rest.

        Returns the width and the units of the attention sites of each layer: of `common_widths` the first that meets `target`
        within `slack` parameters.
        """
        s = self.shape
        attention = [layer[1:] for layer in layers]
        sites = [site for layer in attention for site in layer]
        mean = sum(layer[0].clipped_units(offset) for layer in layers) / len(layers) * self.layout.width_multiple
        best = (target, s.mlp_size, [[site.max_units for site in layer] for layer in attention])
        for width in common_widths(mean, self.layout.common_multiple, s.mlp_size):
            left = target - s.num_layers * int(mlp_params(s, width))
            if sites and left < sum(site.params(1) for site in sites):
                continue
            units = units_by_layer(attention, common_offset(sites, left) if sites else 0.0, left)
            chosen = (n for layer in units for n in layer)
            miss = abs(left - sum(site.params(n) for site, n in zip(sites, chosen, strict=True)))
            if miss <= slack:
                return width, units
            best = min(best, (miss, width, units))
        return best[1:]

    def fields(self, i: int, width: int) -> dict[str, Any]:
        ranks = self.neuron_logits[i].argsort(dim=-1, descending=True, stable=True)
        neurons = torch.zeros(ranks.shape, dtype=torch.bool).scatter_(1, ranks[:, :width].cpu(), True)
        return {"expert_masks": neurons}

    def notes(self, offset: float) -> dict[str, Any]:
        """Record how many neurons sampling keeps in each expert; extraction gives all experts of a layer one width."""
        kept = [self._kept(i, offset).round().tolist() for i in range(self.shape.num_layers)]
        return {"expert_widths": [[int(n) for n in layer] for layer in kept]}


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
    """Carve the experts of one layer. Token weights make losses of layers comparable."""
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
