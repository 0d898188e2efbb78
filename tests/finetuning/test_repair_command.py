"""`tomoe repair`: a finished conversion refitted, from the text that it keeps or from text that is named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pico_files import CommandLine, refused, rows_from
from tomoe.evaluation.results import Row
from tomoe.finetuning import finetune
from tomoe.plans import REPAIRED, Plan


@pytest.mark.slow
def test_fine_grained_experts_are_repaired(tomoe: CommandLine, converted_fine: Path, tmp_path: Path) -> None:
    done = tomoe("repair", converted_fine / "moe", "-o", tmp_path / "out")
    assert done.code == 0, done.err
    before, plan = Plan.load(converted_fine / "moe"), Plan.load(tmp_path / "out")
    note = plan.notes[REPAIRED]
    assert note["error_after"] < note["error_before"]
    assert plan.form == "fine"
    for layer, old in zip(plan.layers, before.layers, strict=True):
        assert (layer.top_k, layer.refit.keys()) == (old.top_k, {"down.weight"})
    assert [row.name for row in rows_from((tmp_path / "out" / "evaluation.json").read_text())] == [
        "dense",
        "moe",
        "out",
    ]
    assert "further from the dense model" not in done.err + done.out


@pytest.mark.slow
def test_a_repair_that_makes_it_worse_says_so(
    tomoe: CommandLine, converted_fine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = finetune.compare

    def worse(*args: Any) -> list[Row]:
        dense, before, after = real(*args)
        measured = replace(after.measurement, kl=before.measurement.kl + 1)
        return [dense, before, replace(after, measurement=measured)]

    monkeypatch.setattr(finetune, "compare", worse)
    done = tomoe("repair", converted_fine / "moe", "-o", tmp_path / "out")
    said = " ".join((done.out + done.err).split())
    assert (done.code, "further from the dense model than moe" in said) == (0, True), said


@pytest.mark.slow
def test_repair_takes_the_kept_text_or_the_named_one(tomoe: CommandLine, converted: Path, tmp_path: Path) -> None:
    bare, text = tmp_path / "bare", converted / "text.txt"
    shutil.copytree(converted / "moe", bare, ignore=shutil.ignore_patterns("run"))
    for name, command in {"kept": [converted / "moe"], "named": [bare, "--data", text, "--mode", "low_rank"]}.items():
        done = tomoe("repair", *command, "-o", tmp_path / name)
        assert done.code == 0, done.err
        note = Plan.load(tmp_path / name).notes[REPAIRED]
        assert note["error_after"] < note["error_before"]
    assert note["mode"] == "low_rank"
    refused(tomoe("repair", bare, "-o", tmp_path / "none"), "keeps no text", "--data")
    assert not (tmp_path / "none").exists()
