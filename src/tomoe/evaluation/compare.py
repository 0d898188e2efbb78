"""Models beside each other, the dense one first: measured by one code, shown as JSON, Markdown and in the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import Bool, Int
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from tomoe.errors import UserError
from tomoe.evaluation.param_counts import ModelFacts, model_facts
from tomoe.evaluation.perplexity import Measurement, Predictions, measure, new_tokens
from tomoe.evaluation.tasks import TaskScore
from tomoe.evaluation.usage import ExpertCounter, ExpertUsage
from tomoe.files import own_name

FORMAT = "tomoe-comparison-2"
NONE = "-"


@dataclass(frozen=True)
class Row:
    """One model: its quality, its size, and its routing if it routes."""

    measurement: Measurement
    facts: ModelFacts
    usage: ExpertUsage | None = None
    training_overlap: float | None = None  # share of the text that it was fitted on, see overlap.py
    tasks: tuple[TaskScore, ...] = ()
    usage_by_source: dict[str, ExpertUsage] = field(default_factory=dict)  # where the text is of several

    @property
    def name(self) -> str:
        return self.measurement.model

    def to_dict(self) -> dict[str, Any]:
        usage = None if self.usage is None else self.usage.to_dict()
        return {
            "measurement": self.measurement.to_dict(),
            "facts": dict(self.facts),
            "usage": usage,
            "training_overlap": self.training_overlap,
            "tasks": [score.to_dict() for score in self.tasks],
            "usage_by_source": {source: own.to_dict() for source, own in self.usage_by_source.items()},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Row:
        usage = values["usage"]
        measurement = Measurement.from_dict(values["measurement"])
        routed = None if usage is None else ExpertUsage.from_dict(usage)
        tasks = tuple(TaskScore.from_dict(score) for score in values["tasks"])
        by_source = {name: ExpertUsage.from_dict(own) for name, own in values.get("usage_by_source", {}).items()}
        return cls(measurement, values["facts"], routed, values["training_overlap"], tasks, by_source)


def compare(
    models: Iterable[tuple[str, nn.Module]],
    input_ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    *,
    stride: int | None = None,
    data: str = "",
    seed: int | None = None,
    sources: Sequence[str] | None = None,
    tasks: Callable[[str, Any], Sequence[TaskScore]] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Row]:
    """Measure (name, model) pairs on the same blocks; the first, dense one is the reference of all others.

    `models` may be a generator that loads as it goes: beside the reference, which runs over the text once, one model is
    alive at a time. A name that is a path gives the size on disk too, and shows as its last part. `tasks` is called with
    (name as given, model) for the scores of tasks. `sources` names each block's, for routing by source. Several processes
    share the blocks out. `progress` gets (name, blocks done, blocks in all). Raises UserError as `measure` does.
    """
    rows: list[Row] = []
    reference = None
    for given, model in models:
        path = Path(given)
        name = own_name(path) if path.exists() else given

        counter = ExpertCounter(model)

        def report(done: int, total: int, name: str = name) -> None:
            if progress:
                progress(name, done, total)

        def ran(b: int, counter: ExpertCounter = counter) -> None:
            counter.count(new_tokens(mask, b, stride), sources[b] if sources else "")

        own = Predictions(model, keep=reference is None)
        with counter:
            measured = measure(
                own, input_ids, mask, reference, report, ran=ran, stride=stride, name=name, data=data, seed=seed
            )
        counter.collect(sources or [""])
        scores = tuple(tasks(given, model)) if tasks else ()
        facts = model_facts(model, path if path.exists() else None)
        rows.append(Row(measured, facts, counter.usage(), None, scores, counter.by_source()))
        reference = reference or own
        del model, own, counter, ran  # before the next one is loaded
    return rows


def count(number: int) -> str:
    """134,515,008 -> 134.5 M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)


