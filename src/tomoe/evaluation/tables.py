"""Rows as tables: titles and cells, Markdown, and the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tomoe.evaluation.results import LOOP_METRIC, TOKENS_PER_S, Row, Span, TaskScore
from tomoe.files import format_bytes

NONE = "-"
# in every file that `to_markdown` writes
MARK = "Active params are all decoder parameters that work on a token, as a share of the dense model's"
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "\n": " ", "\r": " "})


def escape_markdown(text: str) -> str:
    """Escape text to one line of Markdown without HTML, links or table cells."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", text.translate(_ENTITIES))


def count(number: int) -> str:
    """Format 134,515,008 as 134.5 M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)


def cells(row: Row) -> dict[str, str]:
    """Return one row of every table, by column title."""
    m = row.measurement
    f = row.facts
    error = "" if m.standard_error is None else f" ± {m.standard_error:.2f}"
    return {
        "model": row.name,
        "active params": NONE if f["active_share"] is None else f"{f['active_share']:.1%}",
        "active / all weights": f"{count(f['active_params'])} / {count(f['total_params'])}",
        "perplexity": f"{m.perplexity:.2f}{error}",
        "KL (nats)": NONE if m.kl is None else f"{m.kl:.4f}",
        "same top-1": NONE if m.top1_agreement is None else f"{m.top1_agreement:.1%}",
        "tokens": f"{m.tokens:,}",
        "context": f"{m.context_length:,}",
        "on disk": NONE if f["bytes_on_disk"] is None else format_bytes(f["bytes_on_disk"]),
    }


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells; empty columns are left out."""
    all_cells = [cells(row) for row in rows]
    titles = [title for title in (all_cells[0] if all_cells else {}) if any(row[title] != NONE for row in all_cells)]
    return titles, [[row[title] for title in titles] for row in all_cells]


def footnote(rows: Sequence[Row]) -> str:
    """Describe what is needed for the same numbers: text, seed, dtype, device, versions; and whether rows are comparable."""
    if not rows:
        return ""
    first = rows[0].measurement
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    parts = [
        f"Text: {first.data or 'not named'} (sha256 {first.data_sha256[:12]})"
        + ("" if first.seed is None else f", seed {first.seed}")
        + f", {first.blocks} sequence{'s' * (first.blocks != 1)} of {first.context_length} tokens (the context)"
        + ("" if first.stride is None else f", each starting {first.stride} tokens after the one before")
        + f", {first.tokens:,} of them predicted",
        "" if first.standard_error is None else "± is one standard error, with sequences as independent units",
        "KL and same top-1 are against the first model" if len(rows) > 1 else "",
        MARK,
        "; ".join(dict.fromkeys(f"{row.measurement.dtype} on {row.measurement.device}" for row in rows)),
        versions,
    ]
    if len({row.measurement.data_sha256 for row in rows}) > 1:
        parts.append("ATTENTION: the rows were measured on different texts and cannot be compared")
    return ". ".join(part for part in parts if part) + "."


def position_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells: a line per span of positions, a column per model. Empty if sequences are short."""
    ends = [span.end for span in rows[0].measurement.spans] if rows else []
    if any([span.end for span in row.measurement.spans] != ends for row in rows):
        return [], []

    def cell(span: Span) -> str:
        return f"{span.perplexity:.2f}" + ("" if span.kl is None else f", KL {span.kl:.4f}")

    body = [
        [f"{first:,} to {end:,}", *(cell(row.measurement.spans[i]) for row in rows)]
        for i, (first, end) in enumerate(pairwise([0, *ends]))
    ]
    return ["position", *(row.name for row in rows)] if body else [], body


POSITIONS = "Perplexity, and KL to the first model, by the position of the predicted token in its sequence."


def task_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells: a line per task, a column per model, their means last. Empty without tasks."""
    tasks = list({(s.task, s.shots, s.metric): None for row in rows for s in row.tasks})
    averaged = [task for task in tasks if task[2] != LOOP_METRIC]
    by_model = [{(s.task, s.shots, s.metric): s for s in row.tasks} for row in rows]
    body = [
        [task[0], str(task[1]), task[2].replace("_", " "), *(_share(scores.get(task)) for scores in by_model)]
        for task in tasks
    ]
    if len(averaged) > 1:
        means = [[scores[task] for task in averaged if task in scores] for scores in by_model]
        body.append(["mean", "", "", *(_mean(m) if len(m) == len(averaged) else NONE for m in means)])
    return ["task", "shots", "metric", *(row.name for row in rows)] if body else [], body


