"""`finetune`: OUT (a converted folder) -> TUNED (a folder of the same kind, its run in TUNED/run)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe import distributed
from tomoe.data.corpus import Corpus
from tomoe.data.evaluation_text import held_out_text
from tomoe.data.sources import SELF
from tomoe.errors import Advice, Note, UserError
from tomoe.evaluation.compare import compare
from tomoe.evaluation.results import Row, to_json
from tomoe.files import atomic_write, basename, format_bytes, sha256
from tomoe.finetuning.students import FinetuneStep, HeldOutLoss, MoEStudent, check_packages
from tomoe.finetuning.text import finetuning_text
from tomoe.folders import refuse_overwriting
from tomoe.model.compute_dtype import compute_dtype
from tomoe.model.loading import (
    fingerprint,
    free_on_device,
    load_config,
    load_dense,
    load_model,
    load_tokenizer,
    pick_device,
)
from tomoe.model.names import located, resolve
from tomoe.moe.checkpoint import load_moe, save_moe, stored_dtype
from tomoe.plans import FINETUNED, AnyPlan, Plan, read_plan
from tomoe.progress import ProgressCallback, no_progress
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.report.card import write_card
from tomoe.report.summary import shown_name
from tomoe.training.cost import Stopwatch, write_cost
from tomoe.training.loop import BestWeights, Training, check_accumulation, run_training
from tomoe.training.run_folder import EARLIER, RunFolder
from tomoe.training.tuning_memory import Tuning
from tomoe.version import __version__

# Tokens of held-out text that a check reads: at most so many, and so small a share of what the run reads. Of 512 tokens the KL is
# known to 0.014 only where tokens choose inputs: weights that differ by a millionth choose others.
MOST_CHECKED, CHECKED_SHARE = 4096, 10
CHECKS = 5  # how often a run is checked, besides its start
# Peak learning rates: for each nat of KL that there is to recover, at most, and towards a text (docs/lab/log.md).
RATE_OF_KL, MOST_RATE, RATE_OF_TEXT = 1e-3, 1e-3, 5e-4

NAME_DENSE = Advice("dense", "to name the dense model", "MODEL")


@dataclass(frozen=True)
class Origin:
    """A converted folder: its plan, the dtype its weights are stored in, and the name of its dense model."""

    folder: Path
    plan: AnyPlan
    stored: str
    dense: str

    @classmethod
    def of(cls, recipe: FinetuneRecipe) -> Origin:
        """Read it from a recipe. Raises UserError if that names no converted model, or if its dense model is not found."""
        if not recipe.model:
            raise UserError("the recipe names no model; name a folder that `tomoe convert` wrote")
        folder = Path(recipe.model)
        stored, plan = stored_dtype(folder), read_plan(folder)
        dense = recipe.dense or str(plan.recipe.get("model", ""))
        if not dense:
            raise UserError(f"the plan of {folder} names no dense model", NAME_DENSE)
        try:
            resolve(dense)
        except UserError as error:
            raise UserError(f"the dense model of {folder} was not found ({error.wrong})", NAME_DENSE) from None
        return cls(folder, plan, stored, dense)

    def fingerprint(self) -> str:
        """Sha256 of plan.json, which holds the hashes of the plan's tensors and of the dense weights."""
        return sha256(self.folder / "plan.json")

    def dtype(self, recipe: FinetuneRecipe) -> torch.dtype:
        """The dtype of the weights while they train."""
        setting, stored = recipe.train.dtype, getattr(torch, self.stored)
        if stored == torch.float16 or setting in ("float32", "bfloat16"):
            return torch.bfloat16 if setting == "bfloat16" else torch.float32
        return compute_dtype(setting, stored, pick_device(recipe.device))

    def check_dense(self, model: PreTrainedModel) -> None:
        """Raise UserError if the model is not the one that the folder was converted from."""
        expected = self.plan.notes.get(FINETUNED, {}).get("dense", self.plan.source)
        if expected and expected != (actual := fingerprint(model)):
            raise UserError(
                f"{self.folder} did not come from {self.dense}: it was made from weights of hash {str(expected)[:12]}, and "
                f"these have {actual[:12]}",
                NAME_DENSE,
            )


