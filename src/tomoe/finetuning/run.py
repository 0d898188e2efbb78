"""Fine-tuning a converted model: OUT (a converted folder) -> HEALED (a folder of the same kind, its run in HEALED/run)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import tomoe
from tomoe import distributed
from tomoe.api import compare_on, held_out_text, load_model
from tomoe.conversion import Listener, load_moe, pick_device, run_training, silent, stored_dtype
from tomoe.data.corpus import Corpus, prepare
from tomoe.data.sources import SELF
from tomoe.errors import UserError
from tomoe.evaluation.compare import Row, to_json
from tomoe.files import own_name, sha256, write_whole
from tomoe.finetuning.students import Healing, PseudoMoE, Teacher, TrueMoE, check_adapters
from tomoe.model.loading import fingerprint, load_dense, load_tokenizer, resolve
from tomoe.moe.checkpoint import refuse_overwriting, save_moe
from tomoe.plan import FINETUNED, Plan
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.report.card import write_card
from tomoe.report.summary import shown_name
from tomoe.training import tracking
from tomoe.training.cost import write_cost
from tomoe.training.loop import Training
from tomoe.training.run_folder import RunFolder
from tomoe.training.teacher import TeacherCache, hidden_states


@dataclass(frozen=True)
class Origin:
    """What a converted folder says about itself."""

    folder: Path
    plan: Plan
    stored: str  # dtype of its weights
    dense: str  # the dense model that it came from

    @classmethod
    def of(cls, recipe: FinetuneRecipe) -> Origin:
        """Raises UserError where there is no converted model, or no dense one that it can have come from."""
        if not recipe.model:
            raise UserError("the recipe names no model; give a folder that `tomoe convert` wrote")
        folder = Path(recipe.model)
        stored, plan = stored_dtype(folder), Plan.load(folder)
        dense = recipe.dense or str(plan.recipe.get("model", ""))
        if not dense:
            raise UserError(f"the plan of {folder} names no dense model; name it with --dense")
        try:
            resolve(dense)
        except UserError as error:
            raise UserError(f"the dense model of {folder} is not to be had ({error}); name it with --dense") from None
        if recipe.form == "pseudo" and FINETUNED in plan.notes:
            raise UserError(
                f"{folder} was fine-tuned already, so the dense model under its plan is another model; take form = moe"
            )
        return cls(folder, plan, stored, dense)

    def fingerprint(self) -> str:
        """Of the plan's head, which names the hash of its tensors and that of the dense weights."""
        return sha256(self.folder / "plan.json")

    def dtype(self, recipe: FinetuneRecipe) -> torch.dtype:
        """Of the weights while they run."""
        asked = self.stored if recipe.train.dtype == "stored" else recipe.train.dtype
        return torch.float32 if asked == "float16" else getattr(torch, asked)

    def open_dense(self, recipe: FinetuneRecipe) -> PreTrainedModel:
        """Raises UserError for another model than the one it came from."""
        model = load_dense(self.dense, self.dtype(recipe), pick_device(recipe.device))
        known = self.plan.notes.get(FINETUNED, {}).get("dense", self.plan.source)
        if known and known != (found := fingerprint(model)):
            raise UserError(
                f"{self.folder} did not come from {self.dense}: it was made from other weights (hash {str(known)[:12]}) than "
                f"these (hash {found[:12]}); name the right model with --dense"
            )
        return model


def finetune(
    recipe: FinetuneRecipe, out: Path, resume: bool = False, force: bool = False, listen: Listener = silent
) -> Plan:
    """Train a converted model on, write it to `out` as a converted folder, and return its plan, whose routers learned too.

    The run is kept in OUT/run, so that a killed one goes on with `resume`, bit by bit. Raises UserError for whatever the user
    can mend; what was written before stays.
    """
    run = RunFolder(out / "run", "weights")
    refuse_overwriting(out, force or (resume and run.recipe.exists()), recipe.model)
    goes_on = distributed.first(lambda: run.goes_on(recipe, resume, force))
    tracking.check(recipe.track)
    check_adapters(recipe)
    origin, began = Origin.of(recipe), time.perf_counter()
    dense = None
    if recipe.form == "pseudo" or recipe.loss.objective == "kl" or SELF in recipe.data.sources:
        dense = origin.open_dense(recipe)
    tokenizer = load_tokenizer(str(origin.folder))

    def text() -> Corpus | None:
        return None if goes_on and run.corpus.exists() else _text(recipe, origin, tokenizer, dense, listen)

    # sampling is shared out
    sampled = text() if distributed.size() > 1 and SELF in recipe.data.sources else None
    distributed.first(lambda: _begin(recipe, run, goes_on, origin, sampled or text()))
    corpus = Corpus.load(run.corpus)
    text_ready = time.perf_counter()
    student = _learn(recipe, origin, dense, corpus, run, listen)
    learned = time.perf_counter()

    def finish() -> None:
        save(student, recipe, origin, corpus, tokenizer, out, force or goes_on)
        write_cost(run.path / "cost.json", recipe.train, student.model, corpus, (began, text_ready, learned), goes_on)

    distributed.first(finish)
    return Plan.load(out)


