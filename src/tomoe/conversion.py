"""`convert`, and the verbs that run some of its stages: train -> plan -> apply.

recipe -> RUN (recipe, corpus, metrics, masks/step-N) -> PLAN (plan.json, plan.safetensors) -> OUT (a Hugging Face folder)
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe import distributed
from tomoe.data.corpus import Corpus, Sequences, prepare
from tomoe.data.sources import SELF
from tomoe.errors import UserError
from tomoe.exporting.targets import check_target
from tomoe.files import atomic_folder, basename
from tomoe.folders import PLAN, refuse_overwriting, refuse_strangers
from tomoe.model import catalog
from tomoe.model.base_weights import BaseWeights
from tomoe.model.compute_dtype import dtype_of
from tomoe.model.hub import find_plan
from tomoe.model.loading import fingerprint, load_dense, load_tokenizer
from tomoe.model.names import HUB_ID
from tomoe.model.structure import check_output, shape_of
from tomoe.model.tokens import check_length
from tomoe.moe.checkpoint import check_writing, save_moe
from tomoe.moe.fold import fold
from tomoe.plan import FINETUNED, AnyPlan, InputsPlan, Plan, read_plan
from tomoe.progress import ProgressCallback, no_progress, stage_callback
from tomoe.pruning.carving import carve_
from tomoe.pruning.extract import extract_plan, planned_loss
from tomoe.pruning.forms import mask_network
from tomoe.pruning.inputs import plan_inputs
from tomoe.pruning.layouts import FORMS, Layout, settle_layout, tolerance_of
from tomoe.pruning.learned.mask_network import MaskNetwork
from tomoe.pruning.learned.objective import MaskStep
from tomoe.pruning.repair.plan import forget_repair, repair_plan
from tomoe.pruning.rotation import value_rotations
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.run import RunRecipe
from tomoe.recipe.target_rules import TARGET_RULES
from tomoe.report.card import write_card
from tomoe.report.summary import shown_name
from tomoe.training.best import BestWeights
from tomoe.training.cost import Stopwatch, write_cost
from tomoe.training.loop import CHECKED, Training, check_accumulation
from tomoe.training.run_folder import RunFolder
from tomoe.version import __version__

CHECKED_TOKENS = 4096
"""Held-out tokens that show, before and after training, what the masks lose."""


def convert(
    recipe: Recipe,
    out: Path | str,
    resume: bool = False,
    force: bool = False,
    on_progress: ProgressCallback = no_progress,
) -> AnyPlan:
    """Convert the dense model of the recipe and write the MoE folder `out`; returns its plan.

    The run is kept in OUT/run: an interrupted conversion resumes with `resume`, bit by bit. Raises UserError for whatever
    the user can mend; what was written before stays.
    """
    if not isinstance(recipe, Recipe):
        raise UserError(
            f'convert takes a recipe, not a {type(recipe).__name__}: convert(Recipe.load(None, ["model=NAME"]), out)'
        )
    return convert_dense(recipe, Path(out), resume, force, on_progress)[0]


@distributed.locks_out("convert")
def convert_dense(
    recipe: Recipe,
    out: Path,
    resume: bool = False,
    force: bool = False,
    on_progress: ProgressCallback = no_progress,
) -> tuple[AnyPlan, PreTrainedModel | None]:
    """Run the stages of `convert`: text, start, training (none if `train.steps` is 0), plan, repair, fold.

    Returns the plan, and the dense model if the run has its original weights in memory.
    """
    run, base, watch = RunFolder(out / "run"), BaseWeights.of(recipe), Stopwatch()
    refuse_overwriting(out, force, recipe.model, resume)
    resumes = distributed.on_rank_zero(lambda: run.resumes(recipe, resume, force))
    opened = begin(recipe, base, run, resumes, on_progress)
    watch.ended("text")
    if recipe.experts.form == "inputs":
        return _convert_to_inputs(recipe, out, force or resumes, run, base, opened, watch, on_progress)
    net, learned = learn(recipe, base, opened, run, watch, on_progress)

    def extract() -> tuple[Plan, PreTrainedModel]:
        original, weights = opened.model if base.is_original else base.original(), run.origin_fingerprint()
        text = opened.corpus
        return finish_plan(net, original, recipe, text, learned, weights, on_progress, run.path, base.dtype), original

    # ranks repair together; without repair rank 0 finishes alone
    together = extract() if recipe.repair.mode != "none" else None
    if together:
        watch.ended("repair")

    def finish() -> None:
        extracted, original = together or extract()
        save_conversion(extracted, base.stored_(original), opened.tokenizer, out, force or resumes)
        forget_repair(run.path)
        watch.ended("folding")
        write_cost(run.path / "cost.json", recipe.train, original, opened.corpus, watch, resumes)

    distributed.on_rank_zero(finish)
    return read_plan(out), opened.model if base.is_original else None


def _convert_to_inputs(
    recipe: Recipe, out: Path, force: bool, run: RunFolder, base: BaseWeights, opened: Opened, watch: Stopwatch,
    on_progress: ProgressCallback,
) -> tuple[InputsPlan, PreTrainedModel | None]:  # fmt: skip
    """The last stages of a conversion whose tokens choose inputs: the plan, and folding."""
    model, text = opened.model, opened.corpus.calibration
    ids, mask = text.input_ids.to(model.device), text.mask.to(model.device)
    progress = stage_callback(on_progress, "choosing inputs")
    bare = plan_inputs(model, shape_of(model), ids, mask, recipe.active, recipe.seed, progress)
    finished = replace(bare, source=run.origin_fingerprint(), **metadata(recipe, model, {"steps": 0}))
    watch.ended("choosing inputs")

    def finish() -> None:
        original = model if base.is_original else base.original()
        save_conversion(finished, base.stored_(original), opened.tokenizer, out, force)
        watch.ended("folding")
        write_cost(run.path / "cost.json", recipe.train, original, opened.corpus, watch, force)

    distributed.on_rank_zero(finish)
    return finished, model if base.is_original else None


@dataclass(frozen=True)
class Opened:
    """What a run begins with."""

    model: PreTrainedModel
    """The dense model, as it learns."""
    tokenizer: PreTrainedTokenizerBase
    layout: Layout | None
    """How experts divide its layers; None if tokens choose inputs."""
    corpus: Corpus


def begin(
    recipe: Recipe,
    base: BaseWeights,
    run: RunFolder,
    resumes: bool,
    on_progress: ProgressCallback,
) -> Opened:
    """Open model and text, then start the run or resume it.

    Nothing is written, and nothing of an older run is deleted, before model and text have been prepared. Raises UserError if
    they cannot be, or if the run was started with other weights.
    """
    check_accumulation(recipe.train)
    model, tokenizer, layout = open_dense(recipe, base)

    def text() -> Corpus | None:
        if resumes and run.corpus.exists():
            return None
        return prepare(recipe.data, tokenizer, recipe.seed, model, stage_callback(on_progress, "text"))

    # all processes sample together; a sharded model runs in all of them or in none
    sampled = text() if distributed.world_size() > 1 and SELF in recipe.data.sources else None

    def begin_run() -> None:
        weights = fingerprint(model if base.is_original else base.original())
        if resumes:
            run.check_origin(weights, recipe.model)
        corpus = sampled or text()
        if corpus is not None:
            run.begin(recipe, resumes, weights)
            corpus.save(run.corpus)

    distributed.on_rank_zero(begin_run)
    return Opened(model, tokenizer, layout, Corpus.load(run.corpus))


def open_dense(recipe: Recipe, base: BaseWeights) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Layout | None]:
    """Load the dense model to learn from and its tokenizer, and settle how its experts divide a layer.

    Raises UserError if the model does not fit the recipe.
    """
    if not recipe.model:
        raise UserError("the recipe names no model; give a hub id, a folder, a .gguf file or a known name")
    model = base.for_training()
    check_output(model, recipe.attention.pruning != "off")
    check_length(recipe.data.seq_len, model)
    layout = None if recipe.experts.form == "inputs" else settle_layout(recipe, shape_of(model))
    check_target(recipe, model)
    tokenizer = load_tokenizer(recipe.model)
    # others write nothing, and their disks may be full
    distributed.on_rank_zero(lambda: check_writing(model, tokenizer))
    return model, tokenizer, layout


def learn(
    recipe: Recipe,
    base: BaseWeights,
    opened: Opened,
    run: RunFolder,
    watch: Stopwatch,
    on_progress: ProgressCallback,
) -> tuple[MaskNetwork, dict[str, Any]]:
    """Start the mask network, or take up its last checkpoint, and train it to the last step.

    Returns it and what the plan's notes say of its training.
    """
    model, corpus = opened.model, opened.corpus
    assert opened.layout is not None
    net = empty_network(recipe, model, opened.layout)
    # a checkpoint holds the start too, so a resumed run need not carve again
    if not run.steps():
        reads_weights = recipe.start == "carved" or net.rotates_values
        readable = base.original() if base.quantization != "none" and reads_weights else model
        start_(net, recipe, readable, corpus.calibration, on_progress)
        watch.ended("carving" if recipe.start == "carved" else "start")
    step = MaskStep(model, net, recipe.loss, recipe.train, recipe.active, recipe.seed)
    best = _start_and_end(net, recipe, model, corpus, run) if recipe.train.steps else None
    training = Training(model, net, recipe.train, recipe.seed, corpus, run, step, best=best)
    run_training(training, recipe, "train", on_progress)
    if best is None:
        return net, {"steps": 0}
    watch.ended("learning")
    return net, training_notes(recipe.train.steps, best.state())


def _start_and_end(
    net: MaskNetwork, recipe: Recipe, model: PreTrainedModel, corpus: Corpus, run: RunFolder
) -> BestWeights:
    """Checks, before the first step and after the last, what the plan of these masks loses on held-out text."""
    text = corpus.evaluation.truncate(CHECKED_TOKENS)

    def loss() -> float:
        return planned_loss(model, _extract(net, model, recipe, corpus), text, recipe.loss.objective)

    return BestWeights(net, run, recipe.train.steps, loss, checks=1, keeps=False)


def training_notes(steps: int, checked: dict[str, Any]) -> dict[str, Any]:
    """What a plan's notes say of a training of `steps` steps; `checked` is the state of the checks on held-out text."""
    # not if the training was stopped before its last check, or if a loss was not finite
    if checked.get("checked") != steps or not math.isfinite(checked["start"]):
        return {"steps": steps}
    return {"steps": steps, "held_out_before": checked["start"], "held_out": checked["loss"]}