def with_batch(recipe: FinetuneRecipe, run: RunFolder, resume: bool) -> FinetuneRecipe:
    """Return the recipe with a number for `train.batch_size` if it is 0: the resumed run's, or what fits. A Note says it."""
    if recipe.train.batch_size:
        return recipe
    if resume and run.recipe.exists():
        rows = FinetuneRecipe.load(run.recipe).train.batch_size
        return recipe.changed([f"train.batch_size={rows}"])
    passes, device = recipe.train.gradient_accumulation_steps, pick_device(recipe.device)
    free, length = free_on_device(device), recipe.data.seq_len
    needs = tuning(recipe)
    fitting = torch.tensor(needs.rows(free, length, passes) if free else 1)
    # processes with other GPUs take what the first one takes
    distributed.broadcast_([fitting])
    rows = int(fitting)
    if not rows:
        raise UserError(
            f"fine-tuning takes about {format_bytes(needs.total(length))} with one sequence of {length} tokens, and "
            f"{format_bytes(free)} are free on {device}; try train.gradient_checkpointing=true, "
            "train.optimizer=adamw8bit or weights=lora"
        )
    if distributed.rank() == 0:
        why = f"{format_bytes(free)} are free on {device}" if free else "a CPU gains nothing from more"
        tokens = rows * passes * length
        warnings.warn(
            f"train.batch_size = 0: {rows} per forward pass, {tokens:,} tokens per step; {why}", Note, stacklevel=2
        )
    return recipe.changed([f"train.batch_size={rows}"])


def tuning(recipe: FinetuneRecipe) -> Tuning:
    """Return what determines the memory that the recipe needs."""
    origin = Origin.of(recipe)
    shape, config = origin.plan.shape, load_config(recipe.model)
    output = config.vocab_size * shape.hidden_size
    outside = output * (1 if config.tie_word_embeddings else 2)
    rank, eight_bit = recipe.lora.rank if recipe.weights == "lora" else 0, recipe.train.optimizer == "adamw8bit"
    itemsize, checkpointing = origin.dtype(recipe).itemsize, recipe.train.gradient_checkpointing
    experts = origin.plan.num_experts if isinstance(origin.plan, Plan) else 0
    return Tuning(shape, outside, output, experts, itemsize, rank, eight_bit, checkpointing)


@distributed.locks_out("finetune")
def finetune(
    recipe: FinetuneRecipe,
    out: str | Path,
    resume: bool = False,
    force: bool = False,
    on_progress: ProgressCallback = no_progress,
) -> AnyPlan:
    """Fine-tune a converted model's weights and routers to recover quality, and write the result as a converted folder.

    recipe: `recipe.model` is a folder that `convert` wrote. out: the folder to write; the run is kept in its subfolder `run`.
    resume: continue an interrupted run there, to the same bytes. force: replace a model that is there. on_progress: called
    as (stage, done, total, loss terms). Returns the plan of the result: the same neurons, with the routers as they are now.

    Raises UserError, in one sentence, for whatever the user can fix; what was written before stays.
    """
    if not isinstance(recipe, FinetuneRecipe):
        raise UserError(
            f'finetune takes a recipe, not a {type(recipe).__name__}: FinetuneRecipe.load(None, ["model=OUT"])'
        )
    out = Path(out)
    run = RunFolder(out / "run", "weights")
    recipe = located(recipe)
    refuse_overwriting(out, force, recipe.model, resume)
    recipe = with_batch(recipe, run, resume)
    resumed = distributed.on_rank_zero(lambda: run.resumes(recipe, resume, force))
    check_accumulation(recipe.train)
    check_packages(recipe)
    origin, watch = Origin.of(recipe), Stopwatch()
    dense = None
    if recipe.loss.objective == "kl" or SELF in recipe.data.sources:
        dense = load_dense(origin.dense, origin.dtype(recipe), pick_device(recipe.device))
        origin.check_dense(dense)
    tokenizer = load_tokenizer(str(origin.folder))

    corpus = run.start(
        recipe,
        resumed,
        origin.fingerprint,
        lambda: finetuning_text(recipe, origin.folder, origin.plan, tokenizer, dense, on_progress),
    )
    distributed.on_rank_zero(lambda: _keep_earlier_text(origin.folder / "run", run))
    watch.ended("text")
    student, best = _train(recipe, origin, dense, corpus, run, on_progress)
    watch.ended("learning")

    def finish() -> None:
        rate = peak_rate(recipe, best.start)
        require_improvement_(best, rate)
        save(student, recipe, origin, corpus, best, rate, tokenizer, out, force or resumed)
        watch.ended("folding")
        write_cost(run.path / "cost.json", recipe.train, student.model, corpus, watch, resumed)

    distributed.on_rank_zero(finish)
    return read_plan(out)


def _keep_earlier_text(old: Path, run: RunFolder) -> None:
    """Keep the conversion's text as training text for when the result is measured."""
    for text in sorted(old.glob("*corpus.safetensors")):
        atomic_write(run.path / f"{EARLIER}{text.name}", text.read_bytes())