def _share(score: TaskScore | None) -> str:
    if score is None:
        return NONE
    error = "" if score.standard_error is None else f" ± {100 * score.standard_error:.1f}"
    return f"{100 * score.value:.1f}{error}"


def _mean(scores: Sequence[TaskScore]) -> str:
    """Average scores; tasks are independent, so the squares of their errors add up."""
    value = sum(s.value for s in scores) / len(scores)
    error = math.sqrt(sum((s.standard_error or 0.0) ** 2 for s in scores)) / len(scores)
    return f"{100 * value:.1f} ± {100 * error:.1f}"


def task_footnote(rows: Sequence[Row]) -> str:
    """Describe how the tasks were run; empty without tasks."""
    scores = [score for row in rows for score in row.tasks]
    if not scores:
        return ""
    counts = ", ".join(dict.fromkeys(f"{s.task} {s.examples:,}" for s in scores))
    truncated = sum(s.truncated for s in scores)
    examples = [s for s in scores if s.shots]
    speeds: dict[str, list[str]] = {}  # of the tasks whose answers were written
    for row in rows:
        for s in row.tasks:
            if TOKENS_PER_S in s.metrics:
                speeds.setdefault(s.task, []).append(f"{row.name} {s.metrics[TOKENS_PER_S]:.1f}")
    harnesses = {s.harness: list(dict.fromkeys(o.task for o in scores if o.harness == s.harness)) for s in scores}
    parts = [
        f"Percent, ± one standard error. Questions: {counts}",
        "; ".join(
            harnesses if len(harnesses) == 1 else [f"{', '.join(tasks)}: {how}" for how, tasks in harnesses.items()]
        ),
        f"few-shot examples drawn with seed {examples[0].seed}" if examples else "",
        *(f"Tokens/s while writing {task}: {', '.join(found)}" for task, found in speeds.items()),
        f"{truncated:,} prompts were longer than the model's context and lost their beginning" if truncated else "",
    ]
    return ". ".join(part for part in parts if part) + "."


def to_markdown(rows: Sequence[Row]) -> str:
    """Render the table with its footnote, then the tasks with theirs."""

    def line(values: Sequence[str]) -> str:
        return "| " + " | ".join(map(escape_markdown, values)) + " |"

    lines = []
    parts = (table(rows), footnote(rows)), (position_table(rows), POSITIONS), (task_table(rows), task_footnote(rows))
    for (titles, body), note in parts:
        if titles:
            ruler = "|---|" + "---:|" * (len(titles) - 1)
            lines += [line(titles), ruler, *map(line, body), "", escape_markdown(note), ""]
    return "\n".join(lines[:-1]) + "\n"


def to_rich(rows: Sequence[Row]) -> Table:
    """Render the same table for the terminal, without the columns that the footnote repeats, to fit 80 characters."""
    titles, body = table(rows)
    kept = [i for i, title in enumerate(titles) if title not in ("tokens", "context")]
    kept_titles = [titles[i].replace(" ", "\n", 1) for i in kept]
    return rich_table(kept_titles, [[values[i] for i in kept] for values in body], footnote(rows))


def rich_table(titles: Sequence[str], body: Sequence[Sequence[str]], caption: str = "") -> Table:
    """Render a table for the terminal, first column left-aligned; nothing in it is read as markup."""
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=escape(caption) or None, caption_justify="left")
    for i, title in enumerate(titles):
        shown.add_column(escape(title), justify="right" if i else "left", overflow="fold")
    for values in body:
        shown.add_row(*map(escape, values))
    return shown


def more_to_rich(rows: Sequence[Row]) -> list[Group]:
    """Render spans of positions, then tasks, each with its footnote, for the terminal; those not measured are left out."""
    parts = (position_table(rows), POSITIONS), (task_table(rows), task_footnote(rows))
    # no caption: that is folded at the width of the table
    return [Group(rich_table(titles, body), Text(note)) for (titles, body), note in parts if titles]