def empty_network(recipe: Recipe, model: PreTrainedModel, layout: Layout) -> MaskNetwork:
    """Make the mask network that a checkpoint, or `start_`, fills."""
    size, sampling = recipe.experts.embedding_size, recipe.sampling
    net = mask_network(shape_of(model), layout, size, recipe.attention, sampling, recipe.seed)
    return net.to(model.device)


def start_(
    net: MaskNetwork, recipe: Recipe, model: PreTrainedModel, calibration: Sequences, on_progress: ProgressCallback
) -> None:
    """Set what calibration text decides before learning: all of a carved start, of a random one the basis of the values."""
    ids, mask = calibration.input_ids.to(model.device), calibration.mask.to(model.device)
    if recipe.start == "carved":
        progress = stage_callback(on_progress, "carve")
        carve_(net, model, ids, mask, recipe.active, recipe.seed, progress)
    elif net.rotates_values:
        rotations = value_rotations(model, ids, mask, stage_callback(on_progress, "rotate"))
        net.value_rotations.copy_(torch.stack(rotations))


def make_network(
    recipe: Recipe, model: PreTrainedModel, calibration: Sequences, on_progress: ProgressCallback = no_progress
) -> MaskNetwork:
    """Make the mask network at its start: random, or carved from calibration statistics."""
    net = empty_network(recipe, model, settle_layout(recipe, shape_of(model)))
    start_(net, recipe, model, calibration, on_progress)
    return net


