"""`convert`: from a recipe to the MoE folder, step by step. What a step does stands in `steps`."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.conversion import steps
from tomoe.errors import UserError
from tomoe.folders import refuse_overwriting
from tomoe.model.base_weights import BaseWeights
from tomoe.model.names import located
from tomoe.plan import AnyPlan, read_plan
from tomoe.progress import ProgressCallback, no_progress
from tomoe.pruning.repair.plan import forget_repair, repair_plan
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
    """Convert the dense model of the recipe and write the MoE folder `out`; returns its plan.

    The run is kept in OUT/run: an interrupted conversion resumes with `resume`, bit by bit. Raises UserError for whatever
    the user can mend; what was written before stays.
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
    run, base, watch = RunFolder(out / "run"), BaseWeights.of(recipe), Stopwatch()
    refuse_overwriting(out, force, recipe.model, resume)
    resumes = distributed.on_rank_zero(lambda: run.resumes(recipe, resume, force))

    model, tokenizer, corpus = steps.begin_run(recipe, base, run, resumes, on_progress)
    watch.ended("text")

    plan: AnyPlan
    if recipe.experts.form == "inputs":
        # tokens choose inputs of the dense weights, so nothing is carved, learned or repaired
        original = model
        chosen = steps.choose_inputs(model, corpus.calibration, recipe, on_progress)
        plan = steps.recorded(chosen, recipe, original, run.origin_fingerprint(), {"steps": 0})
        watch.ended("choosing inputs")
    else:
        net = steps.new_network(recipe, model)
        # a checkpoint holds the start, too
        if not run.steps():
            steps.start_(net, recipe, model, corpus.calibration, on_progress)
            watch.ended("carving" if recipe.start == "carved" else "start")
        learned = steps.learn_(net, recipe, model, corpus, run, on_progress)
        if recipe.train.steps:
            watch.ended("learning")
        # learning may run on a sharded copy; the plan is for the original weights
        original = model if base.is_original else base.original()
        experts = steps.choose_experts(net, original, recipe.active, corpus.calibration, recipe.target)
        recorded = steps.recorded(experts, recipe, original, run.origin_fingerprint(), learned)
        text = corpus.fitting_text(recipe.repair.tokens)
        plan = repair_plan(
            recorded, original, text.input_ids, text.mask, recipe.repair, on_progress, run.path, base.dtype
        )
        if recipe.repair.mode != "none":
            watch.ended("repair")

    def finish() -> None:
        steps.fold_and_check(plan, base.stored_(original), tokenizer, out, force or resumes)
        forget_repair(run.path)
        watch.ended("folding")
        write_cost(run.path / "cost.json", recipe.train, original, corpus, watch, resumes)

    # all processes have the same plan; one of them writes
    distributed.on_rank_zero(finish)
    return read_plan(out), model if base.is_original else None
