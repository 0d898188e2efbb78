"""The steps of a conversion: each takes what it needs and returns what it made. `convert` puts them in order."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe import distributed
from tomoe.data.corpus import Corpus, Sequences, prepare
from tomoe.errors import UserError
from tomoe.exporting.choice import check_target
from tomoe.model.base_weights import BaseWeights
from tomoe.model.loading import fingerprint, load_tokenizer, note_rounding
from tomoe.model.running import family_head, hidden_states
from tomoe.model.structure import check_output, shape_of
from tomoe.model.tokens import check_length
from tomoe.moe.checkpoint import check_writing, save_moe
from tomoe.moe.fold import fold, has_room
from tomoe.plan import AnyPlan, InputsPlan, Plan
from tomoe.progress import ProgressCallback, no_progress, stage_callback
from tomoe.pruning.carving import carve_
from tomoe.pruning.extract import extract_plan
from tomoe.pruning.forms import AnyNetwork, mask_network
from tomoe.pruning.inputs import plan_inputs
from tomoe.pruning.layouts import settle_layout, tolerance_of
from tomoe.pruning.learned.objective import MaskStep
from tomoe.pruning.learned.rotation import value_rotations
from tomoe.pruning.masking import masked, planned_masks
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.target_rules import TARGET_RULES
from tomoe.training.distillation import distill_loss
from tomoe.training.loop import BestWeights, Training, check_accumulation, run_training
from tomoe.training.run_folder import RunFolder
from tomoe.version import __version__

CHECKED_TOKENS = 4096
"""Held-out tokens that show, before and after training, what the masks lose."""
AnyP = TypeVar("AnyP", Plan, InputsPlan)


def open_dense(recipe: Recipe, base: BaseWeights) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the dense model as it learns (possibly sharded) and its tokenizer.

    Whatever can be known to fail later is looked for here. Raises UserError if the model does not fit the recipe.
    """
    check_accumulation(recipe.train)
    if not recipe.model:
        raise UserError("the recipe names no model; give a hub id, a folder, a .gguf file or a known name")
    if "dtype" not in recipe.train.model_fields_set:
        note_rounding(recipe.model, base.dtype)
    model = base.for_training()
    check_output(model, recipe.attention.pruning != "off")
    check_length(recipe.data.seq_len, model)
    if recipe.experts.form != "inputs":
        settle_layout(recipe, shape_of(model))
    check_target(recipe, model)
    tokenizer = load_tokenizer(recipe.model)
    # others write nothing, and their disks may be full
    distributed.on_rank_zero(lambda: check_writing(model, tokenizer))
    return model, tokenizer


def begin_run(
    recipe: Recipe, base: BaseWeights, run: RunFolder, resumes: bool, on_progress: ProgressCallback
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Corpus]:
    """`open_dense`, then start or resume the run (`RunFolder.start`), and its text."""
    model, tokenizer = open_dense(recipe, base)
    corpus = run.start(
        recipe,
        resumes,
        lambda: fingerprint(model if base.is_original else base.original()),
        lambda: prepare(recipe.data, tokenizer, recipe.seed, model, stage_callback(on_progress, "text")),
    )
    return model, tokenizer, corpus


def new_network(recipe: Recipe, model: PreTrainedModel) -> AnyNetwork:
    """Make the network that holds experts and routers of a model; the start, or a checkpoint, fills it."""
    shape, size = shape_of(model), recipe.experts.embedding_size
    layout = settle_layout(recipe, shape)
    return mask_network(shape, layout, size, recipe.attention, recipe.sampling, recipe.seed).to(model.device)


def start_(
    net: AnyNetwork,
    recipe: Recipe,
    model: PreTrainedModel,
    text: Sequences,
    on_progress: ProgressCallback = no_progress,
) -> None:
    """Set what calibration text decides before learning: all of a carved start, of a random one the basis of the values."""
    ids, mask = text.input_ids.to(model.device), text.mask.to(model.device)
    if recipe.start == "carved":
        # here neurons become experts, and each expert gets the row of the router that predicts it
        carve_(net, model, ids, mask, recipe.active, recipe.seed, stage_callback(on_progress, "carve"))
    elif net.attention is not None and net.attention.section.rotate_values:
        rotations = value_rotations(model, ids, mask, stage_callback(on_progress, "rotate"))
        net.attention.value_rotations.copy_(torch.stack(rotations))


