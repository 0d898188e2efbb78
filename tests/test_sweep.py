"""Sweeps on a pico model: the grid, the tables, resuming after an interruption, and refusals that come before any work."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pico_files import CommandLine, contents, pico_recipe, small, write_pico, write_text
from tomoe import conversion
from tomoe.data.corpus import Corpus, prepare
from tomoe.errors import UserError
from tomoe.recipe.conversion import DataSection, Recipe
from tomoe.sweep import CELL_FILE, Cell, Text, grid, read_axis, sweep, write_tables

pytestmark = [pytest.mark.slow, pytest.mark.figures]

BASE = Recipe.load(None, small()[1::2])


def test_axes_are_read_as_json_or_as_words() -> None:
    assert read_axis("active=0.7, 0.50") == ("active", [0.7, 0.5])
    assert read_axis("start=carved,random") == ("start", ["carved", "random"])
    assert read_axis('data.sources=["a", "b"],["c"]') == ("data.sources", [["a", "b"], ["c"]])
    assert read_axis("train.gradient_checkpointing=true,false") == ("train.gradient_checkpointing", [True, False])
    for wrong in ("active", "active=", "=3", ""):
        with pytest.raises(UserError, match="should read key=value,value"):
            read_axis(wrong)


def test_the_grid_is_every_combination_once() -> None:
    cells = grid(BASE, ["active=0.7,0.5,0.70", "experts.num_experts=4,8"])
    assert [cell.name for cell in cells] == [
        "active=0.7,experts.num_experts=4", "active=0.7,experts.num_experts=8",
        "active=0.5,experts.num_experts=4", "active=0.5,experts.num_experts=8",
    ]  # fmt: skip
    assert (cells[3].recipe.active, cells[3].recipe.experts.num_experts) == (0.5, 8)
    assert cells[3].recipe.train == BASE.train
    for wrong, words in (
        ("actve=0.7", "did you mean active"),
        ("active=2", "at most 1"),
        ("train=1", "section"),
    ):
        with pytest.raises(UserError, match=words):
            grid(BASE, [wrong])
    for axes in ([], ["active=0.7", "active=0.5"]):
        with pytest.raises(UserError, match="name each key"):
            grid(BASE, axes)


def test_names_of_folders_stay_short_plain_and_apart() -> None:
    paths = [f"/some/where/{'deep/' * 40}{name}.txt" for name in ("a", "b")]
    names = [Cell({"data.sources": [path]}, BASE).name for path in paths]
    assert names[0] != names[1]
    for name in names:
        assert len(name) < 120
        assert "/" not in name
        assert not name.startswith(".")
    assert Cell({"model": "a/b"}, BASE).name != Cell({"model": "a-b"}, BASE).name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a text, and a finished sweep of two cells."""
    folder = tmp_path_factory.mktemp("sweep")
    write_pico(folder / "dense")
    write_text(folder / "text.txt")
    sweep(base_of(folder), ["active=0.7,0.6"], folder / "out")
    return folder


def base_of(folder: Path, *changes: str) -> Recipe:
    return pico_recipe(folder, "train.steps=1", "data.tokens=700", *changes)


