"""The mask network of a layout: fine-grained or overlapping experts, with pruned attention or without."""

from __future__ import annotations

import torch

from tomoe.methods.tomoe.attention import PrunedAttention
from tomoe.methods.tomoe.fine_grained import FineNetwork
from tomoe.methods.tomoe.overlapping import OverlappingNetwork
from tomoe.methods.tomoe.projection import HyperNetwork
from tomoe.model.shape import ModelShape
from tomoe.plans.partition.layouts import Layout, OverlappingLayout
from tomoe.recipe.conversion import AttentionSection, SamplingSection
from tomoe.seeds import derive_seed

AnyNetwork = FineNetwork | OverlappingNetwork


def mask_network(
    shape: ModelShape,
    layout: Layout,
    embedding_size: int,
    attention: AttentionSection,
    sampling: SamplingSection,
    seed: int,
) -> AnyNetwork:
    """Make the mask network of a layout, at a random start; without a hypernetwork if no mask is trained."""
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
