"""Fine-grained experts: a token uses a shared part and several of many small experts that share nothing.

The method `carve` decides which neurons form an expert, and how many of them a token of each layer uses; routers alone are
learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tomoe.budget import mlp_params
from tomoe.methods.carve import Carve
from tomoe.methods.tomoe.network import MaskNetwork, per_layer
from tomoe.model.shape import ModelShape
from tomoe.plans.partition.activations import Activations
from tomoe.plans.partition.allocation import Site, units_by_layer
from tomoe.plans.partition.experts import SHARED, FineLayer, fine_layer, room_of
from tomoe.plans.partition.layouts import FineLayout
from tomoe.plans.routing import ExpertRouter, Routing
from tomoe.recipe.conversion import SamplingSection


class FineNetwork(MaskNetwork):
    """A mask network whose experts are where the carve put them."""

    layout: FineLayout
    expert_of_neuron: Int[Tensor, "L F"]  # the expert that each neuron is in, or SHARED
    experts_per_token: Int[Tensor, " L"]

    def __init__(self, shape: ModelShape, layout: FineLayout, sampling: SamplingSection):
        super().__init__(shape, layout, sampling)
        s, n = shape, layout.num_experts
        self.routers = per_layer(s.num_layers, lambda: ExpertRouter(s.hidden_size, n, bias=True))
        for router in self.routers:
            assert router.bias is not None
            router.bias.requires_grad_(self.layout.router_bias)
        self.register_buffer("expert_of_neuron", torch.full((s.num_layers, s.mlp_size), SHARED))
        self.register_buffer("experts_per_token", torch.ones(s.num_layers, dtype=torch.long))
        self._known: tuple[object, list[int]] = None, []

    def carve(self, i: int, seen: Activations, seed: int) -> FineLayer:
        room = room_of(self.layout, i, self.shape.num_layers, seed)
        return fine_layer(Carve().experts, seen, room)

    def blank_start(self, device: torch.device) -> FineLayer:
        return FineLayer.empty(self.shape, self.layout, device)

    def initialize_experts_(self, starts: Sequence[FineLayer], units: Sequence[int] | None, left: float) -> None:
        """Start from carved experts with this many of them per token in each layer; None: those of the layout."""
        top_ks = self.layout.top_ks(self.shape.num_layers) if units is None else units
        for i, start in enumerate(starts):
            bias = self.routers[i].bias
            assert bias is not None
            self.routers[i].weight.copy_(start.router_weight)
            bias.copy_(start.router_bias)
            self.expert_of_neuron[i], self.experts_per_token[i] = start.expert_of_neuron, top_ks[i]

    def expert_masks(self, i: int) -> tuple[Bool[Tensor, "N F"], Bool[Tensor, " F"]]:
        """Return the neurons of the experts of layer i, and those that every token uses."""
        expert = self.expert_of_neuron[i]
        numbers = torch.arange(self.layout.num_experts, device=expert.device)
        return numbers[:, None] == expert, expert == SHARED

    def top_ks(self) -> list[int]:
        """Return `experts_per_token` as numbers; waits for a device once, and again after they were written to."""
        stamp = id(self.experts_per_token), self.experts_per_token._version
        if self._known[0] != stamp:
            self._known = stamp, self.experts_per_token.tolist()
        return self._known[1]

    def width(self, i: int) -> int:
        return self.layout.width(self.top_ks()[i])

    def sample_experts(
        self, i: int, embeddings: Float[Tensor, "sites N E"] | None, seed: int, token_seed: int
    ) -> SampledFine:
        masks, shared = (mask.float() for mask in self.expert_masks(i))
        k = self.top_ks()[i]
        return SampledFine(self.routers[i], masks, shared, k, self.layout.width(k), self.sampling.temperature)

    def extract_experts(self, embeddings: Float[Tensor, "sites N E"] | None) -> FineNetwork:
        """Return experts and widths as carved."""
        return self

    @property
    def params(self) -> int:
        """Parameters of the MLPs, which are fixed."""
        return sum(int(mlp_params(self.shape, self.width(i))) for i in range(self.shape.num_layers))

    def sites(self, i: int) -> list[Site]:
        """Return the width of layer i, if extraction chooses it."""
        return []

    def choose(
        self, layers: Sequence[Sequence[Site]], offset: float, target: int, slack: int
    ) -> list[tuple[int, list[int]]]:
        """Choose the MLP width of every layer, and the units of its other sites, nearest to `target` parameters in total."""
        return [(self.width(i), units) for i, units in enumerate(units_by_layer(layers, offset, target))]

    def fields(self, i: int, width: int) -> dict[str, Any]:
        """Return the fields of a LayerPlan with the experts of layer i."""
        expert_masks, shared_mask = self.expert_masks(i)
        bias = self.routers[i].bias
        assert bias is not None
        return {
            "expert_masks": expert_masks.cpu(),
            "shared_mask": shared_mask.cpu(),
            "router_bias": bias.detach().float().cpu(),
            "top_k": self.top_ks()[i],
        }

    def notes(self, offset: float) -> dict[str, Any]:
        """Describe the choice for the plan's notes."""
        return {}


@dataclass(eq=False)
class SampledFine:
    """One layer in one step. Its choice has no noise."""

    router: ExpertRouter
    masks: Float[Tensor, "N F"]
    shared: Float[Tensor, " F"]
    top_k: int
    neurons: int  # that a token uses (Eq. 8)
    temperature: float
    neuron_masks = None  # every neuron has its place already

    def choose(self, x_TD: Float[Tensor, "T D"]) -> tuple[Routing, Float[Tensor, "T F"]]:
        routing = self.router.choose(x_TD, self.temperature, self.top_k)
        return routing, routing.assignment @ self.masks + self.shared
