"""Several methods at several budgets on one text, each compared with the dense model; results are saved at once."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.data.corpus import Corpus, prepare_corpus
from tomoe.data.evaluation_text import CONTEXT, EvaluationText, load_text
from tomoe.errors import UserError
from tomoe.evaluation.perplexity import Predictions, measure
from tomoe.evaluation.results import Measurement, checked
from tomoe.files import atomic_write, read_json, sha256
from tomoe.folders import refuse_foreign_file
from tomoe.methods.base import Task
from tomoe.methods.registry import file_of, resolve_method
from tomoe.model.base_weights import BaseWeights
from tomoe.model.loading import fingerprint, load_tokenizer
from tomoe.moe.fold import fold
from tomoe.pipeline import steps
from tomoe.plans import AnyPlan, Plan
from tomoe.plans.repair.plan import forget_repair, repair_plan
from tomoe.progress import ProgressCallback, no_progress, stage_callback
from tomoe.recipe.conversion import Recipe
from tomoe.report.figures import MethodPoint, methods_figure
from tomoe.report.style import save
from tomoe.training.run_folder import RunFolder

FORMAT = "tomoe-methods-2"
FILE = "comparison.json"
_VARIANT = re.compile(r"(?P<method>[^\[\]]+)(\[(?P<keys>[^\[\]]*)\])?")


@dataclass(frozen=True)
class Entry:
    """One method at one budget."""

    method: str  # as it was named, with its settings
    active: float  # the budget: decoder parameters of a token, as a share
    active_share: float  # what the plan has of it, routers included
    repaired: bool
    seconds: float  # that the plan took, and its repair if it has one
    measurement: Measurement


def variant(name: str) -> tuple[str, dict[str, Any]]:
    """Parse a method with recipe keys: `carve[experts.num_experts=16,seed=1]` names both. Raises UserError for anything else."""
    found = _VARIANT.fullmatch(name.strip())
    pairs = [pair.partition("=") for pair in (found["keys"] or "").split(",") if pair] if found else []
    if found is None or not all(equals for _, equals, _ in pairs):
        raise UserError(f"{name!r} should read METHOD or METHOD[key=value,key=value]")
    return found["method"], {key.strip(): _value(text) for key, _, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@distributed.locks_out("compare")
def compare_methods(
    recipe: Recipe,
    out: Path,
    methods: Sequence[str],
    active: Sequence[float],
    *,
    repairs: Sequence[bool] = (False, True),
    text: str | None = None,
    tokens: int | None = None,
    on_progress: ProgressCallback = no_progress,
) -> list[Entry]:
    """Measure methods at several active fractions, with and without repair, against the dense model of a recipe.

    Args:
        recipe: the model, the text that all methods calibrate on, and all else that they have in common.
        out: folder for comparison.json, comparison.md, a figure, and one file for each entry: what was measured before on the
            same text and settings is not measured again.
        methods: names, each perhaps with recipe keys of its own: `carve[experts.num_experts=16]`.
        active: fractions of the decoder parameters.
        repairs: whether plans are measured as they are, repaired, or both. Plans without experts are never repaired.
        text: what to evaluate on (default: what the recipe holds out), at most `tokens` tokens of it.

    Returns one `Entry` for the dense model, then one for each measurement. Raises UserError for whatever the user can fix.
    """
    variants = {name: variant(name) for name in methods}
    # all of them are wrong, or right, before anything runs
    planned = {
        (name, share): resolve_method(_changed(recipe, method, keys | {"active": share}))
        for name, (method, keys) in variants.items()
        for share in active
    }
    refuse_foreign_file(out / FILE, FORMAT)
    base = BaseWeights.of(recipe)
    dense, tokenizer = base.for_training(), load_tokenizer(recipe.model)
    # a file that cannot be read is found before the long preparation
    measured_on = None if text is None else load_text(text, tokenizer, CONTEXT, tokens)
    corpus = prepare_corpus(recipe.data, tokenizer, recipe.seed, dense, stage_callback(on_progress, "text"))
    measured_on = measured_on or EvaluationText(corpus.evaluation, "held out")
    bench = _Bench(out, dense, fingerprint(dense), corpus, measured_on, on_progress)
    entries = [bench.dense_entry()]
    for (name, share), (method, resolved) in planned.items():
        wanted = [repaired for repaired in repairs if not repaired or resolved.repair.mode != "none"]
        missing = [repaired for repaired in wanted if bench.kept(name, resolved, repaired) is None]
        if missing:
            bench.run(name, share, method, resolved, missing)
        found = (bench.kept(name, resolved, repaired) for repaired in wanted)
        entries += [entry for entry in found if entry is not None]
    _write(out, entries)
    return entries


def _changed(recipe: Recipe, method: str, keys: Mapping[str, Any]) -> Recipe:
    return recipe.changed([f"{key}={json.dumps(value)}" for key, value in {"method.name": method, **keys}.items()])


@dataclass(frozen=True)
class _Bench:
    """One dense model with its texts, the reference of every entry."""

    out: Path
    dense: PreTrainedModel
    source: str
    corpus: Corpus
    text: EvaluationText
    on_progress: ProgressCallback

    def __post_init__(self) -> None:
        # the dense model runs once
        object.__setattr__(self, "reference", Predictions(self.dense, keep=True))

    def dense_entry(self) -> Entry:
        measured = self._measure(self.reference, "dense", None)  # type: ignore[attr-defined]
        return Entry("dense", 1.0, 1.0, False, 0.0, measured)

    def _measure(self, model: Any, name: str, reference: Predictions | None) -> Measurement:
        sequences, progress = self.text.sequences, stage_callback(self.on_progress, f"evaluating {name}")
        ids, mask = sequences.input_ids, sequences.mask
        return measure(model, ids, mask, reference, progress, name=name, data=self.text.name, seed=self.corpus.seed)

    def _file(self, name: str, recipe: Recipe, repaired: bool) -> tuple[Path, str]:
        """Return the file of an entry, and the key of everything that it depends on."""
        key = self._key(recipe, self.text.sequences.input_ids.tolist(), repaired)
        return self.out / "entries" / f"{_title(name, recipe)}{'-repaired' * repaired}.json", key

    def _key(self, recipe: Recipe, *more: object) -> str:
        """Hash what a plan depends on, and more; for a method in a file, its contents."""
        own = file_of(recipe.method.name)
        made = (FORMAT, recipe.digest(), own and sha256(own), self.source, self.corpus.digest())
        return hashlib.sha256(repr((*made, *more)).encode()).hexdigest()

    def kept(self, name: str, recipe: Recipe, repaired: bool) -> Entry | None:
        """Return an earlier measurement; None if there is none, or with other settings."""
        path, key = self._file(name, recipe, repaired)
        values = read_json(path) if path.is_file() else {}
        return checked(path, Entry, values["entry"]) if values.get("key") == key else None

    def run(self, name: str, active: float, method: Any, recipe: Recipe, repairs: Sequence[bool]) -> None:
        """Make the plan of a method once, and measure it as it is, repaired, or both."""
        label = f"{name} at {active:.0%}"
        # in a folder of its own, so that no plan of other settings, texts or code is taken for this one
        run = RunFolder(self.out / "runs" / f"{_title(name, recipe)}-{self._key(recipe)[:12]}")
        resumes = run.recipe.is_file() and not Recipe.load(run.recipe).differences(recipe)
        run.begin(recipe, resumes, self.source)
        task = Task(self.dense, recipe, self.corpus, run, on_progress=self.on_progress)
        start = time.perf_counter()
        plan = steps.kept_plan(run) if resumes else None
        if plan is None:
            plan = steps.with_origin(method.plan(task), method, task)
            plan = replace(plan, notes=plan.notes | {"seconds": time.perf_counter() - start})
            steps.keep_plan(run, plan)
        for repaired in repairs:
            start = time.perf_counter()
            used = self._repaired(plan, recipe, run) if repaired else plan
            seconds = plan.notes["seconds"] + (time.perf_counter() - start if repaired else 0.0)
            measured = self._measure(fold(self.dense, used), label, self.reference)  # type: ignore[attr-defined]
            entry = Entry(name, active, plan.active_fraction(), repaired, seconds, measured)
            path, key = self._file(name, recipe, repaired)
            atomic_write(path, json.dumps({"format": FORMAT, "key": key, "entry": asdict(entry)}, indent=2) + "\n")
        forget_repair(run.path)

    def _repaired(self, plan: AnyPlan, recipe: Recipe, run: RunFolder) -> AnyPlan:
        assert isinstance(plan, Plan)
        text, device = self.corpus.fitting_text(recipe.repair.tokens), self.dense.device
        ids, mask = text.input_ids.to(device), text.mask.to(device)
        return repair_plan(plan, self.dense, ids, mask, recipe.repair, self.on_progress, run.path)


def _title(name: str, recipe: Recipe) -> str:
    """Name the files of one method at one budget."""
    return re.sub(r"[^A-Za-z0-9.=]+", "-", f"{Path(name).name}-{recipe.active:g}").strip("-")


def to_markdown(entries: Sequence[Entry]) -> str:
    """Render the table of a comparison."""
    first = entries[0].measurement
    lines = [
        "| method | active | repaired | KL (nats) | perplexity | same top-1 | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        m = entry.measurement
        kl, top1 = ("" if n is None else s.format(n) for n, s in ((m.kl, "{:.3f}"), (m.top1_agreement, "{:.3f}")))
        lines.append(
            f"| {entry.method} | {entry.active_share:.1%} | {'yes' * entry.repaired} "
            f"| {kl} | {m.perplexity:.2f} | {top1} | {entry.seconds / 60:.1f} |"
        )
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    note = (
        f"Text: {first.data}, {first.blocks} sequences of {first.context_length} tokens, {first.tokens:,} predicted; KL and "
        f"same top-1 are against the dense model; {first.dtype} on {first.device}; {versions}."
    )
    return "\n".join([*lines, "", note]) + "\n"


def _write(out: Path, entries: Sequence[Entry]) -> None:
    values = {"format": FORMAT, "entries": [asdict(entry) for entry in entries]}
    atomic_write(out / FILE, json.dumps(values, indent=2, allow_nan=False) + "\n")
    atomic_write(out / "comparison.md", to_markdown(entries))
    points = [
        MethodPoint(entry.method, entry.active_share, entry.measurement.kl, entry.repaired)
        for entry in entries
        if entry.measurement.kl is not None
    ]
    if points:
        save(methods_figure(points), out)
