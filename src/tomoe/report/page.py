"""The report of a conversion: one HTML file that needs nothing beside it, for a phone and a screen reader too."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tomoe.evaluation.results import Row
from tomoe.evaluation.speed import timings
from tomoe.evaluation.speed.timings import Cell
from tomoe.evaluation.tables import footnote, table, task_footnote, task_table
from tomoe.evaluation.writing.loops import Variety
from tomoe.files import atomic_write, basename, format_bytes
from tomoe.plan import AnyPlan
from tomoe.report import verdict
from tomoe.report.html import render, svg_uri, template
from tomoe.report.style import CaptionedFigure
from tomoe.report.summary import conversion_summary, recipe_of, shown_name
from tomoe.report.warnings import find_warnings
from tomoe.report.words import WORDS
from tomoe.version import __version__

PAGE = "report.html"


@dataclass(frozen=True)
class Generation:
    """One prompt and the continuation of each model, as (model, text)."""

    prompt: str
    answers: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class PageFacts:
    """All that the page shows. Parts that are empty here are left out of it."""

    title: str
    plan: AnyPlan
    rows: Sequence[Row] = ()  # from `compare`, dense first
    generations: Sequence[Generation] = ()
    figures: Sequence[CaptionedFigure] = ()
    cost: Mapping[str, Any] = field(default_factory=dict)  # the run's cost.json
    cells: Sequence[Cell] = ()  # of benchmark.json
    dial: Sequence[Row] = ()  # the dense model, then the same folder with several numbers of experts
    varieties: Sequence[Variety] = ()  # loops in what each model wrote


def write_page(out: Path, facts: PageFacts) -> Path:
    """Write OUT/report.html; the same facts give the same bytes. Raises UserError if it cannot be written."""
    words = WORDS[facts.plan.form]
    recipe = recipe_of(facts.plan)
    known = {"Dense weights": facts.plan.source, "Recipe": recipe and recipe.digest()}
    hashes = [(name, f"sha256 {digest[:16]}") for name, digest in known.items() if digest]
    page = render(
        "page.html.j2",
        title=facts.title,
        verdict=[verdict.lost(facts.rows, facts.varieties), verdict.gained(facts.rows, facts.cells)],
        benchmark=None if facts.cells else _benchmark_command(out, facts.plan),
        warnings=[warning.text for warning in find_warnings(facts.plan, facts.rows)],
        speed=timings.table(facts.cells),
        speed_footnote=timings.MEANING,
        figures={figure.name: figure for figure in facts.figures},
        comparison=table(facts.rows),
        footnote=footnote(facts.rows),
        tasks=task_table(facts.rows),
        task_footnote=task_footnote(facts.rows),
        dial=table(facts.dial),
        dial_footnote=footnote(facts.dial),
        loops=verdict.loops(facts.varieties) if len(facts.varieties) > 1 else "",
        generations=facts.generations,
        method=svg_uri(template(words.drawing)),
        drawn=words.drawn,
        summary=[*conversion_summary(facts.plan), *hashes, *_cost(facts.cost)],
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
    resumed = "; only what came after the last --resume is counted" if cost.get("resumed") else ""
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


def _benchmark_command(out: Path, plan: AnyPlan) -> str:
    recipe = recipe_of(plan)
    name = shlex.quote(basename(out))
    dense = shlex.quote((recipe and shown_name(recipe.model)) or "DENSE")
    return f"tomoe benchmark {dense} {name} --json {name}/benchmark.json\ntomoe report {name}"
