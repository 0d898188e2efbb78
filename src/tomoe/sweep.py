"""One recipe over a grid of its keys: each cell is a whole conversion in its own folder, measured, and one line of a table.

OUT/CELL/           a conversion as `convert` makes it, and cell.json: its line
OUT/sweep.jsonl     all lines; OUT/sweep.csv holds the same
OUT/accuracy.svg    perplexity against active fraction, and the same as accuracy.png
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tomoe import distributed
from tomoe.conversion import convert_dense
from tomoe.errors import UserError
from tomoe.evaluation.results import Row
from tomoe.evaluation.run import evaluate
from tomoe.files import atomic_write, read_json
from tomoe.model.compute_dtype import measuring_dtype
from tomoe.progress import ProgressCallback, no_progress
from tomoe.recipe.conversion import Recipe
from tomoe.report.build import write_reports
from tomoe.report.figures import accuracy_figure
from tomoe.report.style import save
from tomoe.training.run_folder import RunFolder

Line = dict[str, Any]
CELL_FILE = "cell.json"


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    values: dict[str, Any]
    """The keys that are swept, with their values as the recipe holds them."""
    recipe: Recipe

    @property
    def name(self) -> str:
        """The name of the cell's folder. Values that make no file name are shortened and made distinct by a checksum."""
        plain = ",".join(f"{key}={_shown(value)}" for key, value in self.values.items())
        safe = re.sub(r"[^\w.,=+-]+", "-", plain)
        if safe == plain and len(safe) <= 120:
            return safe
        return f"{safe[:100]}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Text:
    """The text that cells are measured on besides what each held out; without a source, on that alone."""

    source: str | None = None
    context: int | None = None
    tokens: int | None = None


def read_axis(text: str) -> tuple[str, list[Any]]:
    """Read `active=0.7,0.5` as ("active", [0.7, 0.5]). Values are JSON if all of them parse as such, else words.

    Raises UserError if there is no key or no value.
    """
    key, equals, listed = (part.strip() for part in text.partition("="))
    try:
        values = json.loads(f"[{listed}]")
    except json.JSONDecodeError:
        values = [word.strip() for word in listed.split(",") if word.strip()]
    if not (key and equals and values):
        raise UserError(f"{text!r} should read key=value,value, for example active=0.7,0.5")
    return key, values


def grid(base: Recipe, axes: Sequence[str]) -> list[Cell]:
    """Return all combinations, the first axis slowest. Raises UserError for a key or a value that no recipe has."""
    pairs = [read_axis(axis) for axis in axes]
    keys = [key for key, _ in pairs]
    if not keys or len(set(keys)) < len(keys):
        raise UserError("name each key to sweep over once, for example --over active=0.7,0.5 --over seed=0,1")
    combinations = itertools.product(*(values for _, values in pairs))
    cells = [changed(base, dict(zip(keys, values, strict=True))) for values in combinations]
    # 0.5 and 0.50 are one cell
    return list({cell.name: cell for cell in cells}.values())


def changed(base: Recipe, values: dict[str, Any]) -> Cell:
    """Return the cell of the base recipe with some keys at other values."""
    recipe = base.changed([f"{key}={json.dumps(value)}" for key, value in values.items()])
    flat = recipe.flatten()
    return Cell({key: flat[key] for key in values}, recipe)


@distributed.locks_out("sweep")
def sweep(
    base: Recipe,
    axes: Sequence[str],
    out: Path,
    text: Text = Text(),
    on_cell: Callable[[Cell, int, int], ProgressCallback] | None = None,
) -> list[Line]:
    """Convert and measure every cell; returns the lines of all cells in OUT, whose tables and figure are kept current.

    Finished cells are skipped, an interrupted one resumes. `on_cell` is called as (cell, cells before it, cells to run) and
    returns the progress callback of that cell. Several processes work on one cell after the other together, and process 0
    writes. Raises UserError, before anything runs, if OUT holds cells of another base recipe or text; and at the end, if a
    cell failed: the others are made all the same.
    """
    cells = grid(base, axes)
    if base.train.shard and distributed.world_size() > 1:
        raise UserError(
            "a sweep measures whole models in every process, so it cannot shard the base over them; set train.shard = false"
        )
    _check(base, cells, out, text)
    lines = write_tables(out)
    finished = [line["values"] for line in lines]
    pending = [cell for cell in cells if cell.values not in finished]
    failed = []
    for number, cell in enumerate(pending):
        try:
            _run(cell, out / cell.name, text, on_cell(cell, number, len(pending)) if on_cell else no_progress)
        except (UserError, distributed.OtherRankFailed) as error:
            failed.append(f"{cell.name}: {error}")
            continue
        lines = write_tables(out)
    if failed and distributed.rank():
        raise distributed.OtherRankFailed(2)
    if failed:
        raise UserError(f"{len(failed)} of {len(cells)} cells failed; {'; '.join(failed)}")
    return lines


