"""One recipe over a grid of its keys: each cell a whole conversion in a folder of its own, measured, and one line of a table.

OUT/CELL/           a conversion as `convert` makes it, and cell.json: its line
OUT/sweep.jsonl     all lines; OUT/sweep.csv holds the same
OUT/accuracy.svg    perplexity against active share; accuracy.png too
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

from tomoe import api, distributed
from tomoe.conversion import Listener, convert_dense, silent
from tomoe.errors import UserError
from tomoe.evaluation.compare import Row
from tomoe.files import write_whole
from tomoe.recipe.conversion import Recipe
from tomoe.report.build import write_reports
from tomoe.report.figures import accuracy_figure
from tomoe.report.style import save
from tomoe.training.run_folder import RunFolder

Line = dict[str, Any]
LINE = "cell.json"


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    values: dict[str, Any]  # the keys that are swept, as the recipe holds them
    recipe: Recipe

    @property
    def name(self) -> str:
        """Of its folder. Values that make no file name are shortened, and told apart by a checksum."""
        plain = ",".join(f"{key}={_shown(value)}" for key, value in self.values.items())
        safe = re.sub(r"[^\w.,=+-]+", "-", plain)
        if safe == plain and len(safe) <= 120:
            return safe
        return f"{safe[:100]}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Text:
    """What the cells are measured on; without a source, each on the text it held out."""

    source: str | None = None
    context: int | None = None
    tokens: int | None = None


def read_axis(text: str) -> tuple[str, list[Any]]:
    """`active=0.7,0.5` -> ("active", [0.7, 0.5]). Values are JSON where all of them parse as such, else words.

    Raises UserError where there is no key or no value.
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
    """All combinations, the first axis slowest. Raises UserError for a key or a value that no recipe has."""
    read = [read_axis(axis) for axis in axes]
    keys = [key for key, _ in read]
    if not keys or len(set(keys)) < len(keys):
        raise UserError("name each key to sweep over once, for example --over active=0.7,0.5 --over seed=0,1")
    cells = [changed(base, dict(zip(keys, values, strict=True))) for values in itertools.product(*(v for _, v in read))]
    return list({cell.name: cell for cell in cells}.values())  # 0.5 and 0.50 are one cell


def changed(base: Recipe, values: dict[str, Any]) -> Cell:
    """The base recipe with some keys at other values."""
    recipe = base.changed([f"{key}={json.dumps(value)}" for key, value in values.items()])
    return Cell({key: recipe.leaves()[key] for key in values}, recipe)


def sweep(
    base: Recipe,
    axes: Sequence[str],
    out: Path,
    text: Text = Text(),
    begin: Callable[[Cell, int, int], Listener] | None = None,
) -> list[Line]:
    """Convert and measure every cell; returns the lines of all cells in OUT, and keeps OUT's tables and figure up to date.

    Cells that are finished are passed over, and one that was cut off goes on. `begin` is called as (cell, cells before
    it, cells to do) and gives who listens to that cell. Raises UserError, before anything is run, where OUT holds cells
    of another base recipe or text; and at the end, where a cell could not be made: the others are made all the same.
    Several processes work on one cell after the other together, and process 0 writes.
    """
    cells = grid(base, axes)
    if base.train.shard and distributed.size() > 1:
        raise UserError("a sweep measures whole models in every process, so it cannot share a base out (train.shard)")
    _check(base, cells, out, text)
    to_do = [cell for cell in cells if not (out / cell.name / LINE).is_file()]
    failed = []
    lines = write_tables(out)
    for number, cell in enumerate(to_do):
        try:
            _run(cell, out / cell.name, text, begin(cell, number, len(to_do)) if begin else silent)
        except (UserError, distributed.Elsewhere) as error:
            failed.append(f"{cell.name}: {error}")
            continue
        lines = write_tables(out)
    if failed and distributed.rank():
        raise distributed.Elsewhere(2)
    if failed:
        raise UserError(f"{len(failed)} of {len(cells)} cells could not be made; {'; '.join(failed)}")
    return lines


def write_tables(out: Path) -> list[Line]:
    """Read the line of every finished cell; write sweep.jsonl, sweep.csv and the figure, each as a whole."""
    lines = [_read(path) for path in out.glob(f"*/{LINE}")]
    if not lines or distributed.rank():
        return lines
    keys = list(dict.fromkeys(key for line in lines for key in line["values"]))
    lines.sort(key=lambda line: [_order(line["values"].get(key)) for key in keys])
    write_whole(out / "sweep.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    table = io.StringIO()
    names = list(dict.fromkeys(name for line in lines for name in line["measured"]))
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["cell", *keys, *names])
    for line in lines:
        own = [_shown(line["values"].get(key, "")) for key in keys]
        writer.writerow([line["cell"], *own, *(line["measured"].get(name, "") for name in names)])
    write_whole(out / "sweep.csv", table.getvalue())
    save(accuracy_figure([_point(line) for line in lines]), out)
    return lines


