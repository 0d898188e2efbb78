"""The same neurons for every token: a narrower dense model, which the target `dense` writes as the class of its own family.

Per layer, on dense activations, neurons are ranked by what the output of the MLP loses without them. Layers differ in width, as
the error decides, unless the target wants one width. Repair then makes up for what is dropped, as in FLAP (arXiv 2312.11983).
A plan has one overlapping expert a layer, and a router of one row that decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tomoe.budget import decoder_params, mlp_params
from tomoe.methods.base import Method, MethodConfig, Task
from tomoe.methods.registry import method
from tomoe.model.shape import ModelShape
from tomoe.plans import Plan
from tomoe.plans.layer import LayerPlan, dense_attention
from tomoe.plans.partition.activations import Activations, visit_layers
from tomoe.plans.partition.allocation import common_widths
from tomoe.plans.partition.elimination import (
    backward_elimination,
    elimination_bytes,
    error_matrix,
    ranked_by_energy,
)
from tomoe.plans.partition.experts import budget_of_mlps, units_of_layers
from tomoe.plans.partition.layouts import OverlappingLayout, check_tolerance, tolerance_of
from tomoe.progress import stage_callback
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.target_rules import TARGET_RULES, Form


class StaticConfig(MethodConfig):
    """The settings of `static`."""

    ranking: Literal["activation", "elimination"] = "elimination"
    """`activation`: by the mean square of a neuron's activation times the norm of its column in the down projection;
    `elimination`: one neuron after another is dropped, the one whose loss adds least, correlations included."""


@dataclass(frozen=True)
class RankedNeurons:
    """The neurons of one layer in the order of their importance."""

    ranks: Int[Tensor, " F"]  # 0 is dropped last
    loss: Float[Tensor, " u"]
    """Relative squared error of the MLP's output at each width of the layout (float64)."""


@method("static")
class Static(Method):
    """Keeps the same neurons for every token, those that matter most to the output: a narrower dense model."""

    Config = StaticConfig
    kind: ClassVar[Form] = "overlapping"
    defaults: ClassVar[dict[str, Any]] = {"experts.form": "overlapping", "experts.num_experts": 1}
    requires: ClassVar[dict[str, Any]] = {
        "start": "carved",
        "train.steps": 0,
        "attention.pruning": "off",
        "experts.form": "overlapping",
        "experts.num_experts": 1,
    }

    @classmethod
    def implied_by(cls, recipe: Recipe) -> bool:
        return recipe.target == "dense" and not recipe.train.steps and recipe.start == "carved"

    @torch.no_grad()
    def plan(self, task: Task) -> Plan:
        recipe, shape = task.recipe, task.shape
        layout = self.layout(recipe, shape)
        assert isinstance(layout, OverlappingLayout)
        widths = layout.widths(shape.mlp_size)

        def rank(i: int, seen: Activations) -> RankedNeurons:
            ranks, loss = self.ranked(seen)
            return RankedNeurons(ranks, loss[widths].double().cpu())

        def blank(device: torch.device) -> RankedNeurons:
            ranks = torch.empty(shape.mlp_size, dtype=torch.long, device=device)
            return RankedNeurons(ranks, torch.empty(len(widths), dtype=torch.float64))

        text = task.calibration(task.model)
        layers = visit_layers(task.model, *text, rank, blank, stage_callback(task.on_progress, "carve"))
        tolerance = tolerance_of(TARGET_RULES[recipe.target])
        kept = _widths([layer.loss for layer in layers], layout, shape, recipe.active, tolerance)
        plan = Plan(shape, tuple(_planned(shape, *layer) for layer in zip(layers, kept, strict=True)))
        check_tolerance(plan.active_fraction(), recipe.active, tolerance, layout)
        task.ended(self.stage)
        return plan

    def ranked(self, seen: Activations) -> tuple[Int[Tensor, " F"], Float[Tensor, " F1"]]:
        """Return the rank of each neuron of a layer (0 is dropped last), and the error of keeping 0, 1, .. F of them."""
        down_gram = seen.down_DF.T @ seen.down_DF
        error = error_matrix(seen.h_TF.float(), seen.weight_T, down_gram, len(seen.h_TF))
        assert isinstance(self.config, StaticConfig)
        return (ranked_by_energy if self.config.ranking == "activation" else backward_elimination)(error)

    def peak(self, recipe: Recipe, shape: ModelShape, dtype: torch.dtype, vocabulary: int) -> dict[str, int]:
        held = elimination_bytes(shape, 1, dtype, recipe.data.calibration_tokens)
        return {"ranks": 8 * shape.num_layers * shape.mlp_size, "activations of one layer": held}


def _widths(
    losses: Sequence[Float[Tensor, " u"]], layout: OverlappingLayout, shape: ModelShape, active: float, tolerance: float
) -> list[int]:
    """Return the neurons that each layer keeps: by its error, or equally many if the layout makes layers alike."""
    left = budget_of_mlps(shape, active, layout.num_experts)
    if units := units_of_layers(losses, layout, shape, left):
        widths = layout.widths(shape.mlp_size)
        return [widths[n] for n in units]
    # the first that meets the budget, else the nearest of all
    neuron = shape.num_layers * int(mlp_params(shape, 1))
    mean, slack = left / neuron, tolerance * decoder_params(shape) / neuron
    candidates = list(common_widths(mean, layout.common_multiple, shape.mlp_size))
    nearest = min(candidates, key=lambda width: abs(width - mean))
    return [next((w for w in candidates if abs(w - mean) <= slack), nearest)] * shape.num_layers


def _planned(shape: ModelShape, ranked: RankedNeurons, width: int) -> LayerPlan:
    return LayerPlan(
        expert_masks=(ranked.ranks < width)[None].cpu(),
        router_weight=torch.zeros(1, shape.hidden_size),
        **dense_attention(shape),
    )
