"""`convert`: dense model and text -> method -> plan -> repair -> fold -> check. `steps` has the steps."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.errors import UserError
from tomoe.folders import refuse_overwriting
from tomoe.methods.base import Task
from tomoe.methods.registry import resolve_method
from tomoe.model.base_weights import BaseWeights
from tomoe.model.names import located
from tomoe.pipeline import steps
from tomoe.plans import AnyPlan, Plan, read_plan
from tomoe.plans.repair.plan import forget_repair, repair_plan
from tomoe.progress import ProgressCallback, no_progress
from tomoe.recipe.conversion import Recipe
from tomoe.training.cost import Stopwatch, write_cost
from tomoe.training.run_folder import RunFolder


def convert(
    recipe: Recipe,
    out: Path | str,
    resume: bool = False,
    force: bool = False,
    on_progress: ProgressCallback = no_progress,
) -> AnyPlan:
    """Convert the dense model of the recipe and write the folder `out`; returns its plan.

    The run is kept in OUT/run: an interrupted conversion resumes with `resume`, bit by bit. Raises UserError for whatever
    the user can fix; what was written before stays.
    """
    if not isinstance(recipe, Recipe):
        raise UserError(
            f'convert takes a recipe, not a {type(recipe).__name__}: convert(Recipe.load(None, ["model=NAME"]), out)'
        )
    return convert_dense(located(recipe), Path(out), resume, force, on_progress)[0]


@distributed.locks_out("convert")
def convert_dense(
    recipe: Recipe,
    out: Path,
    resume: bool = False,
    force: bool = False,
    on_progress: ProgressCallback = no_progress,
) -> tuple[AnyPlan, PreTrainedModel | None]:
    """Run the steps of `convert`. Returns the plan, and the dense model if the run has its original weights in memory."""
    dense = _write_converted(recipe, out, resume, force, on_progress)
    # read when the plan that was written is gone: its refitted projections are GBs
    return read_plan(out), dense


def _write_converted(
    recipe: Recipe, out: Path, resume: bool, force: bool, on_progress: ProgressCallback
) -> PreTrainedModel | None:
    """Write the converted folder. Returns the dense model if the run has its original weights in memory."""
    method, recipe = resolve_method(recipe)
    run, base, watch = RunFolder(out / "run"), BaseWeights.of(recipe), Stopwatch()
    refuse_overwriting(out, force, recipe.model, resume)
    resumes = distributed.on_rank_zero(lambda: run.resumes(recipe, resume, force))

    model, tokenizer, corpus = steps.begin_run(method, recipe, base, run, resumes, on_progress)
    watch.ended("text")
    original = None if base.is_original else base.original
    task = Task(model, recipe, corpus, run, original, on_progress, watch.ended)
    # kept from the repair on, which a kill may interrupt
    kept = steps.kept_plan(run) if resumes else None
    plan = kept or steps.with_origin(method.plan(task), method, task)
    if kept is None:
        distributed.on_rank_zero(lambda: steps.keep_plan(run, plan))
    if isinstance(plan, Plan) and recipe.repair.mode != "none":
        text = corpus.fitting_text(recipe.repair.tokens)
        repaired = repair_plan(
            plan, task.original, text.input_ids, text.mask, recipe.repair, on_progress, run.path, base.dtype
        )
        plan = repaired
        watch.ended("repair")
    finished = plan

    def finish() -> None:
        steps.fold_and_check(finished, base.to_stored_dtype_(task.original), tokenizer, out, force or resumes)
        forget_repair(run.path)
        steps.forget_plan(run)
        watch.ended("folding")
        write_cost(run.path / "cost.json", recipe.train, task.original, corpus, watch, resumes)

    # all processes have the same plan; one of them writes
    distributed.on_rank_zero(finish)
    return model if base.is_original else None
