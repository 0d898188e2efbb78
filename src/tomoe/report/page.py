"""The report of a conversion: one HTML file that needs nothing beside it, for a phone and a screen reader too."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from tomoe.files import write_whole
from tomoe.plan import Plan
from tomoe.report.compare import Row, footnote, table
from tomoe.report.summary import conversion_summary
from tomoe.report.warnings import find_warnings

PAGE = "report.html"


@dataclass(frozen=True)
class Generation:
    """One prompt and how each model went on, as (model, text)."""

    prompt: str
    answers: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class PageFacts:
    """All that the page shows. Empty parts are left out of it."""

    title: str
    plan: Plan
    rows: Sequence[Row] = ()  # from `compare`, dense first; routing is that of the last row which has it
    generations: Sequence[Generation] = ()
    metrics: Sequence[dict[str, Any]] = ()  # rows of metrics.jsonl: step, fidelity, active_fraction
    warnings: Sequence[str] = ()  # beside those of `find_warnings`
    commands: Sequence[tuple[str, str]] = ()  # (command, what it does), to try next


def write_page(out: Path, facts: PageFacts) -> Path:
    """Write OUT/report.html; the same facts give the same bytes. Raises UserError where it cannot be written."""
    template = resources.files("tomoe.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    usage = next((row.usage for row in reversed(facts.rows) if row.usage is not None), None)
    titles, body = table(facts.rows)
    layers = facts.plan.describe()
    head_dim = facts.plan.shape.head_dim
    page = environment.from_string(template).render(
        title=facts.title,
        summary=conversion_summary(facts.plan),
        titles=titles,
        body=body,
        footnote=footnote(facts.rows),
        layers=layers,
        mlp_size=facts.plan.shape.mlp_size,
        head_dim=head_dim,
        slim_attention=any(row["qk_dims"] < head_dim or row["value_dims"] < head_dim for row in layers),
        curves=training_curves(facts.metrics),
        usage=usage,
        highest=max(map(max, usage.shares)) if usage else 1.0,
        generations=facts.generations,
        warnings=[*facts.warnings, *(found.text for found in find_warnings(facts.plan, facts.rows))],
        commands=facts.commands,
    )
    return write_whole(out / PAGE, page)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl; none where there is no file. A last line that a kill cut short is passed over."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def training_curves(metrics: Sequence[dict[str, Any]]) -> Markup | None:
    """An inline SVG: fidelity and sampled active fraction by step; None with fewer than two finite rows."""
    rows = [row for row in metrics if not row.get("skipped") and {"step", "fidelity", "active_fraction"} <= row.keys()]
    if len(rows) < 2:
        return None
    # imported here: it takes longer than all the rest, and most pages of the command line need no figure
    import matplotlib
    from matplotlib.figure import Figure

    steps = [row["step"] for row in rows]
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "tomoe", "font.family": "sans-serif", "font.size": 9}
    unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.2, 4.0), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        upper.plot(steps, [row["fidelity"] for row in rows], color="#1f6f8b", linewidth=1)
        upper.set_ylabel("fidelity loss (nats)")
        upper.set_ylim(bottom=0)
        lower.plot(steps, [row["active_fraction"] for row in rows], color="#b4532a", linewidth=1)
        lower.set_ylabel("active share, sampled")
        lower.set_xlabel("step")
        for axes in (upper, lower):
            axes.grid(alpha=0.3)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=unsaid)
    svg = buffer.getvalue()
    return Markup(svg[svg.index("<svg") :])  # safe: drawn from numbers alone