def test_each_cell_is_a_conversion_and_a_line(made: Path) -> None:
    out = made / "out"
    lines = [json.loads(line) for line in (out / "sweep.jsonl").read_text().splitlines()]
    assert [line["values"] for line in lines] == [{"active": 0.6}, {"active": 0.7}]
    for line in lines:
        cell = out / line["cell"]
        for name in ("model.safetensors", "plan.json", "report.html", "README.md", CELL_FILE):
            assert (cell / name).is_file(), name
        measured = json.loads((cell / "evaluation.json").read_text())["rows"]
        assert line["measured"]["perplexity"] == measured[1]["measurement"]["perplexity"]
        assert line["measured"]["dense_perplexity"] == measured[0]["measurement"]["perplexity"]
        assert line["measured"]["active_share"] == pytest.approx(line["values"]["active"], abs=0.002)
    with (out / "sweep.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["kl"]) for row in table] == [line["measured"]["kl"] for line in lines]
    assert [row["active"] for row in table] == ["0.6", "0.7"]
    assert (out / "accuracy.svg").is_file()
    assert (out / "accuracy.png").is_file()


def test_a_finished_sweep_is_passed_over_and_a_cut_cell_resumes(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "out", out := tmp_path / "out")
    (out / "active=0.6" / CELL_FILE).unlink()  # cut off while it was measured
    cells_run: list[tuple[str, int, int]] = []
    stages: set[str] = set()

    def on_cell(cell: Cell, before: int, to_do: int) -> object:
        cells_run.append((cell.name, before, to_do))
        return lambda stage, *_: stages.add(stage)

    lines = sweep(base_of(made), ["active=0.7,0.6"], out, on_cell=on_cell)
    assert cells_run == [("active=0.6", 0, 1)]
    assert "text" not in stages  # its text and its training were there already
    assert "train" not in stages
    before = [json.loads(line) for line in (made / "out" / "sweep.jsonl").read_text().splitlines()]
    assert lines[1] == before[1]
    assert [line["measured"]["perplexity"] for line in lines] == [line["measured"]["perplexity"] for line in before]
    assert contents(out, [CELL_FILE]).keys() == contents(made / "out", [CELL_FILE]).keys()
    sweep(base_of(made), ["active=0.7,0.6"], out, on_cell=on_cell)
    assert len(cells_run) == 1


def test_cells_with_the_same_text_prepare_it_once(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[DataSection] = []

    def counted(section: DataSection, *rest: Any) -> Corpus:
        prepared.append(section)
        return prepare(section, *rest)

    monkeypatch.setattr(conversion, "prepare", counted)
    base = base_of(made, "train.steps=0", "data.calibration_tokens=128")
    sweep(base, ["active=0.7,0.6", "data.calibration_tokens=128,160"], tmp_path / "out")
    assert [section.calibration_tokens for section in prepared] == [128, 160]
    texts = {path.read_bytes() for path in (tmp_path / "out").glob("*/run/corpus.safetensors")}
    assert len(texts) == 2


def test_another_base_recipe_or_text_is_refused_before_anything_runs(made: Path) -> None:
    out = made / "out"
    before = contents(out)
    with pytest.raises(UserError, match=r"another base recipe \(train.steps: 1 here, 2 there\)"):
        sweep(base_of(made, "train.steps=2"), ["active=0.5"], out)
    with pytest.raises(UserError, match="another base recipe"):  # the cells of other keys must fit as well
        sweep(base_of(made, "seed=1"), ["experts.num_experts=4"], out)
    with pytest.raises(UserError, match="was measured on"):
        sweep(base_of(made), ["active=0.7"], out, Text("other.txt"))
    assert contents(out) == before


def test_one_cell_that_cannot_be_made_does_not_stop_the_others(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 of 2 cells failed; active=0.01: .*can be cut to"):
        sweep(base_of(made, "train.steps=0"), ["active=0.01,0.8"], tmp_path / "out")
    assert len((tmp_path / "out" / "sweep.jsonl").read_text().splitlines()) == 1


def test_a_damaged_line_is_named(made: Path, tmp_path: Path) -> None:
    for text in ("{", "[]", '{"cell": "x"}'):
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / CELL_FILE).write_text(text)
        with pytest.raises(UserError, match="is not the line of a cell; delete it to measure"):
            write_tables(tmp_path)


def test_the_command_measures_on_a_text_of_its_own(tomoe: CommandLine, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = write_text(tmp_path / "other.txt", 60)
    options = ["--data", made / "text.txt", "--text", text, "--context", "32", "--tokens", "320"]
    command = ["sweep", made / "dense", "--over", "active=0.8", "--over", "seed=0,1", "-o", out, *options]
    done = tomoe(*command, *small(train_steps="0"))
    assert done.code == 0, done.err
    assert "cell 1 of 2: active=0.8,seed=0" in done.err
    assert "cell 2 of 2: active=0.8,seed=1, about" in done.err
    assert "active=0.8,seed=1" in done.out
    assert str(out / "sweep.csv") in done.out
    lines = [json.loads(line) for line in (out / "sweep.jsonl").read_text().splitlines()]
    assert [(line["measured"]["context_length"], line["measured"]["data"]) for line in lines] == [(32, "other.txt")] * 2
    assert lines[0]["measured"]["dense_perplexity"] == lines[1]["measured"]["dense_perplexity"]
    for line in lines:
        held_out = json.loads((out / line["cell"] / "evaluation.json").read_text())["rows"][1]["measurement"]
        assert line["held_out"]["perplexity"] == held_out["perplexity"] != line["measured"]["perplexity"]
    with (out / "sweep.csv").open() as file:
        assert [float(row["held_out_kl"]) for row in csv.DictReader(file)] == [line["held_out"]["kl"] for line in lines]
    again = tomoe(*command, *small(train_steps="1"))
    assert again.code == 2
    assert "another base recipe" in again.err
    assert len(again.err.strip().splitlines()) == 1