def _text(
    recipe: FinetuneRecipe, origin: Origin, tokenizer: PreTrainedTokenizerBase, dense: PreTrainedModel | None,
    listen: Listener,
) -> Corpus:  # fmt: skip
    """What the recipe names, else what the conversion kept."""
    if recipe.data.sources:
        return prepare(recipe.data, tokenizer, recipe.seed, dense, lambda i, n: listen("text", i, n, {}))
    kept = origin.folder / "run" / "corpus.safetensors"
    if not kept.is_file():
        raise UserError(f"{origin.folder} keeps no text (run/corpus.safetensors); name some with --data")
    return Corpus.load(kept)


def _begin(recipe: FinetuneRecipe, run: RunFolder, goes_on: bool, origin: Origin, corpus: Corpus | None) -> None:
    """The folder of the run; nothing of an older run goes before the text turned out to be of use."""
    if goes_on:
        run.check_origin(origin.fingerprint(), str(origin.folder))
    if corpus is None:
        return
    run.begin(recipe, goes_on, origin.fingerprint())
    # what the conversion learned from counts as training text when the result is measured
    for old in run.path.glob("earlier-*"):
        old.unlink()
    for text in sorted((origin.folder / "run").glob("*corpus.safetensors")):
        write_whole(run.path / f"earlier-{text.name}", text.read_bytes())
    corpus.save(run.corpus)


def _learn(
    recipe: FinetuneRecipe, origin: Origin, dense: PreTrainedModel | None, corpus: Corpus, run: RunFolder,
    listen: Listener,
) -> TrueMoE | PseudoMoE:  # fmt: skip
    student, taught = make_student(recipe, origin, dense)
    training = Training(student.model, student.learned, recipe, corpus, run, Healing(student, recipe, taught))
    run_training(training, recipe, "finetune", listen)
    return student


def make_student(
    recipe: FinetuneRecipe, origin: Origin, dense: PreTrainedModel | None
) -> tuple[TrueMoE | PseudoMoE, Teacher | None]:
    """What learns, and who teaches it: nobody where the loss is that of the text alone."""
    kept = recipe.train.teacher_cache
    states = TeacherCache(Path(kept), dense) if kept and dense is not None else hidden_states
    student: TrueMoE | PseudoMoE
    adapters = None
    if recipe.form == "moe":
        moe = load_moe(origin.folder, str(origin.dtype(recipe)).removeprefix("torch."), recipe.device)
        student = TrueMoE(moe, origin.plan, recipe)
    else:
        assert dense is not None
        # beside adapters the dense weights stay, and can teach; else it takes a second copy
        alone = recipe.weights == "lora" or recipe.loss.objective == "lm"
        student = PseudoMoE(dense if alone else origin.open_dense(recipe), origin.plan, recipe)
        adapters = student.adapters
    if recipe.loss.objective == "lm":
        return student, None

    def taught(ids: Tensor, mask: Tensor) -> Tensor:
        assert dense is not None
        if adapters is None:
            return states(dense, ids, mask)
        with adapters.disable_adapter():
            return states(dense, ids, mask)

    return student, taught


def save(
    student: TrueMoE | PseudoMoE, recipe: FinetuneRecipe, origin: Origin, corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase, out: Path, force: bool,
) -> None:  # fmt: skip
    """Write the result as a converted folder.

    Its plan keeps the neuron sets and has the routers as they are now. It belongs to the weights in this folder and no
    others, so its `source` is their hash; that of the dense model stands in its notes.
    """
    moe, layers = student.finish(tomoe.__version__)
    for name, p in moe.named_parameters():
        if "router." not in name:
            p.data = p.data.to(getattr(torch, origin.stored))
    moe.config.plan_source = fingerprint(moe)
    t, plan = recipe.train, origin.plan
    told = {
        "form": recipe.form, "weights": recipe.weights, "routers": recipe.routers, "objective": recipe.loss.objective,
        "steps": t.steps, "tokens": t.steps * t.batch_size * t.gradient_accumulation * corpus.train.input_ids.shape[1],
        "learning_rate": t.learning_rate, "seed": recipe.seed,
        "sources": [shown_name(source) for source in corpus.sources],
        "dense": plan.notes.get(FINETUNED, {}).get("dense", plan.source),
        "torch": torch.__version__, "transformers": transformers.__version__, "tomoe": tomoe.__version__,
    }  # fmt: skip
    made = replace(plan, layers=tuple(layers), source=moe.config.plan_source, notes=plan.notes | {FINETUNED: told})
    save_moe(moe, made, tokenizer, out, force)
    if plan.recipe:
        Recipe(**plan.recipe).save(out / "recipe.json")


def measure(recipe: FinetuneRecipe, out: Path, listen: Listener = silent) -> list[Row]:
    """The dense model, the converted one and the fine-tuned one on text that fine-tuning held out; writes numbers and card.

    Under torchrun every process takes part.
    """
    origin = Origin.of(recipe)

    def models() -> Iterator[tuple[str, PreTrainedModel]]:
        for name in (origin.dense, recipe.model, str(out)):
            yield name, load_model(name, origin.stored, recipe.device)

    rows = compare_on(models(), held_out_text([str(out)]), listen)
    if distributed.rank():
        return rows
    write_whole(out / "evaluation.json", to_json(rows))
    command = f"tomoe finetune {shown_name(recipe.model)} --recipe run/recipe.json -o {own_name(out)}"
    write_card(out, Plan.load(out), rows, base_model=origin.dense, command=command)
    return rows
