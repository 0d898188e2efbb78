"""The methods that group neurons into experts without overlap: a row for each, and what all of their tests need."""

from __future__ import annotations

from transformers import PreTrainedModel

import tomoe as api
from conftest import tokens
from tomoe.budget import active_fraction, router_params
from tomoe.model.structure import shape_of
from tomoe.plans import Plan

# Whether the activations of a layer tell its groups: by the tokens that a neuron works on.
METHODS = {
    "carve": True,
    "random_split": False,
    "cmoe": True,
    "expert_weaver": True,
    "llama_moe": False,
}
EXPERTS, SIZE, USED = 8, 4, 3


def plan_by(name: str, model: PreTrainedModel, **recipe: object) -> Plan:
    """The plan of a method for a pico model: 8 experts of 4 neurons, of which tokens use 3."""
    shape = shape_of(model)
    width = shape.mlp_size - (EXPERTS - USED) * SIZE
    widths = [(width, shape.head_dim, shape.head_dim)] * shape.num_layers
    active = active_fraction(shape, widths, shape.num_layers * router_params(shape, EXPERTS))
    settings = {"experts.num_experts": EXPERTS, "experts.expert_size": SIZE} | recipe
    plan = api.plan(model, name, tokens(8, 24), active=active, recipe=settings)
    assert isinstance(plan, Plan)
    return plan