def learn_(
    net: AnyNetwork,
    recipe: Recipe,
    model: PreTrainedModel,
    corpus: Corpus,
    run: RunFolder,
    on_progress: ProgressCallback,
) -> dict[str, Any]:
    """Train from the last checkpoint, or else from the start, to the last step; none if `train.steps` is 0.

    Returns what the plan's notes say of it.
    """

    def loss() -> float:
        masks = choose_experts(net, model, recipe.active, corpus.calibration, recipe.target)
        return planned_loss(model, masks, corpus.evaluation.truncate(CHECKED_TOKENS), recipe.loss.objective)

    steps = recipe.train.steps
    # before the first step, and after the last
    checks = BestWeights(net, run, steps, loss, checks=1, keeps=False) if steps else None
    step = MaskStep(model, net, recipe)
    training = Training(model, net, recipe.train, recipe.seed, corpus, run, step, best=checks)
    run_training(training, "train", on_progress)
    return learning_notes(steps, checks.state() if checks else {})


@torch.no_grad()
def planned_loss(model: Any, plan: Plan, text: Sequences, objective: str) -> float:
    """Return what the dense model loses under a plan's masks, in nats a token of `text`: the KL to itself, or the
    language-modeling loss if that is the objective.

    Every process reads all of the text: a sharded model runs in all of them or in none.
    """
    masks = planned_masks(plan, model.device)
    total = 0.0
    for ids, mask in zip(text.input_ids.split(1), text.mask.split(1), strict=True):
        ids, mask = ids.to(model.device), mask.to(model.device)
        teacher = hidden_states(model, ids, mask) if objective == "kl" else None
        with masked(model, masks):
            student = hidden_states(model, ids, mask)
        total += distill_loss(student, teacher, ids, mask, family_head(model)).item() * int(mask.sum())
    return total / text.tokens


def learning_notes(steps: int, checked: dict[str, Any]) -> dict[str, Any]:
    """What a plan's notes say of a training of `steps` steps; `checked` is the state of the checks on held-out text."""
    # not if the training was stopped before its last check, or if a loss was not finite
    if not steps or checked.get("checked") != steps or not math.isfinite(checked["start"]):
        return {"steps": steps}
    return {"steps": steps, "held_out_before": checked["start"], "held_out": checked["loss"]}


def choose_experts(net: AnyNetwork, model: PreTrainedModel, active: float, text: Sequences, target: str) -> Plan:
    """The plan of what the network holds: experts, routers and widths, as near to the share `active` as the target allows."""
    calibration = text.input_ids.to(model.device), text.mask.to(model.device)
    return extract_plan(net, model, active, calibration, tolerance_of(TARGET_RULES[target]))


def choose_inputs(model: PreTrainedModel, text: Sequences, recipe: Recipe, on_progress: ProgressCallback) -> InputsPlan:
    """The plan of how many inputs of each projection a token uses; which ones, its own numbers tell."""
    ids, mask = text.input_ids.to(model.device), text.mask.to(model.device)
    progress = stage_callback(on_progress, "choosing inputs")
    return plan_inputs(model, shape_of(model), ids, mask, recipe.active, recipe.seed, progress)


def recorded(plan: AnyP, recipe: Recipe, model: PreTrainedModel, source: str, notes: dict[str, Any]) -> AnyP:
    """The plan with its origin: the fingerprint of the dense weights and their config, the recipe, and notes with versions."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "tomoe": __version__}
    # as transformers writes it: JSON has no infinity
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return replace(
        plan,
        source=source,
        dense_config={key: value for key, value in config.items() if not key.startswith("_")},
        recipe=recipe.model_dump(mode="json"),
        notes=plan.notes | notes | {"seq_len": recipe.data.seq_len} | versions,
    )


def fold_and_check(
    plan: AnyPlan, dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, force: bool
) -> None:
    """Make the MoE of a plan and write its folder, which gets its name only if the loaded model computes the same."""
    save_moe(fold(dense, plan, __version__, lazily=not has_room(dense)), plan, tokenizer, out, force, check=True)
    Recipe(**plan.recipe).save(out / "recipe.json")
