"""A folder that anyone may have written: a report of it is made, or refused in a sentence; names in it stay names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from page_samples import COST, EVIL, cell
from test_card import measured, plan_of

from damage import odd_copies
from tomoe.errors import UserError
from tomoe.evaluation.results import ExpertUsage, Row, TaskScore, to_json
from tomoe.evaluation.speed.timings import Cell
from tomoe.evaluation.tables import to_markdown
from tomoe.evaluation.writing.run import Variety
from tomoe.files import sha256
from tomoe.recipe.conversion import Recipe
from tomoe.report import build, page
from tomoe.report.card import write_card
from tomoe.report.page import Generation

pytestmark = pytest.mark.slow

PLAN = plan_of("self")
SCORE = TaskScore("piqa", 5, "acc", 0.6, 0.01, 100, 0, {"acc": 0.6}, "1.0", "lm-eval 0.4")
ROW = measured(tasks=(SCORE,), usage=ExpertUsage([[0.25, 0.75], [0.5, 0.5]], 4096, [1, 2]), training_overlap=0.5)[1]
OBSERVED = build.Observed(build.FORMAT, "0", [Generation("p", [("m", "t")])], [Variety("m", 8, 64, 1, 0.5)] * 2)


def parts_of_rows(rows: list[Row]) -> dict[str, Any]:
    """The odd rows as those of the dense model and of the converted one."""
    to_markdown(rows)
    return {"rows": [*rows, *measured(), *rows]}


@pytest.mark.parametrize(
    ("kind", "values", "parts", "least_shown"),
    [
        (build.Cost, COST, lambda cost: {"cost": cost}, 20),
        (list[Cell], [asdict(cell())], lambda cells: {"cells": cells}, 20),
        (
            build.Observed,
            asdict(OBSERVED),
            lambda seen: {"generations": seen.generations, "varieties": seen.varieties},
            10,
        ),
        (list[Row], [asdict(ROW)], parts_of_rows, 100),
    ],
    ids=["costs", "cells", "texts", "rows"],
)
def test_odd_values_are_shown_or_refused(
    kind: Any, values: Any, parts: Callable[[Any], dict[str, Any]], least_shown: int, tmp_path: Path
) -> None:
    copies, shown, refused = list(odd_copies(json.loads(json.dumps(values)))), 0, 0
    for odd in copies:
        try:
            checked = build.checked(tmp_path / "file.json", kind, odd)
        except UserError as error:
            refused += "file.json" in str(error) and "\n" not in str(error)
            continue
        page.write_page(tmp_path, "t", PLAN, **parts(checked))
        shown += 1
    assert shown > least_shown
    assert refused == len(copies) - shown > 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A converted folder without weights, as far as a report of what was measured before needs it."""
    monkeypatch.setattr(build, "all_figures", lambda *_: [])
    out, plan = tmp_path / "moe", plan_of("self")
    plan.save(out)
    (out / "run").mkdir()
    Recipe(**plan.recipe).save(out / "recipe.json")
    observed = replace(OBSERVED, plan=sha256(out / "plan.safetensors"))
    (out / "evaluation.json").write_text(to_json(measured()))
    # with what earlier versions kept there
    (out / "report.json").write_text(json.dumps(asdict(observed) | {"texts": [], "typical": [[["a"]]]}))
    return out


@pytest.mark.parametrize("name", ["evaluation.json", "report.json", "benchmark.json", "run/cost.json", "active.json"])
def test_a_damaged_file_is_one_sentence(folder: Path, name: str) -> None:
    (folder / "active.json").write_text('{"format": "tomoe-comparison-99"}')  # a curve of another version is left out
    build.write_reports(folder, again=False)
    assert (folder / "report.html").is_file()
    file = folder / name
    wrong = {"format": "tomoe-comparison-2"} if name == "active.json" else {"cells": [7], "seconds": 7}
    # these were written by another version, so that the models are measured again
    said = "cannot|no |not " if name in ("evaluation.json", "report.json") else str(file)
    for content, words in (("7", str(file)), (json.dumps(wrong), said)):
        file.write_text(content)
        with pytest.raises(UserError, match=words) as raised:
            build.write_reports(folder, again=False)
        assert "\n" not in str(raised.value)


def test_cards_take_no_markup_from_names(tmp_path: Path) -> None:
    evil = EVIL.replace("/", "_") + "\n# heading\n```\n<b>"
    plan = replace(plan_of(evil, model=evil), source=evil, notes={"torch": evil})
    out = tmp_path / evil
    text = write_card(out, plan, measured(evil)).read_text(encoding="utf-8").split("\n---\n", 1)[1]
    code = text.split("\n```")
    assert len(code) % 2 == 1, "no name opens or ends a block of code"
    prose = "".join(code[::2])
    assert "<" not in prose
    assert "\n# heading" not in prose


def test_commands_are_quoted(tmp_path: Path) -> None:
    plan = replace(plan_of("self"), recipe=Recipe(model="$(touch x).gguf").model_dump())
    text = page.write_page(tmp_path / "my; out", "t", plan).read_text("utf-8")
    assert "tomoe benchmark &#39;$(touch x).gguf&#39; &#39;my; out&#39;" in text
    card = write_card(tmp_path / "my; out", plan).read_text("utf-8")
    assert "tomoe convert '$(touch x).gguf' --recipe recipe.json -o 'my; out'" in card
