"""Measure a conversion and its dense model and write the report: evaluation.json, README.md, report.html, figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on only

from tomoe import distributed
from tomoe.data.evaluation_text import OFFLOADED_TOKENS, held_out_text
from tomoe.evaluation.compare import compare
from tomoe.evaluation.results import ACTIVE_CURVE, Count, Name, NotNegative, Row, checked, read_rows, to_json
from tomoe.evaluation.speed.timings import Cell
from tomoe.evaluation.writing.run import LOOP_LENGTH, TOPICS, LoopTask, Variety, write
from tomoe.files import atomic_write, read_json, sha256
from tomoe.model.base_weights import BaseWeights
from tomoe.model.loading import load_model, load_tokenizer
from tomoe.model.shape import max_positions
from tomoe.plans import read_plan
from tomoe.progress import ProgressCallback, no_progress, stage_callback
from tomoe.recipe.conversion import Recipe
from tomoe.report.card import write_card
from tomoe.report.figures import all_figures
from tomoe.report.page import Generation, write_page
from tomoe.report.style import save
from tomoe.report.words import words_of
from tomoe.training.run_folder import RunFolder

FORMAT = "tomoe-report-2"  # of the first, texts of the form inputs were the dense model's
WRITTEN, SHOWN = 8, 3  # texts that each model writes, and those that the page shows
# On a CPU, where all texts of a 0.5B took minutes: those that are shown, half as long, and from SLOW weights on a quarter.
SLOW = 1e9


@dataclass(frozen=True)
class Observed:
    """report.json: what the models generated."""

    format: str
    plan: str  # sha256 of the plan's last file
    generations: list[Generation]
    varieties: list[Variety] = field(default_factory=list)  # of what both models wrote, loops among it


class Cost(TypedDict, total=False):
    """cost.json of a run, as far as the report shows it."""

    seconds: dict[Name, NotNegative]
    tokens: dict[Name, Count]
    peak_memory_bytes: Count | None
    device_peak_memory_bytes: Count | None
    device: Name
    threads: Count
    resumed: bool


def write_reports(
    out: Path, on_progress: ProgressCallback = no_progress, dense: PreTrainedModel | None = None, again: bool = True
) -> tuple[list[Row], list[Generation]]:
    """Measure a conversion and its dense model (`dense`, if loaded) on the held-out text, and generate with both; write
    evaluation.json, README.md and report.html. With `again` false, earlier measurements of this plan are used. Process 0 writes,
    and returns the generated texts, too. Raises UserError if `out` holds no conversion or damaged files, or cannot be written."""
    plan = read_plan(out)
    recipe = Recipe.load(out / "recipe.json")
    rows, observed = ([], None) if again else _kept(out)
    if observed is None:
        rows, observed = _measure(out, recipe, dense, on_progress)
    if distributed.rank() or observed is None:
        return rows, []
    write_card(out, plan, rows)
    curve = read_rows(out, ACTIVE_CURVE)
    figures = all_figures(plan, RunFolder(out / "run").rows(), curve)
    for figure in figures:
        save(figure, out / "figures")
    write_page(
        out,
        f"{rows[0].name} as {words_of(plan).product}, {plan.active_fraction():.0%} active",
        plan,
        rows=rows,
        generations=observed.generations,
        figures=figures,
        cost=_read(out / "run" / "cost.json", Cost),
        cells=_read(out / "benchmark.json", list[Cell], "cells") or (),
        curve=curve,
        varieties=observed.varieties,
    )
    return rows, observed.generations


def _measure(
    out: Path, recipe: Recipe, dense: PreTrainedModel | None, on_progress: ProgressCallback
) -> tuple[list[Row], Observed | None]:
    """Measure both models and write the results; processes other than 0 write nothing."""
    # a base that was sharded is too large for one GPU
    device = "cpu" if recipe.train.shard else recipe.device
    dense = dense if dense is not None else load_model(recipe.model, recipe.train.dtype, device, recipe.offload)
    moe = load_model(str(out), recipe.train.dtype, device, recipe.offload)
    tokenizer = load_tokenizer(str(out))
    base = BaseWeights.of(recipe)
    dense, moe = base.to_compute_dtype_(dense), base.to_compute_dtype_(moe)
    text = held_out_text([str(out)])
    if recipe.offload:
        text = replace(text, sequences=text.sequences.truncate(OFFLOADED_TOKENS))
    rows = list(compare([recipe.model, str(out)], [dense, moe], text, on_progress))
    if distributed.rank():
        return rows, None
    observed = Observed(FORMAT, _plan_hash(out), [])
    # every token of a text that is written would read all weights from disk
    if not recipe.offload:
        observed = _write_texts(out, [row.name for row in rows], (dense, moe), tokenizer, on_progress)
    atomic_write(out / "evaluation.json", to_json(rows))
    atomic_write(out / "report.json", json.dumps(observed, default=vars, ensure_ascii=False) + "\n")
    return rows, observed


def _write_texts(
    out: Path,
    names: Sequence[str],
    models: tuple[PreTrainedModel, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    on_progress: ProgressCallback,
) -> Observed:
    """Generate with both models."""
    task = _text_task(models[0])
    written = []
    for name, model in zip(names, models, strict=True):
        progress = stage_callback(on_progress, f"generating with {name}")
        written.append(write(model, tokenizer, task.prompts, task.length, progress=progress))
    generations = [
        Generation(
            prompt.question if written[0].chat else prompt.opening,
            [(name, own.texts[n]) for name, own in zip(names, written, strict=True)],
        )
        for n, prompt in enumerate(task.prompts[:SHOWN])
    ]
    varieties = [task.variety(name, own) for name, own in zip(names, written, strict=True)]
    return Observed(FORMAT, _plan_hash(out), generations, varieties)


def _kept(out: Path) -> tuple[list[Row], Observed | None]:
    """Return earlier measurements of the plan in `out`; empty without any, or for another plan or version."""
    path = out / "report.json"
    if not path.exists():
        return [], None
    values = read_json(path)
    rows = read_rows(out)
    if not rows or (values.get("format"), values.get("plan")) != (FORMAT, _plan_hash(out)):
        return [], None
    return rows, checked(path, Observed, values)


def _plan_hash(out: Path) -> str:
    """SHA-256 of plan.safetensors, or of plan.json, which is all of a plan whose tokens choose inputs."""
    tensors = out / "plan.safetensors"
    return sha256(tensors if tensors.is_file() else out / "plan.json")


def _read(path: Path, kind: type[Any], key: str = "") -> Any:
    """Read a file's values, or those of a key, as a `kind`; None without the file. Raises UserError if it is damaged."""
    if not path.exists():
        return None
    values = read_json(path)
    return checked(path, kind, values.get(key) if key else values)


def _text_task(model: PreTrainedModel) -> LoopTask:
    """Return the texts to generate: at most a quarter of the context, fewer and shorter ones if tokens are slow."""
    texts, length = WRITTEN, LOOP_LENGTH
    if model.device.type == "cpu":
        texts = SHOWN
        length //= 4 if model.num_parameters() > SLOW else 2
    positions = max_positions(model.config) or 4 * length
    return LoopTask(TOPICS[:texts], min(length, max(1, positions // 4)))
