"""The interface of a method: it reads a dense model and text, and makes a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from pydantic import ConfigDict
from torch import Tensor
from transformers import PreTrainedModel

from tomoe.budget import decoder_params
from tomoe.data.corpus import Corpus
from tomoe.errors import UserError
from tomoe.model.shape import ModelShape
from tomoe.model.structure import shape_of
from tomoe.plans import AnyPlan
from tomoe.plans.partition.activations import Activations
from tomoe.plans.partition.elimination import elimination_operations
from tomoe.plans.partition.experts import FLOAT32, Experts, Room, fine_bytes, fine_operations, plan_fine
from tomoe.plans.partition.layouts import FineLayout, Layout, layout_of, least_active, tolerance_of
from tomoe.progress import ProgressCallback, no_progress, stage_callback
from tomoe.recipe.base import BaseRecipe
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.target_rules import TARGET_RULES, Form
from tomoe.training.run_folder import Checkpoint, RunFolder


class MethodConfig(BaseRecipe):
    """The settings of a method: fields with defaults. Raises UserError, in one sentence, for an unknown key or a wrong value."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    CALLED: ClassVar[str] = "the settings of the method"


@dataclass(frozen=True)
class Task:
    """The input of a method."""

    model: PreTrainedModel
    """The dense model, frozen. Its layers may be on disk (`offload`), or sharded over processes (`train.shard`)."""
    recipe: Recipe
    text: Corpus
    """Its parts `train`, `calibration` and `evaluation` are disjoint."""
    run: RunFolder
    """Where what takes long is kept, so that it can resume."""
    load_original: Callable[[], PreTrainedModel] | None = None
    """Loads the dense model if `model` is a shard of it."""
    on_progress: ProgressCallback = no_progress
    ended: Callable[[str], None] = lambda stage: None
    """To be called at the end of each stage, with its name: its time is measured."""

    @cached_property
    def shape(self) -> ModelShape:
        return shape_of(self.model)

    @cached_property
    def original(self) -> PreTrainedModel:
        """The dense model with all of its weights."""
        return self.model if self.load_original is None else self.load_original()

    def calibration(self, model: PreTrainedModel) -> tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"]]:
        """Return calibration tokens and the mask of real ones, on the device of a model."""
        text = self.text.calibration
        return text.input_ids.to(model.device), text.mask.to(model.device)


class Method:
    """Chooses what a token uses. A subclass has `experts`, which groups the neurons of one layer, or its own `plan`."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    """Where it was published; empty if it was not."""
    kind: ClassVar[Form] = "fine"
    """What its plans hold: `fine`: experts without overlap; `overlapping` experts; `inputs` of projections."""
    other_kinds: ClassVar[tuple[Form, ...]] = ()
    """What its plans hold with other settings of the recipe."""
    trains: ClassVar[str] = ""
    """What it trains, for lists of methods; empty: nothing."""
    stage: ClassVar[str] = "carving"
    """What its work is called in progress and in estimates of memory."""
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Recipe keys that have another default with this method."""
    requires: ClassVar[Mapping[str, Any]] = {
        "start": "carved",
        "train.steps": 0,
        "attention.pruning": "off",
        "experts.form": "fine",
    }
    """Recipe keys that must have these values."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__dict__.get("name") or cls.__name__

    def __init__(self, **settings: Any) -> None:
        self.config = self.Config(**settings)

    @classmethod
    def implied_by(cls, recipe: Recipe) -> bool:
        """Whether a recipe that names no method implies this one."""
        return False

    @classmethod
    def summary(cls) -> str:
        """One sentence that says what it does, for lists, cards and reports."""
        return (cls.__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ")

    def experts(self, seen: Activations, room: Room) -> Experts:
        """Group the neurons of one layer from its activations on calibration text into the experts that `room` describes."""
        raise NotImplementedError(f"{type(self).__name__} has neither experts() nor a plan() of its own")

    def plan(self, task: Task) -> AnyPlan:
        """Make the plan, with the fraction `recipe.active` of the decoder parameters. Raises UserError if that is impossible."""
        recipe, shape, layout = task.recipe, task.shape, self.layout(task.recipe, task.shape)
        assert isinstance(layout, FineLayout)
        plan = plan_fine(
            self.experts,
            task.model,
            shape,
            layout,
            task.calibration(task.model),
            recipe.active,
            tolerance_of(TARGET_RULES[recipe.target]),
            recipe.seed,
            stage_callback(task.on_progress, "carve"),
        )
        task.ended(self.stage)
        return plan

    def train(self, task: Task) -> None:
        """Train, and leave checkpoints in the run, from which `extract` makes plans. Raises UserError if it trains nothing."""
        raise UserError(f"method {self.name} trains nothing; convert with it, or choose another method")

    def extract(self, task: Task, checkpoint: Checkpoint, trained_for: float) -> AnyPlan:
        """Make the plan of a checkpoint for `recipe.active`, which may differ from the fraction that the run was trained for."""
        raise NotImplementedError

    def layout(self, recipe: Recipe, shape: ModelShape) -> Layout | None:
        """Return how experts divide a layer; None without experts. Raises UserError if no plan can meet the budget."""
        return layout_of(recipe, shape)

    def least_active(self, recipe: Recipe, shape: ModelShape) -> float:
        """Return the smallest active fraction of the decoder parameters that a plan can have."""
        return least_active(shape, recipe)

    def peak(self, recipe: Recipe, shape: ModelShape, dtype: torch.dtype, vocabulary: int) -> dict[str, int]:
        """Estimate the peak bytes of `plan` besides the weights, by purpose; `dtype` is that of the activations."""
        layout = self.layout(recipe, shape)
        assert isinstance(layout, FineLayout)
        # of each layer the router in float32 and the expert of each neuron
        kept = shape.num_layers * (layout.num_experts * (shape.hidden_size + 1) * FLOAT32 + 8 * shape.mlp_size)
        activations = fine_bytes(shape, layout, dtype, recipe.data.calibration_tokens)
        return {"experts and routers": kept, "activations of one layer": activations}

    def operations(self, recipe: Recipe, shape: ModelShape, output: int) -> float:
        """Count operations of the matrix products in `plan`; output: weights of the output matrix."""
        layout, tokens = self.layout(recipe, shape), recipe.data.calibration_tokens
        passed = 2 * tokens * decoder_params(shape)
        if not isinstance(layout, FineLayout):
            return passed + shape.num_layers * elimination_operations(shape, tokens)
        return passed + shape.num_layers * (
            self.grouping(shape, layout, tokens) + fine_operations(shape, layout, tokens)
        )

    def grouping(self, shape: ModelShape, layout: FineLayout, tokens: int) -> float:
        """Estimate the operations of `experts` for one layer; 0 without matrix products."""
        return 0.0


def training_operations(recipe: Recipe, shape: ModelShape, output: int) -> float:
    """Count operations of a recipe's steps: the teacher forward, the student forward and backward to its activations."""
    train = recipe.train
    tokens = train.steps * train.batch_size * train.gradient_accumulation_steps * recipe.data.seq_len
    return 2 * tokens * 3 * (decoder_params(shape) + output)