def run_training(training: Training, recipe: RunRecipe, stage: str, on_progress: ProgressCallback) -> None:
    """Train from the newest checkpoint to the last step; all processes start with the same weights."""
    training.resume()
    distributed.broadcast_(training.net.state_dict().values())
    training.train(lambda row: on_progress(stage, row["step"], recipe.train.steps, row))


def _extract(net: MaskNetwork, model: PreTrainedModel, recipe: Recipe, corpus: Corpus) -> Plan:
    """The plan that the masks give at the recipe's share, as near to it as its target allows."""
    calibration = corpus.calibration.input_ids.to(model.device), corpus.calibration.mask.to(model.device)
    return extract_plan(net, model, recipe.active, calibration, tolerance_of(TARGET_RULES[recipe.target]))


def finish_plan(
    net: MaskNetwork, model: PreTrainedModel, recipe: Recipe, corpus: Corpus, learned: dict[str, Any], weights: str,
    on_progress: ProgressCallback = no_progress, folder: Path | None = None, stored: torch.dtype | None = None,
) -> Plan:  # fmt: skip
    """Extract the plan, add its metadata (fingerprint of the dense weights, dense config, recipe, versions), repair it.

    `learned` is what the notes say of training. `stored` is the dtype of whole matrices in the plan (default: the model's).
    Repair keeps what does not fit in memory in a file in `folder`, and needs every rank.
    """
    bare = _extract(net, model, recipe, corpus)
    extracted = replace(bare, source=weights, **metadata(recipe, model, bare.notes | learned))
    if recipe.repair.mode == "none":
        return extracted
    text = corpus.fitting_text(recipe.repair.tokens)
    return repair_plan(extracted, model, text.input_ids, text.mask, recipe.repair, on_progress, folder, stored)