def _point(line: Line) -> dict[str, Any]:
    others = [f"{key.rpartition('.')[2]} {_shown(value)}" for key, value in line["values"].items() if key != "active"]
    measured = {key: line["measured"][key] for key in ("active_share", "perplexity", "dense_perplexity")}
    return {"label": ", ".join(others), **measured}


def _run(cell: Cell, folder: Path, text: Text, listen: Listener) -> None:
    begun = (folder / "run" / "recipe.json").is_file()
    same_text = _text_of_another(cell.recipe, folder.parent)
    _, dense = convert_dense(cell.recipe, folder, begun, not begun, listen, same_text)
    rows = write_reports(folder, listen, dense)
    if text.source is not None:
        rows = api.evaluate(
            [cell.recipe.model, str(folder)], text.source, context=text.context, tokens=text.tokens,
            dtype=cell.recipe.train.dtype, device=cell.recipe.device, listen=listen,
        )  # fmt: skip
    if distributed.rank():
        return
    line = {"cell": cell.name, "values": cell.values, "measured": _measured(rows, folder), "text": _described(text)}
    write_whole(folder / LINE, json.dumps(line, indent=2) + "\n")  # last: it says that the cell is whole


def _text_of_another(recipe: Recipe, out: Path) -> Path | None:
    """The text of a finished cell that was prepared from the same model in the same way: sampling it anew takes minutes."""
    for line in sorted(out.glob(f"*/{LINE}")):
        run = RunFolder(line.parent / "run")
        if run.corpus.is_file() and _text_keys(Recipe.load(run.recipe)) == _text_keys(recipe):
            return run.corpus
    return None


def _text_keys(recipe: Recipe) -> list[Any]:
    """All that decides what text a recipe has."""
    return [recipe.model, recipe.seed, recipe.device, recipe.data, recipe.train.dtype, recipe.train.base]


def _measured(rows: Sequence[Row], folder: Path) -> Line:
    dense, moe = rows[0].measurement, rows[-1].measurement
    cost = json.loads((folder / "run" / "cost.json").read_text(encoding="utf-8"))
    return {
        "active_share": rows[-1].facts["active_share"],
        "active_params": rows[-1].facts["active_params"],
        "total_params": rows[-1].facts["total_params"],
        "perplexity": moe.perplexity,
        "standard_error": moe.standard_error,
        "dense_perplexity": dense.perplexity,
        "kl": moe.kl,
        "top1_agreement": moe.top1_agreement,
        "data": moe.data,
        "data_sha256": moe.data_sha256,
        "tokens": moe.tokens,
        "context_length": moe.context_length,
        "seconds": round(sum(cost["seconds"].values()), 1),
        "resumed": cost["resumed"],
    }


def _check(base: Recipe, cells: Sequence[Cell], out: Path, text: Text) -> None:
    """Every cell in OUT, finished or not, must be what this base recipe makes of its values."""
    expected = {cell.name: cell for cell in cells}
    for path in out.glob(f"*/{LINE}"):
        line = _read(path)
        expected.setdefault(path.parent.name, changed(base, line["values"]))
        if line["text"] != _described(text):
            raise UserError(
                f"{path.parent} was measured on {json.dumps(line['text'])}, not on {json.dumps(_described(text))}; "
                "give the same text options, or another OUT"
            )
    for name, cell in expected.items():
        begun = out / name / "run" / "recipe.json"
        found = Recipe.load(begun).differences(cell.recipe) if begun.is_file() else []
        if found:
            raise UserError(
                f"{out / name} was begun with another base recipe ({'; '.join(found)}); give the same one, or another OUT"
            )


def _described(text: Text) -> dict[str, Any]:
    return {"source": text.source or "held out", "context": text.context, "tokens": text.tokens}


def _read(path: Path) -> Line:
    try:
        line: Line = json.loads(path.read_text(encoding="utf-8"))
        if {"cell", "values", "measured", "text"} <= line.keys():
            return line
    except (OSError, ValueError, AttributeError):
        pass
    raise UserError(f"{path} is not the line of a cell; delete it, and the cell is measured again")


def _order(value: Any) -> tuple[bool, float, str]:
    """Numbers by size, then all else by name."""
    number = isinstance(value, int | float)
    return not number, value if number else 0, "" if number else _shown(value)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
