"""Refit a finished conversion to its own masks: OUT (a converted folder) -> REPAIRED (a folder of the same kind)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tomoe import distributed
from tomoe.data.corpus import Corpus, prepare_corpus
from tomoe.errors import Advice, UserError
from tomoe.files import atomic_write, basename
from tomoe.finetuning.finetune import Origin
from tomoe.folders import refuse_overwriting
from tomoe.model.base_weights import BaseWeights
from tomoe.model.loading import load_tokenizer
from tomoe.pipeline.steps import fold_and_check
from tomoe.plans import FINETUNED, Plan
from tomoe.plans.repair.plan import forget_repair, repair_plan
from tomoe.progress import ProgressCallback, no_progress, stage_callback
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.report.card import write_card
from tomoe.report.summary import shown_name
from tomoe.version import __version__


@distributed.locks_out("repair")
def repair(
    folder: Path,
    out: Path,
    changes: Sequence[str] = (),
    data: Sequence[str] = (),
    dense: str = "",
    force: bool = False,
    on_progress: ProgressCallback = no_progress,
) -> Plan:
    """Refit the projections of a conversion to its masks, from the original dense weights, and write the result to `out`.

    changes: `repair.key=value` settings (mode full if the conversion was not repaired). data: text to fit to (default: what
    the conversion learned from). dense: the dense model, if it is not where the plan says. Returns the new plan. If it is
    killed, the same call resumes after the last complete layer.

    Raises UserError if the folder holds no conversion or a fine-tuned one, its dense model changed, or no text is there.
    """
    origin = Origin.of(FinetuneRecipe(model=str(folder), dense=dense))
    # which refuses a plan of another form
    old = origin.plan if isinstance(origin.plan, Plan) else Plan.load(folder)
    if FINETUNED in old.notes:
        raise UserError(
            f"{folder} was fine-tuned after folding, and repair starts from the dense weights; repair before that"
        )
    refuse_overwriting(out, force, origin.dense)
    recipe = Recipe(**old.recipe)
    recipe = recipe.changed([*(["repair.mode=full"] if recipe.repair.mode == "none" else []), *changes])
    if recipe.repair.mode == "none":
        raise UserError("repair.mode is none, so there is nothing to do; set it to full or low_rank")
    tokenizer = load_tokenizer(origin.dense)
    kept = folder / "run" / "corpus.safetensors"
    if not data and not kept.is_file():
        raise UserError(f"{folder} keeps no text (run/corpus.safetensors)", Advice("data", "to name some", "FILE"))
    base = BaseWeights.of(recipe, origin.dense, origin.stored)
    model = base.original()
    origin.check_dense(model)
    if data:
        section = recipe.data.model_copy(update={"sources": tuple(data)})
        corpus = prepare_corpus(section, tokenizer, recipe.seed, model, stage_callback(on_progress, "text"))
    else:
        corpus = Corpus.load(kept)
    text = corpus.fitting_text(recipe.repair.tokens)
    run = out / "run"
    distributed.on_rank_zero(lambda: run.mkdir(parents=True, exist_ok=True))
    plan = repair_plan(old, model, text.input_ids, text.mask, recipe.repair, on_progress, run, base.dtype)
    plan = replace(plan, recipe=recipe.model_dump(mode="json"), notes=plan.notes | {"tomoe": __version__})

    def write() -> None:
        fold_and_check(plan, base.to_stored_dtype_(model), tokenizer, out, force)
        if kept.is_file():
            atomic_write(run / kept.name, kept.read_bytes())
        forget_repair(run)
        command = f"tomoe repair {shown_name(str(folder))} -o {basename(out)}"
        write_card(out, plan, base_model=origin.dense, command=command)

    distributed.on_rank_zero(write)
    return plan