def write_tables(out: Path) -> list[Line]:
    """Read the line of every finished cell; write sweep.jsonl, sweep.csv and the figure, each of them atomically.

    Returns the lines, sorted by their values. Raises UserError for a damaged line.
    """
    lines = [_read(path) for path in out.glob(f"*/{CELL_FILE}")]
    if not lines or distributed.rank():
        return lines
    keys = list(dict.fromkeys(key for line in lines for key in line["values"]))
    lines.sort(key=lambda line: [_order(line["values"].get(key)) for key in keys])
    atomic_write(out / "sweep.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    atomic_write(out / "sweep.csv", _table(lines, keys))
    save(accuracy_figure([_point(line) for line in lines]), out)
    return lines


def _table(lines: Sequence[Line], keys: Sequence[str]) -> str:
    """Format lines as CSV; columns of the held-out text are named held_out_*."""
    rows = [line["measured"] | {f"held_out_{k}": v for k, v in line.get("held_out", {}).items()} for line in lines]
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["cell", *keys, *names])
    for line, row in zip(lines, rows, strict=True):
        values = [_shown(line["values"].get(key, "")) for key in keys]
        writer.writerow([line["cell"], *values, *(row.get(name, "") for name in names)])
    return table.getvalue()


def _point(line: Line) -> dict[str, Any]:
    """Return a cell as `accuracy_figure` draws it."""
    others = [f"{key.rpartition('.')[2]} {_shown(value)}" for key, value in line["values"].items() if key != "active"]
    measured = {key: line["measured"][key] for key in ("active_share", "perplexity", "dense_perplexity")}
    return {"label": ", ".join(others), **measured}


def _run(cell: Cell, folder: Path, text: Text, on_progress: ProgressCallback) -> None:
    started = (folder / "run" / "recipe.json").is_file()
    same_text = _reusable_text(cell.recipe, folder.parent)
    _, dense = convert_dense(cell.recipe, folder, started, not started, on_progress, same_text)
    rows = held_out = write_reports(folder, on_progress, dense)
    if text.source is not None:
        rows = evaluate(
            [cell.recipe.model, str(folder)],
            text.source,
            context=text.context,
            tokens=text.tokens,
            dtype=measuring_dtype(cell.recipe.train.dtype, cell.recipe.train.compute_dtype),
            device=cell.recipe.device,
            on_progress=on_progress,
        )
    if distributed.rank():
        return
    line = {"cell": cell.name, "values": cell.values, "measured": _measured(rows, folder), "text": _described(text)}
    if text.source is not None:
        line["held_out"] = _quality(held_out)
    # last: a cell with this file is finished
    atomic_write(folder / CELL_FILE, json.dumps(line, indent=2) + "\n")


def _reusable_text(recipe: Recipe, out: Path) -> Path | None:
    """Find the text of a finished cell with the same model and text settings: sampling it again would take minutes."""
    for path in sorted(out.glob(f"*/{CELL_FILE}")):
        run = RunFolder(path.parent / "run")
        if run.corpus.is_file() and _text_keys(Recipe.load(run.recipe)) == _text_keys(recipe):
            return run.corpus
    return None


def _text_keys(recipe: Recipe) -> list[Any]:
    """Return all values that decide which text a recipe prepares."""
    return [recipe.model, recipe.seed, recipe.device, recipe.data, recipe.train.dtype, recipe.train.quantization]


def _measured(rows: Sequence[Row], folder: Path) -> Line:
    cost = read_json(folder / "run" / "cost.json")
    sizes = {name: rows[-1].facts[name] for name in ("active_share", "active_params", "total_params")}
    seconds = round(sum(cost["seconds"].values()), 1)
    return sizes | _quality(rows) | {"seconds": seconds, "resumed": cost["resumed"]}


def _quality(rows: Sequence[Row]) -> Line:
    dense, moe = rows[0].measurement, rows[-1].measurement
    return {
        "perplexity": moe.perplexity,
        "standard_error": moe.standard_error,
        "dense_perplexity": dense.perplexity,
        "kl": moe.kl,
        "top1_agreement": moe.top1_agreement,
        "data": moe.data,
        "data_sha256": moe.data_sha256,
        "tokens": moe.tokens,
        "context_length": moe.context_length,
    }


def _check(base: Recipe, cells: Sequence[Cell], out: Path, text: Text) -> None:
    """Raises UserError if a cell in OUT, finished or not, is not the base recipe with the values of the cell."""
    expected = {cell.name: cell for cell in cells}
    for path in out.glob(f"*/{CELL_FILE}"):
        line = _read(path)
        expected.setdefault(path.parent.name, changed(base, line["values"]))
        if line["text"] != _described(text):
            raise UserError(
                f"{path.parent} was measured on {json.dumps(line['text'])}, not on {json.dumps(_described(text))}; "
                "use the same text options, or another OUT"
            )
    for name, cell in expected.items():
        path = out / name / "run" / "recipe.json"
        differences = Recipe.load(path).differences(cell.recipe) if path.is_file() else []
        if differences:
            raise UserError(
                f"{out / name} was started with another base recipe ({'; '.join(differences)}); use the same one, or another "
                "OUT"
            )


def _described(text: Text) -> dict[str, Any]:
    return {"source": text.source or "held out", "context": text.context, "tokens": text.tokens}


def _read(path: Path) -> Line:
    try:
        line: Line = read_json(path)
        if {"cell", "values", "measured", "text"} <= line.keys():
            return line
    except (OSError, ValueError, AttributeError):
        pass
    raise UserError(f"{path} is not the line of a cell; delete it to measure the cell again")


def _order(value: Any) -> tuple[bool, float, str]:
    """Sort numbers by size, then all else by name."""
    number = isinstance(value, int | float)
    return not number, value if number else 0, "" if number else _shown(value)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