def cells(row: Row) -> dict[str, str]:
    """One row of every table, by column title."""
    m, f = row.measurement, row.facts
    error = "" if m.standard_error is None else f" ± {m.standard_error:.2f}"
    return {
        "model": row.name,
        "active blocks": NONE if f["active_share"] is None else f"{f['active_share']:.1%}",
        "active / all weights": f"{count(f['active_params'])} / {count(f['total_params'])}",
        "perplexity": f"{m.perplexity:.2f}{error}",
        "KL (nats)": NONE if m.kl is None else f"{m.kl:.4f}",
        "same top-1": NONE if m.top1_agreement is None else f"{m.top1_agreement:.1%}",
        "tokens": f"{m.tokens:,}",
        "context": f"{m.context_length:,}",
        "on disk": NONE if f["bytes_on_disk"] is None else f"{f['bytes_on_disk'] / 1e6:,.0f} MB",
    }


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells; a column in which no row has anything is left out."""
    every = [cells(row) for row in rows]
    titles = [title for title in (every[0] if every else {}) if any(row[title] != NONE for row in every)]
    return titles, [[row[title] for title in titles] for row in every]


def footnote(rows: Sequence[Row]) -> str:
    """What one needs to get the same numbers: text, seed, dtype, device, versions; and whether rows are comparable."""
    if not rows:
        return ""
    first = rows[0].measurement
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    parts = [
        f"Text: {first.data or 'not named'} (sha256 {first.data_sha256[:12]})"
        + ("" if first.seed is None else f", seed {first.seed}")
        + f", {first.blocks} blocks of {first.context_length} tokens (the context)"
        + ("" if first.stride is None else f", each {first.stride} tokens further on than the last")
        + f", {first.tokens:,} of them predicted",
        "± is one standard error, with blocks as independent units",
        "KL and same top-1 are against the first model" if len(rows) > 1 else "",
        "; ".join(dict.fromkeys(f"{row.measurement.dtype} on {row.measurement.device}" for row in rows)),
        versions,
    ]
    if len({row.measurement.data_sha256 for row in rows}) > 1:
        parts.append("ATTENTION: the rows were measured on different texts and cannot be compared")
    return ". ".join(part for part in parts if part) + "."


def task_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells: a line for each task, a column for each model, their means last. Empty where no task was run."""
    asked = {(s.task, s.shots, s.metric): None for row in rows for s in row.tasks}
    by_model = [{(s.task, s.shots, s.metric): s for s in row.tasks} for row in rows]
    body = [
        [task, str(shots), metric.replace("_", " "), *(_share(own.get((task, shots, metric))) for own in by_model)]
        for task, shots, metric in asked
    ]
    if len(body) > 1:
        body.append(["mean", "", "", *(_mean(row.tasks) if len(row.tasks) == len(asked) else NONE for row in rows)])
    return ["task", "shots", "metric", *(row.name for row in rows)] if body else [], body


def _share(score: TaskScore | None) -> str:
    if score is None:
        return NONE
    error = "" if score.standard_error is None else f" ± {100 * score.standard_error:.1f}"
    return f"{100 * score.value:.1f}{error}"


def _mean(scores: Sequence[TaskScore]) -> str:
    """Tasks are independent, so the squares of their errors add up."""
    value = sum(s.value for s in scores) / len(scores)
    error = math.sqrt(sum((s.standard_error or 0.0) ** 2 for s in scores)) / len(scores)
    return f"{100 * value:.1f} ± {100 * error:.1f}"


def task_footnote(rows: Sequence[Row]) -> str:
    """How the tasks were run; empty where none was."""
    scores = [score for row in rows for score in row.tasks]
    if not scores:
        return ""
    counts = ", ".join(dict.fromkeys(f"{s.task} {s.examples:,}" for s in scores))
    cut = sum(s.truncated for s in scores)
    parts = [
        f"Per cent, ± one standard error. Questions: {counts}",
        f"{scores[0].harness}, few-shot examples drawn with seed {scores[0].seed}",
        f"{cut:,} prompts were longer than the model's context and lost their beginning" if cut else "",
    ]
    return ". ".join(part for part in parts if part) + "."


def to_markdown(rows: Sequence[Row]) -> str:
    """The table with its footnote; then tasks with theirs."""

    def line(values: Sequence[str]) -> str:
        return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |"

    lines = []
    for (titles, body), note in ((table(rows), footnote(rows)), (task_table(rows), task_footnote(rows))):
        if titles:
            ruler = "|---|" + "---:|" * (len(titles) - 1)
            lines += [line(titles), ruler, *map(line, body), "", note, ""]
    return "\n".join(lines[:-1]) + "\n"


def to_rich(rows: Sequence[Row]) -> Table:
    """The same table for the terminal, without the columns that the footnote repeats: it should fit 80 characters."""
    titles, body = table(rows)
    shown = Table(caption=escape(footnote(rows)), caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    kept = [i for i, title in enumerate(titles) if title not in ("tokens", "context")]
    for i in kept:
        shown.add_column(titles[i].replace(" ", "\n", 1), justify="right" if i else "left", overflow="fold")
    for values in body:
        shown.add_row(*(escape(values[i]) for i in kept))
    return shown


def tasks_to_rich(rows: Sequence[Row]) -> Group | None:
    """The tasks and their footnote for the terminal; None where none was run."""
    titles, body = task_table(rows)
    if not titles:
        return None
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, title in enumerate(titles):
        shown.add_column(escape(title), justify="right" if i else "left", overflow="fold")
    for values in body:
        shown.add_row(*map(escape, values))
    return Group(shown, Text(task_footnote(rows)))  # no caption: that is folded at the width of the table


def to_json(rows: Sequence[Row]) -> str:
    """All of it, for `from_json`."""
    return json.dumps({"format": FORMAT, "rows": [row.to_dict() for row in rows]}, indent=2, allow_nan=False) + "\n"


def read_rows(folder: Path) -> list[Row]:
    """What was measured of the model in `folder` when it was made; nothing, where that was not done or by another version."""
    with suppress(OSError, UserError):
        return from_json((folder / "evaluation.json").read_text(encoding="utf-8"))
    return []


def from_json(text: str) -> list[Row]:
    """Raises UserError for text that `to_json` of this version did not make."""
    try:
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise UserError(f"this comparison has format {values['format']!r}, not {FORMAT!r}; measure again")
        return [Row.from_dict(row) for row in values["rows"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"this is no comparison of models ({error}); make one with `tomoe evaluate`") from error
