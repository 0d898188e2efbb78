"""The report of a conversion: one self-contained HTML file, also for phones and screen readers."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tomoe.evaluation.results import Row
from tomoe.evaluation.speed import timings
from tomoe.evaluation.speed.timings import Cell
from tomoe.evaluation.tables import count, footnote, table, task_footnote, task_table
from tomoe.evaluation.writing.run import Variety
from tomoe.files import atomic_write, basename, format_bytes
from tomoe.plans import AnyPlan
from tomoe.recipe.conversion import Recipe
from tomoe.report.html import render, svg_uri, template
from tomoe.report.style import CaptionedFigure
from tomoe.report.summary import conversion_summary, recipe_of, self_sampled, shown_name
from tomoe.report.warnings import find_warnings
from tomoe.report.words import words_of
from tomoe.version import __version__

PAGE = "report.html"
DOES = {"decode": "writing a token", "compiled decode": "writing a token, compiled,", "prefill": "reading a prompt"}


@dataclass(frozen=True)
class Generation:
    """One prompt and the continuation of each model, as (model, text)."""

    prompt: str
    answers: Sequence[tuple[str, str]]


def write_page(
    out: Path,
    title: str,
    plan: AnyPlan,
    *,
    rows: Sequence[Row] = (),  # from `compare`, dense first
    generations: Sequence[Generation] = (),
    figures: Sequence[CaptionedFigure] = (),
    cost: Mapping[str, Any] | None = None,  # the run's cost.json
    cells: Sequence[Cell] = (),  # of benchmark.json
    curve: Sequence[Row] = (),  # the dense model, then the same folder with several numbers of experts
    varieties: Sequence[Variety] = (),  # loops in what each model wrote
) -> Path:
    """Write OUT/report.html, without the parts that have no data; deterministic. Raises UserError if it cannot be written."""
    words = words_of(plan)
    recipe = recipe_of(plan)
    known = {"Dense weights": plan.source, "Recipe": recipe and recipe.digest()}
    hashes = [(name, f"sha256 {digest[:16]}") for name, digest in known.items() if digest]
    page = render(
        "page.html.j2",
        title=title,
        verdict=[lost(rows, varieties), gained(rows, cells)],
        benchmark=None if cells else _benchmark_command(out, recipe),
        warnings=[warning.text for warning in find_warnings(plan, rows)],
        speed=timings.table(cells),
        speed_footnote=timings.MEANING,
        figures={figure.name: figure for figure in figures},
        comparison=table(rows),
        footnote=footnote(rows),
        tasks=task_table(rows),
        task_footnote=task_footnote(rows),
        curve=table(curve),
        curve_footnote=footnote(curve),
        loops=loops_sentence(varieties) if len(varieties) > 1 else "",
        generations=generations,
        method=svg_uri(template(words.drawing)),
        drawn=words.drawn,
        summary=[*conversion_summary(plan), *hashes, *_cost(cost or {})],
        version=__version__,
    )
    return atomic_write(out / PAGE, page)


def _cost(cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    seconds = cost.get("seconds", {})
    tokens = cost.get("tokens", {})
    device = cost.get("device")
    stages = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    time = f"{duration(sum(seconds.values()))} ({stages})" if seconds else "not known"
    used = cost.get("threads") if device == "cpu" else None
    threads = f" with {used} thread{'s' * (used != 1)}" if used else ""
    resumed = "; only what came after the run was last resumed is counted" if cost.get("resumed") else ""
    lines = [
        ("Took", f"{time} on {device or 'an unknown device'}{threads}{resumed}" if cost else ""),
        ("Tokens", ", ".join(f"{count:,} of {name}" for name, count in tokens.items())),
    ]
    peaks = [("Peak memory", "peak_memory_bytes"), ("Peak device memory", "device_peak_memory_bytes")]
    return [line for line in lines if line[1]] + [
        (name, format_bytes(cost[key])) for name, key in peaks if cost.get(key)
    ]


def duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _benchmark_command(out: Path, recipe: Recipe | None) -> str:
    name = shlex.quote(basename(out))
    dense = shlex.quote((recipe and shown_name(recipe.model)) or "DENSE")
    return f"tomoe benchmark {dense} {name} --json {name}/benchmark.json\ntomoe report {name}"


def lost(rows: Sequence[Row], varieties: Sequence[Variety] = ()) -> str:
    """Say what the last model does worse than the first, the dense one, or that it was not measured."""
    if len(rows) < 2:
        return "Quality was not measured."
    dense, moe = rows[0].measurement, rows[-1].measurement
    change = moe.perplexity / dense.perplexity - 1
    text = " on text that the dense model wrote itself" if self_sampled(moe.data) else ""
    rating = "Lost: perplexity" if change > 0 else "Perplexity is no worse:"
    worse = [f"{rating} {moe.perplexity:.2f} instead of {dense.perplexity:.2f} ({change:+.1%}){text}"]
    if moe.top1_agreement is not None:
        worse.append(f"a different most likely next token at {1 - moe.top1_agreement:.0%} of the positions")
    before = {(score.task, score.metric): score.value for score in rows[0].tasks}
    for score in rows[-1].tasks:
        value = before.get((score.task, score.metric))
        if value is not None:
            worse.append(f"{score.task} {score.value:.1%} instead of {value:.1%}")
    if len(varieties) > 1:
        worse.append(loops_sentence(varieties))
    return f"{'; '.join(worse)}."


def loops_sentence(varieties: Sequence[Variety]) -> str:
    """Say how many of its texts end in a loop, and of those of the dense model, which is first."""
    dense, moe = varieties[0], varieties[-1]
    return f"{moe.looped} of the {moe.texts} texts that it wrote end in a loop (dense model: {dense.looped})"


def gained(rows: Sequence[Row], cells: Sequence[Cell]) -> str:
    """Say what it saves: time for the fewest sequences timed, and active weights."""
    parts = [_speed(cell) for cell in _smallest(cells)] or ["Speed was not measured: the commands below do it."]
    if len(rows) > 1:
        dense, moe = rows[0].facts, rows[-1].facts
        parts.append(
            f"{count(moe['active_params'])} of its {count(moe['total_params'])} weights work on a token; of the dense model "
            f"all {count(dense['active_params'])} do."
        )
    return " ".join(parts)


def _smallest(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cell with the fewest sequences of each phase; decoding comes first."""
    phases = sorted(dict.fromkeys(cell.phase for cell in cells), key=lambda phase: phase == "prefill")
    return [min((cell for cell in cells if cell.phase == phase), key=lambda cell: cell.batch) for phase in phases]


def _speed(cell: Cell) -> str:
    rating = {"faster": "Gained", "SLOWER": "Slower", "even": "Neither gained nor lost"}[cell.verdict]
    sequences = "1 sequence" if cell.batch == 1 else f"{cell.batch} sequences"
    threads = f", {cell.threads} thread{'s' * (cell.threads != 1)}" if cell.device == "cpu" else ""
    choice = "" if cell.choice_ratio is None else f"; {cell.choice_ratio:.2f} by the choice, the rest by the kernel"
    return (
        f"{rating}: {DOES.get(cell.phase, cell.phase)} is {cell.ratio:.2f} times as fast as with the dense model "
        f"({sequences} of {cell.prompt} tokens, {cell.dtype}, {cell.device}{threads}{choice})."
    )
