"""The experts of a plan at inference: which of them a token uses, and which neurons that keeps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tomoe.plans.layer import LayerPlan
from tomoe.plans.routing import ExpertRouter, Routing, route
from tomoe.recipe.target_rules import Form


class PlannedFine:
    """Fine-grained experts of one layer. `choose` routes tokens: it returns their experts and the mask of their neurons."""

    def __init__(self, layer: LayerPlan, device: torch.device):
        assert layer.shared_mask is not None
        assert layer.router_bias is not None
        self.router = ExpertRouter.of(layer.router_weight.to(device), layer.router_bias.to(device))
        self.top_k = layer.top_k
        # the expert of each neuron, the number of experts for shared ones
        expert = layer.expert_masks.int().argmax(0).masked_fill(layer.shared_mask, len(layer.expert_masks))
        self.expert_of_neuron: Int[Tensor, " F"] = expert.to(device)

    def choose(self, x_TD: Float[Tensor, "T D"]) -> tuple[Routing, Float[Tensor, "T F"]]:
        routing = route(self.router(x_TD), self.top_k)
        # a product with hundreds of masks takes ten times as long; the column of ones is the shared part
        mask_TF = F.pad(routing.assignment, (0, 1), value=1.0).index_select(1, self.expert_of_neuron)
        return routing, mask_TF


class PlannedOverlapping:
    """Overlapping experts of one layer."""

    def __init__(self, layer: LayerPlan, device: torch.device):
        self.router = ExpertRouter.of(layer.router_weight.to(device))
        self.expert_masks: Float[Tensor, "N F"] = layer.expert_masks.float().to(device)

    def choose(self, x_TD: Float[Tensor, "T D"]) -> tuple[Routing, Float[Tensor, "T F"]]:
        routing = route(self.router(x_TD))
        return routing, routing.assignment @ self.expert_masks


PLANNED: dict[Form, Callable[[LayerPlan, torch.device], PlannedFine | PlannedOverlapping]] = {
    "fine": PlannedFine,
    "overlapping": PlannedOverlapping,
}