def metadata(recipe: Recipe, model: PreTrainedModel, notes: dict[str, Any]) -> dict[str, Any]:
    """What a plan says of its origin: the dense config, the recipe, and notes with the versions."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "tomoe": __version__}
    # as transformers writes it: JSON has no infinity
    whole: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    config = {k: v for k, v in whole.items() if not k.startswith("_")}
    notes = notes | {"seq_len": recipe.data.seq_len} | versions
    return {"dense_config": config, "recipe": recipe.model_dump(mode="json"), "notes": notes}


def save_conversion(
    plan: AnyPlan, dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, force: bool
) -> None:
    save_moe(fold(dense, plan, __version__, lazily=True), plan, tokenizer, out, force, check=True)
    Recipe(**plan.recipe).save(out / "recipe.json")


@distributed.locks_out("train")
def train(
    recipe: Recipe, out: Path, resume: bool = False, force: bool = False, on_progress: ProgressCallback = no_progress
) -> Path:
    """Learn masks and routers in the run folder `out` and return it. Raises UserError for whatever the user can mend."""
    if recipe.experts.form == "inputs":
        raise UserError(
            "experts.form = inputs learns nothing, so there is nothing to train; run `tomoe convert`, or set experts.form to fine"
        )
    run, base = RunFolder(out), BaseWeights.of(recipe)
    resumes = distributed.on_rank_zero(lambda: run.resumes(recipe, resume, force))
    opened = begin(recipe, base, run, resumes, on_progress)
    learn(recipe, base, opened, run, Stopwatch(), on_progress)
    return out


@distributed.locks_out("plan")
def plan(
    run_path: Path, out: Path, active: float | None = None, force: bool = False,
    on_progress: ProgressCallback = no_progress,
) -> Plan:  # fmt: skip
    """Extract the plan of a run's newest checkpoint; `active` other than the trained one is allowed.

    Raises UserError if there is no such run, its dense model changed, or `out` holds a model (or, without `force`, a plan).
    """
    if not (run_path / "recipe.json").is_file():
        raise UserError(f"{run_path} holds no run (no recipe.json); make one with `tomoe train`")
    refuse_strangers(out, force, (*PLAN, "config.json"))
    if (out / "config.json").exists():
        raise UserError(f"{out} holds a model, which must keep the plan it was made from; choose another folder")
    if (out / "plan.json").exists() and not force:
        raise UserError(f"{out} already holds a plan; choose another folder or give --force")
    run, recipe = RunFolder(run_path), Recipe.load(run_path / "recipe.json")
    target = recipe if active is None else recipe.changed([f"active={active}"])
    if FORMS[recipe.experts.form].for_one_budget and target.active != recipe.active:
        raise UserError(
            f"{run_path} divided its neurons into fine-grained experts for active = {recipe.active}, so a plan for "
            f"{target.active} needs a run of its own; or use other numbers of them when the model runs (--active)"
        )
    checkpoint = run.last()
    if checkpoint is None:
        raise UserError(
            f"{run_path} holds no checkpoint yet; run `tomoe train` first, with --resume if it was interrupted"
        )
    base = BaseWeights.of(recipe)
    model = base.original()
    weights = fingerprint(model)
    run.check_origin(weights, recipe.model)
    corpus = Corpus.load(run.corpus)
    net = empty_network(recipe, model, settle_layout(recipe, shape_of(model)))
    run.restore(checkpoint, net, None)
    learned = training_notes(checkpoint.step, checkpoint.state.get(CHECKED, {}))
    extracted = finish_plan(net, model, target, corpus, learned, weights, on_progress, run_path, base.dtype)
    with atomic_folder(out, "plan.json", ()) as part:
        extracted.save(part)
    forget_repair(run_path)
    return extracted


@distributed.locks_out("apply")
def apply_plan(plan: str, model: str | None, out: Path, dtype: str | None = None, force: bool = False) -> AnyPlan:
    """Make the MoE from a plan (folder or hub id) and the dense weights it was made for; write the folder and its card.

    `model` may be left out if the plan names it; a plan from the hub must not name a folder of this machine. Raises
    UserError for other weights than the plan's, and for whatever else the user can mend.
    """
    folder = find_plan(plan)
    loaded = read_plan(folder)
    named = str(loaded.recipe.get("model", ""))
    if model is None and not Path(plan).is_dir() and not (HUB_ID.fullmatch(named) or named in catalog.names()):
        raise UserError(f"the plan {plan} does not say where its dense model is; name it: tomoe apply {plan} MODEL")
    if FINETUNED in loaded.notes:
        raise UserError(
            f"the plan in {plan} belongs to weights that were fine-tuned after folding, which only their model folder "
            "holds; apply the plan of the conversion, then fine-tune again"
        )
    recipe = Recipe(**loaded.recipe) if loaded.recipe else Recipe()
    name = model or recipe.model
    refuse_overwriting(out, force, name)
    dense = load_dense(name, dtype_of(dtype or recipe.train.dtype), offload=None)
    if loaded.source and loaded.source != (weights := fingerprint(dense)):
        raise UserError(
            f"the plan was made for other weights (hash {loaded.source[:12]}) than these (hash {weights[:12]}); "
            "apply it to the model it was made for"
        )
    save_conversion(loaded, dense, load_tokenizer(name), out, force)
    command = f"tomoe apply {shown_name(plan)} {shown_name(model or named)} -o {basename(out)}"
    write_card(out, loaded, base_model=model or named, command=command)
    return loaded
