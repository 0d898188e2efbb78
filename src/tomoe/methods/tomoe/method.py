"""The paper's method: masks and routers learned by self-distillation, from a random or a carved start (Sec. 3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from tomoe.data.corpus import Sequences
from tomoe.errors import Advice, UserError
from tomoe.methods.base import Method, Task, training_operations
from tomoe.methods.registry import method
from tomoe.methods.tomoe.carving import carve_
from tomoe.methods.tomoe.extract import extract_plan
from tomoe.methods.tomoe.network import MaskNetwork
from tomoe.methods.tomoe.networks import AnyNetwork, mask_network
from tomoe.methods.tomoe.objective import MaskStep
from tomoe.methods.tomoe.rotation import value_rotations
from tomoe.model.activation_memory import activation_bytes
from tomoe.model.shape import ModelShape
from tomoe.model.structure import shape_of
from tomoe.plans import Plan
from tomoe.plans.partition.elimination import elimination_bytes
from tomoe.plans.partition.experts import FLOAT32, fine_bytes
from tomoe.plans.partition.layouts import FineLayout, layout_of, tolerance_of
from tomoe.progress import stage_callback
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.target_rules import TARGET_RULES, Form
from tomoe.training.distillation import CHUNK
from tomoe.training.held_out import learning_notes, train_masks_
from tomoe.training.loop import CHECKED, Training
from tomoe.training.run_folder import Checkpoint


@method("tomoe", paper="https://openreview.net/forum?id=RFHq46pjb6")
class ToMoE(Method):
    """Trains masks of neurons, routers and attention pruning by self-distillation; the dense weights stay frozen."""

    kind: ClassVar[Form] = "overlapping"
    other_kinds: ClassVar[tuple[Form, ...]] = ("fine",)
    trains: ClassVar[str] = "masks, routers"
    stage: ClassVar[str] = "training"
    requires: ClassVar[dict[str, Any]] = {}

    @classmethod
    def implied_by(cls, recipe: Recipe) -> bool:
        own = recipe.start == "random" or recipe.experts.form == "overlapping" or recipe.attention.pruning != "off"
        return own or recipe.train.steps > 0

    def plan(self, task: Task) -> Plan:
        net = self._started(task)
        learned: dict[str, Any] = {"steps": 0}
        if task.recipe.train.steps:
            learned = learn_(net, task)
            task.ended("learning")
        # the plan is for the original weights; learning may have run on a shard of them
        plan = choose_experts(net, task.original, task.recipe, task.text.calibration)
        return replace(plan, notes=plan.notes | learned)

    def train(self, task: Task) -> None:
        learn_(self._started(task), task)

    def extract(self, task: Task, checkpoint: Checkpoint, trained_for: float) -> Plan:
        recipe = task.recipe
        if recipe.experts.form == "fine" and recipe.active != trained_for:
            raise UserError(
                f"{task.run.path} divided its neurons into fine-grained experts for active = {trained_for}, so a plan for "
                f"{recipe.active} needs a run of its own",
                Advice("active", "when the model runs, which then uses other numbers of them", "FRACTION", here=False),
            )
        net = new_network(recipe, task.model)
        task.run.restore(checkpoint, net, None)
        plan = choose_experts(net, task.model, recipe, task.text.calibration)
        return replace(plan, notes=plan.notes | learning_notes(checkpoint.step, checkpoint.state.get(CHECKED, {})))

    def _started(self, task: Task) -> AnyNetwork:
        """Make the mask network at its start, unless it is in a checkpoint."""
        net = new_network(task.recipe, task.model)
        if not task.run.steps():
            initialize_(net, task)
            task.ended("carving" if task.recipe.start == "carved" else "start")
        return net

    def operations(self, recipe: Recipe, shape: ModelShape, output: int) -> float:
        return super().operations(recipe, shape, output) + training_operations(recipe, shape, output)

    def peak(self, recipe: Recipe, shape: ModelShape, dtype: torch.dtype, vocabulary: int) -> dict[str, int]:
        layout, train, data = layout_of(recipe, shape), recipe.train, recipe.data
        with torch.device("meta"):
            net = mask_network(
                shape, layout, recipe.experts.embedding_size, recipe.attention, recipe.sampling, recipe.seed
            )
        parts = {"masks, routers and their optimizer": trainable_bytes(net, train.steps > 0)}
        if train.steps:
            tokens = train.batch_size * data.seq_len
            kept = (train.gradient_checkpointing, recipe.attention.pruning, layout.num_experts)
            parts["activations for the backward pass"] = activation_bytes(shape, dtype, tokens, *kept)
            # learned masks keep what they were drawn from
            copies = 1 if isinstance(layout, FineLayout) else 8
            parts["masks of experts"] = copies * FLOAT32 * shape.num_layers * layout.num_experts * shape.mlp_size
            parts["logits"] = 4 * CHUNK * vocabulary * FLOAT32
        elif isinstance(layout, FineLayout):
            parts["activations of one layer"] = fine_bytes(shape, layout, dtype, data.calibration_tokens)
        else:
            held = elimination_bytes(shape, layout.num_experts, dtype, data.calibration_tokens)
            parts["activations of one layer"] = held
        return parts


def trainable_bytes(net: MaskNetwork, learns: bool) -> int:
    """Count bytes of a mask network in float32, and of the gradients and AdamW's two moments of its trained parameters."""
    stored = sum(t.numel() for t in (*net.parameters(), *net.buffers()))
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad) if learns else 0
    return FLOAT32 * (stored + 3 * trained)


def new_network(recipe: Recipe, model: PreTrainedModel) -> AnyNetwork:
    """Make the network with experts and routers of a model; the start, or a checkpoint, fills it."""
    shape, size = shape_of(model), recipe.experts.embedding_size
    layout = layout_of(recipe, shape)
    return mask_network(shape, layout, size, recipe.attention, recipe.sampling, recipe.seed).to(model.device)


def initialize_(net: AnyNetwork, task: Task) -> None:
    """Set what calibration text decides before training: all of a carved start, the basis of the values of a random one."""
    recipe, model, text = task.recipe, task.model, task.calibration(task.model)
    if recipe.start == "carved":
        # here neurons become experts, and each expert gets the row of the router that predicts it
        carve_(net, model, *text, recipe.active, recipe.seed, stage_callback(task.on_progress, "carve"))
    elif net.attention is not None and net.attention.section.rotate_values:
        rotations = value_rotations(model, *text, stage_callback(task.on_progress, "rotate"))
        net.attention.value_rotations.copy_(torch.stack(rotations))


def learn_(net: AnyNetwork, task: Task) -> dict[str, Any]:
    """Train from the last checkpoint, or else from the start, to the last step. Returns the notes for the plan."""
    recipe, model, corpus = task.recipe, task.model, task.text
    step = MaskStep(model, net, recipe)
    training = Training(model, net, recipe.train, recipe.seed, corpus, task.run, step)

    def plan() -> Plan:
        return choose_experts(net, model, recipe, corpus.calibration)

    return train_masks_(training, plan, corpus.evaluation, recipe.loss.objective, task.on_progress)


def choose_experts(net: AnyNetwork, model: PreTrainedModel, recipe: Recipe, text: Sequences) -> Plan:
    """Make the plan of the network, as near to the budget as the target allows."""
    calibration = text.input_ids.to(model.device), text.mask.to(model.device)
    return extract_plan(net, model, recipe.active, calibration, tolerance_of(TARGET_RULES[recipe.target]))
