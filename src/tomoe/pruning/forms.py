"""The one place that chooses between the forms of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tomoe.model.shape import ModelShape
from tomoe.plan import LayerPlan
from tomoe.pruning.fine_grained import FineNetwork, PlannedFine
from tomoe.pruning.form import Experts
from tomoe.pruning.layouts import FineLayout, Layout, OverlappingLayout
from tomoe.pruning.learned.mask_network import MaskNetwork
from tomoe.pruning.learned.overlapping import OverlappingNetwork, PlannedOverlapping
from tomoe.recipe.conversion import AttentionSection, SamplingSection
from tomoe.recipe.target_rules import Form

NETWORKS: dict[type, type[MaskNetwork]] = {FineLayout: FineNetwork, OverlappingLayout: OverlappingNetwork}
PLANNED: dict[Form, Callable[[LayerPlan, torch.device], Experts]] = {
    "fine": PlannedFine,
    "overlapping": PlannedOverlapping,
}


def mask_network(
    shape: ModelShape, layout: Layout, embedding_size: int, attention: AttentionSection, sampling: SamplingSection,
    seed: int,
) -> MaskNetwork:  # fmt: skip
    """Make the mask network of a layout, at a random start."""
    return NETWORKS[type(layout)](shape, layout, embedding_size, attention, sampling, seed)


def planned_experts(layer: LayerPlan, device: torch.device) -> Experts:
    """Return the experts of one layer of a plan."""
    return PLANNED[layer.form.name](layer, device)
