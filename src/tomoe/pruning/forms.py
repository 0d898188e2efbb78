"""The one place that chooses between the forms of experts."""

from __future__ import annotations

import torch

from tomoe.model.shape import ModelShape
from tomoe.plan import LayerPlan
from tomoe.pruning.fine_grained import FineNetwork, PlannedFine
from tomoe.pruning.form import Experts
from tomoe.pruning.layouts import FineLayout, Layout
from tomoe.pruning.mask_network import MaskNetwork
from tomoe.pruning.overlapping import OverlappingNetwork, PlannedOverlapping
from tomoe.recipe.conversion import AttentionSection, SamplingSection


def mask_network(
    shape: ModelShape, layout: Layout, embedding_size: int, attention: AttentionSection, sampling: SamplingSection,
    seed: int,
) -> MaskNetwork:  # fmt: skip
    """Make the mask network of a layout, at a random start."""
    network = FineNetwork if isinstance(layout, FineLayout) else OverlappingNetwork
    return network(shape, layout, embedding_size, attention, sampling, seed)


def planned_experts(layer: LayerPlan, device: torch.device) -> Experts:
    """Return the experts of one layer of a plan."""
    planned = PlannedFine if layer.fine else PlannedOverlapping
    return planned(layer, device)