def _train(
    recipe: FinetuneRecipe,
    origin: Origin,
    dense: PreTrainedModel | None,
    corpus: Corpus,
    run: RunFolder,
    on_progress: ProgressCallback,
) -> tuple[MoEStudent, BestWeights]:
    moe = load_moe(origin.folder, str(origin.dtype(recipe)).removeprefix("torch."), recipe.device)
    student = MoEStudent(moe, origin.plan, recipe)
    step_fn = FinetuneStep(student, recipe, None if recipe.loss.objective == "lm" else dense)
    learned, train = student.learned, recipe.train
    tokens = train.steps * train.batch_size * train.gradient_accumulation_steps * corpus.train.input_ids.shape[1]
    checked = corpus.evaluation.truncate(min(MOST_CHECKED, tokens // CHECKED_SHARE))
    best = BestWeights(learned, run, train.steps, HeldOutLoss(step_fn, checked), CHECKS)
    # fused, of 106 million weights: 0.06 instead of 0.40 s a step on one core
    training = Training(
        moe, learned, train, recipe.seed, corpus, run, step_fn, fused=True, scales=learned.scales(), best=best,
        find_peak=lambda: peak_rate(recipe, best.start),
    )  # fmt: skip
    run_training(training, "finetune", on_progress)
    return student, best


def peak_rate(recipe: FinetuneRecipe, start: float) -> float:
    """Return the peak learning rate of the recipe; if that is 0, the one for the held-out loss before the first step, in nats."""
    asked = recipe.train.learning_rate
    if asked or recipe.loss.objective == "lm":
        return asked or RATE_OF_TEXT
    return min(MOST_RATE, RATE_OF_KL * start)


def require_improvement_(best: BestWeights, rate: float) -> None:
    """Replace the last weights by the best. Raises UserError if no step was better than the start, at this peak learning rate."""
    if best.improved:
        best.restore_best_()
        return
    reason = "fine-tuning did not make the model better"
    start_over = f"start over with a smaller train.learning_rate than {rate:.2g}, more steps or other text"
    atomic_write(best.run.no_model, f"{reason}; {start_over}")
    raise UserError(
        f"{reason} (loss on held-out text {best.start:.3f} before the first step, more at each of {best.checks} "
        f"checks), so nothing is written, and {best.run.path} keeps the run",
        Advice("force", f"to {start_over}"),
    )


def save(
    student: MoEStudent,
    recipe: FinetuneRecipe,
    origin: Origin,
    corpus: Corpus,
    best: BestWeights,
    rate: float,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    force: bool,
) -> None:
    """Write the result as a converted folder. Its plan belongs to these weights only, so its `source` is their hash; the dense
    model's hash is in its notes."""
    moe, plan = student.finish(__version__, getattr(torch, origin.stored))
    moe.config.tomoe_plan_source = fingerprint(moe)
    t = recipe.train
    note = {
        "weights": recipe.weights,
        **({"routers": recipe.routers} if student.routers else {}),
        "objective": recipe.loss.objective,
        "steps": t.steps,
        "tokens": t.steps * t.batch_size * t.gradient_accumulation_steps * corpus.train.input_ids.shape[1],
        "learning_rate": rate,
        "seed": recipe.seed,
        "kept_step": best.step,
        "held_out_before": best.start,
        "held_out": best.loss,
        "sources": [shown_name(source) for source in corpus.sources],
        "dense": plan.notes.get(FINETUNED, {}).get("dense", plan.source),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tomoe": __version__,
    }
    tuned_plan = replace(plan, source=moe.config.tomoe_plan_source, notes=plan.notes | {FINETUNED: note})
    save_moe(moe, tuned_plan, tokenizer, out, force, check=True)
    if plan.recipe:
        Recipe(**plan.recipe).save(out / "recipe.json")


def measure_improvement(
    recipe: FinetuneRecipe, out: Path, on_progress: ProgressCallback = no_progress, command: str = ""
) -> list[Row]:
    """Compare the dense, the converted and the improved model on the held-out text in `out`; write results and card.

    `command` is what made `out` (default: fine-tuning). Under torchrun every process takes part.
    """
    origin = Origin.of(recipe)

    names = (origin.dense, recipe.model, str(out))
    dtype = "auto" if origin.stored == "bfloat16" else origin.stored
    models = (load_model(name, dtype, recipe.device) for name in names)
    rows = list(compare(names, models, held_out_text([str(out)]), on_progress))
    if distributed.rank():
        return rows
    atomic_write(out / "evaluation.json", to_json(rows))
    command = command or f"tomoe finetune {shown_name(recipe.model)} --recipe run/recipe.json -o {basename(out)}"
    write_card(out, read_plan(out), rows, base_model=origin.dense, command=command)
    return rows
