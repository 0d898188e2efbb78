"""The one place that knows all forms of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tomoe.model.shape import ModelShape
from tomoe.plan import LayerPlan
from tomoe.pruning.fine_grained import FineNetwork, PlannedFine
from tomoe.pruning.layouts import Layout, OverlappingLayout
from tomoe.pruning.learned.attention import PrunedAttention
from tomoe.pruning.learned.overlapping import OverlappingNetwork, PlannedOverlapping
from tomoe.pruning.learned.projection import HyperNetwork
from tomoe.recipe.conversion import AttentionSection, SamplingSection
from tomoe.recipe.target_rules import Form
from tomoe.seeds import derive_seed

AnyNetwork = FineNetwork | OverlappingNetwork
PLANNED: dict[Form, Callable[[LayerPlan, torch.device], PlannedFine | PlannedOverlapping]] = {
    "fine": PlannedFine,
    "overlapping": PlannedOverlapping,
}


def mask_network(
    shape: ModelShape,
    layout: Layout,
    embedding_size: int,
    attention: AttentionSection,
    sampling: SamplingSection,
    seed: int,
) -> AnyNetwork:
    """Make the mask network of a layout, at a random start; without a hypernetwork if no mask is learned."""
    learns_masks = isinstance(layout, OverlappingLayout) or attention.pruning != "off"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "mask network"))
        hypernetwork = None
        if learns_masks:
            hypernetwork = HyperNetwork(2 * shape.num_layers, layout.num_experts, embedding_size, seed)
        net: AnyNetwork
        if isinstance(layout, OverlappingLayout):
            net = OverlappingNetwork(shape, layout, sampling, embedding_size)
        else:
            net = FineNetwork(shape, layout, sampling)
        net.hypernetwork = hypernetwork
        if attention.pruning != "off":
            net.attention = PrunedAttention(shape, attention, sampling, embedding_size, seed)
    return net
