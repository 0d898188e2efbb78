"""The steps of a conversion: each takes what it needs and returns what it made. `convert` runs them in order."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe import distributed
from tomoe.data.corpus import Corpus, prepare_corpus
from tomoe.errors import UserError
from tomoe.exporting.choice import check_target
from tomoe.files import atomic_folder
from tomoe.methods.base import Method, Task
from tomoe.methods.registry import file_of
from tomoe.model.base_weights import BaseWeights
from tomoe.model.loading import fingerprint, load_tokenizer, note_rounding
from tomoe.model.structure import check_output, shape_of
from tomoe.model.tokens import check_length
from tomoe.moe.checkpoint import check_writing, save_moe
from tomoe.moe.fold import fold, has_room
from tomoe.plans import AnyPlan, read_plan
from tomoe.progress import ProgressCallback, stage_callback
from tomoe.recipe.conversion import Recipe
from tomoe.training.loop import check_accumulation
from tomoe.training.run_folder import RunFolder
from tomoe.version import __version__


def open_dense(method: Method, recipe: Recipe, base: BaseWeights) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the dense model for training (possibly sharded) and its tokenizer.

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
    method.layout(recipe, shape_of(model))
    check_target(recipe, model)
    tokenizer = load_tokenizer(recipe.model)
    # others write nothing, and their disks may be full
    distributed.on_rank_zero(lambda: check_writing(model, tokenizer))
    return model, tokenizer


def begin_run(
    method: Method, recipe: Recipe, base: BaseWeights, run: RunFolder, resumes: bool, on_progress: ProgressCallback
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Corpus]:
    """Call `open_dense`, then start or resume the run (`RunFolder.start`) and read its text."""
    model, tokenizer = open_dense(method, recipe, base)
    corpus = run.start(
        recipe,
        resumes,
        lambda: fingerprint(model if base.is_original else base.original()),
        lambda: prepare_corpus(recipe.data, tokenizer, recipe.seed, model, stage_callback(on_progress, "text")),
    )
    if own := file_of(recipe.method.name):
        distributed.on_rank_zero(lambda: run.keep_method(own, resumes))
    return model, tokenizer, corpus


def with_origin(plan: AnyPlan, method: Method, task: Task, source: str | None = None) -> AnyPlan:
    """Add to a plan its origin: the fingerprint of the dense weights (by default the run's) and their config, the recipe, and
    notes of the method and of versions."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "tomoe": __version__}
    # as transformers writes it: JSON has no infinity
    config: dict[str, Any] = json.loads(task.original.config.to_json_string(use_diff=False))
    about = {"name": method.name, "paper": method.paper, "summary": method.summary()}
    return replace(
        plan,
        source=task.run.origin_fingerprint() if source is None else source,
        dense_config={key: value for key, value in config.items() if not key.startswith("_")},
        recipe=task.recipe.model_dump(mode="json"),
        notes={"steps": 0} | plan.notes | {"method": about, "seq_len": task.recipe.data.seq_len} | versions,
    )


def keep_plan(run: RunFolder, plan: AnyPlan) -> None:
    """Keep a plan in the run, so that its repair can be resumed."""
    with atomic_folder(run.plan, "plan.json", ()) as part:
        plan.save(part)


def kept_plan(run: RunFolder) -> AnyPlan | None:
    """Return the plan that a killed run has kept; None if there is none. Raises UserError if it is damaged."""
    return read_plan(run.plan) if (run.plan / "plan.json").is_file() else None


def forget_plan(run: RunFolder) -> None:
    """Delete the plan that `keep_plan` kept, once the model's folder is complete."""
    shutil.rmtree(run.plan, ignore_errors=True)


def fold_and_check(
    plan: AnyPlan, dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, force: bool
) -> None:
    """Make the MoE of a plan and write its folder, which is renamed into place only if the loaded model computes the same."""
    save_moe(fold(dense, plan, __version__, lazily=not has_room(dense)), plan, tokenizer, out, force, check=True)
    Recipe(**plan.recipe).save(out / "recipe.json")
