"""What a plan holds of each form of experts, and what holds for them: `FORMS` has an object for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tomoe.model.shape import ModelShape
from tomoe.recipe.target_rules import Form

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ExpertForm:
    """One form, by its name in recipes."""

    name: Form
    fields: dict[str, str]
    """Fields of LayerPlan that only this form has, and the names of their tensors in plan.safetensors."""
    shapes: Callable[[ModelShape, int], dict[str, Shape]]
    """Shapes of these tensors, for so many experts."""
    packed: tuple[str, ...]
    """Masks that are stored as bits."""
    formats: tuple[str, str]
    """Of plan.json, without and with rotated values: versions that know less must refuse it."""
    most_per_token: Callable[[int], int]
    """Experts of a token at most, if there are so many."""
    partitions: bool
    """Whether every neuron is in one expert or in the shared part."""


OVERLAPPING = ExpertForm(
    name="overlapping",
    fields={},
    shapes=lambda shape, experts: {},
    packed=(),
    formats=("tomoe-plan-1", "tomoe-plan-3"),
    most_per_token=lambda experts: 1,
    partitions=False,
)
FINE = ExpertForm(
    name="fine",
    fields={"shared_mask": "shared_neurons", "router_bias": "router_bias"},
    shapes=lambda shape, experts: {"shared_neurons": (shape.mlp_size,), "router_bias": (experts,)},
    packed=("expert_neurons", "shared_neurons"),
    formats=("tomoe-plan-4", "tomoe-plan-4"),
    most_per_token=lambda experts: experts,
    partitions=True,
)
FORMS = {form.name: form for form in (OVERLAPPING, FINE)}
