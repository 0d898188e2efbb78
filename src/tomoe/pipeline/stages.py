"""The commands that run some of the steps of `convert`: train -> plan -> apply."""

from __future__ import annotations

from pathlib import Path

from tomoe import distributed
from tomoe.data.corpus import Corpus
from tomoe.errors import Advice, UserError
from tomoe.files import atomic_folder, basename
from tomoe.folders import PLAN, refuse_foreign_files, refuse_overwriting
from tomoe.methods.base import Task
from tomoe.methods.registry import resolve_method
from tomoe.model import catalog
from tomoe.model.base_weights import BaseWeights
from tomoe.model.compute_dtype import dtype_of
from tomoe.model.hub import find_plan
from tomoe.model.loading import fingerprint, load_dense, load_tokenizer
from tomoe.model.names import HUB_ID, located
from tomoe.pipeline import steps
from tomoe.plans import FINETUNED, AnyPlan, Plan, read_plan
from tomoe.plans.repair.plan import forget_repair, repair_plan
from tomoe.progress import ProgressCallback, no_progress
from tomoe.recipe.conversion import Recipe
from tomoe.report.card import write_card
from tomoe.report.summary import shown_name
from tomoe.training.run_folder import RunFolder


@distributed.locks_out("train")
def train(
    recipe: Recipe, out: Path, resume: bool = False, force: bool = False, on_progress: ProgressCallback = no_progress
) -> Path:
    """Learn masks and routers in the run folder `out` and return it. Raises UserError for whatever the user can fix."""
    method, recipe = resolve_method(located(recipe))
    if not method.trains:
        raise UserError(f"method {method.name} trains nothing", "convert with it", "choose a method that trains")
    run, base = RunFolder(out), BaseWeights.of(recipe)
    resumes = distributed.on_rank_zero(lambda: run.resumes(recipe, resume, force))
    model, _, corpus = steps.begin_run(method, recipe, base, run, resumes, on_progress)
    method.train(Task(model, recipe, corpus, run, on_progress=on_progress))
    return out


@distributed.locks_out("plan")
def plan(
    run_path: Path,
    out: Path,
    active: float | None = None,
    force: bool = False,
    on_progress: ProgressCallback = no_progress,
) -> Plan:
    """Extract the plan of a run's newest checkpoint; `active` other than the trained one is allowed.

    Raises UserError if there is no such run, its dense model changed, or `out` holds a model (or, without `force`, a plan).
    """
    if not (run_path / "recipe.json").is_file():
        raise UserError(f"{run_path} holds no run (no recipe.json); make one with `tomoe train`")
    refuse_foreign_files(out, force, (*PLAN, "config.json"))
    if (out / "config.json").exists():
        raise UserError(f"{out} holds a model, which must keep the plan it was made from; choose another folder")
    if (out / "plan.json").exists() and not force:
        raise UserError(f"{out} already holds a plan", "choose another folder", Advice("force", "to replace it"))
    run, recipe = RunFolder(run_path), Recipe.load(run_path / "recipe.json")
    trained_for = recipe.active
    method, recipe = resolve_method(recipe if active is None else recipe.changed([f"active={active}"]))
    checkpoint = run.last()
    if checkpoint is None:
        if not (method.trains and recipe.train.steps):
            why = (
                "the run trained nothing (train.steps = 0)" if method.trains else f"method {method.name} trains nothing"
            )
            raise UserError(f"{run_path} holds no checkpoint, because {why}", "convert again for another plan")
        raise UserError(
            f"{run_path} holds no checkpoint yet",
            "train it first",
            Advice("resume", "to go on with a training that was interrupted", here=False),
        )
    base = BaseWeights.of(recipe)
    model = base.original()
    source = fingerprint(model)
    run.check_origin(source, recipe.model)
    corpus = Corpus.load(run.corpus)
    task = Task(model, recipe, corpus, run, on_progress=on_progress)
    recorded = steps.with_origin(method.extract(task, checkpoint, trained_for), method, task, source)
    assert isinstance(recorded, Plan)
    text = corpus.fitting_text(recipe.repair.tokens)
    extracted = repair_plan(
        recorded, model, text.input_ids, text.mask, recipe.repair, on_progress, run_path, base.dtype
    )
    with atomic_folder(out, "plan.json", ()) as part:
        extracted.save(part)
    forget_repair(run_path)
    return extracted


@distributed.locks_out("apply")
def apply_plan(plan: str, model: str | None, out: Path, dtype: str | None = None, force: bool = False) -> AnyPlan:
    """Make the MoE from a plan (folder or hub id) and the dense weights it was made for; write the folder and its card.

    `model` may be left out if the plan names it; a plan from the hub must not name a folder of this machine. Raises
    UserError for other weights than the plan's, and for whatever else the user can fix.
    """
    folder = find_plan(plan)
    loaded = read_plan(folder)
    named = str(loaded.recipe.get("model", ""))
    if model is None and not Path(plan).is_dir() and not (HUB_ID.fullmatch(named) or named in catalog.MODELS):
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
    steps.fold_and_check(loaded, dense, load_tokenizer(name), out, force)
    command = f"tomoe apply {shown_name(plan)} {shown_name(model or named)} -o {basename(out)}"
    write_card(out, loaded, base_model=model or named, command=command)
    return loaded
