"""Several processes learn, carve, sample and measure what one does. What happens when one is lost: test_lost_processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launcher import assert_same_run, launch, masks, train
from pico_files import TUNED, pico_recipe, rows_from, small
from tomoe.pipeline.convert import convert
from tomoe.plans import Plan

pytestmark = pytest.mark.slow


def test_four_processes_learn_what_one_learns(alone: Path, tmp_path: Path) -> None:
    """One of them has no layer to carve; whose disk is full makes no difference but for the first, as no other writes."""
    out = tmp_path / "run"
    assert launch(4, *train(alone, out), limits=dict.fromkeys((1, 2, 3), 0)) == [0] * 4
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (alone / "one").iterdir())
    assert_same_start_and_run(out, alone / "one")


def test_a_sharded_base_gives_the_same(alone: Path, tmp_path: Path) -> None:
    """Each process holds half of every layer; text is carved and learned from with all of them."""
    out = tmp_path / "run"
    assert launch(2, *train(alone, out, "--set", "train.shard=true")) == [0, 0], Path(f"{out}.0.log").read_text()
    assert_same_start_and_run(out, alone / "one")


def assert_same_start_and_run(actual: Path, expected: Path) -> None:
    for name, tensor in masks(actual, 0).items():
        assert torch.equal(tensor, masks(expected, 0)[name]), f"{name} was carved otherwise"
    assert_same_run(actual, expected)


def test_a_sharded_base_becomes_a_whole_model(alone: Path, tmp_path: Path) -> None:
    sizes = small(
        train_steps="2",
        train_gradient_accumulation_steps="2",
        train_gradient_checkpointing="true",
        train_shard="true",
        data_tokens="300",
        data_calibration_tokens="64",
        data_evaluation_tokens="32",
    )
    for count, name in ((2, "two"), (1, "one")):
        assert launch(count, "convert", alone / "dense", "--data", "self", "-o", tmp_path / name, *sizes) == [0] * count
    two, one = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert {n: t.shape for n, t in two.items()} == {n: t.shape for n, t in one.items()}
    for n, t in one.items():
        torch.testing.assert_close(two[n], t, rtol=1e-3, atol=1e-5)


def test_only_the_first_process_says_what_is_wrong(alone: Path, tmp_path: Path) -> None:
    """Text is prepared by one process; the others must not wait for it for ever."""
    (tmp_path / "empty.txt").write_text("\n")
    command = [*train(alone, tmp_path / "run"), "--set", f"data.sources={tmp_path / 'empty.txt'}"]
    assert launch(2, *command) == [2, 2]
    assert "tomoe: " in Path(f"{tmp_path / 'run'}.0.log").read_text()
    assert Path(f"{tmp_path / 'run'}.1.log").read_text() == ""


def test_a_whole_conversion_is_written_once(alone: Path, tmp_path: Path) -> None:
    sizes = small(
        train_steps="2", train_gradient_accumulation_steps="2", data_tokens="600", data_evaluation_tokens="64"
    )
    moe = tmp_path / "moe"
    command = ["convert", alone / "dense", "--data", alone / "text.txt", "--data", "self", "-o", moe, *sizes]
    assert launch(2, *command) == [0, 0]
    assert (moe / "report.html").exists(), Path(f"{moe}.0.log").read_text()
    assert Plan.load(moe).active_fraction() == pytest.approx(0.7, abs=0.002)
    assert Path(f"{moe}.1.log").read_text() == ""
    # both have measured their half of the text; one process finds the same to the bit
    together = (moe / "evaluation.json").read_text()
    for count in (1, 3):
        shown = tmp_path / f"{count}.json"
        assert launch(count, "evaluate", alone / "dense", moe, "--dtype", "float32", "--json", shown) == [0] * count
        assert json.loads(shown.read_text())["rows"] == json.loads(together)["rows"]
    assert Path(f"{tmp_path / '3.json'}.2.log").read_text() == ""
    assert "dense" in Path(f"{tmp_path / '3.json'}.0.log").read_text()


def test_overlapping_windows_are_divided(alone: Path, tmp_path: Path) -> None:
    """More processes than windows: the last one measures nothing, and waits."""
    options = "--context 32 --stride 16 --tokens 48 --dtype float32 --text".split()
    for count in (1, 3):
        shown = tmp_path / f"{count}.json"
        assert (
            launch(count, "evaluate", alone / "dense", alone / "dense", *options, alone / "text.txt", "--json", shown)
            == [0] * count
        )
    assert (tmp_path / "1.json").read_text() == (tmp_path / "3.json").read_text()
    assert json.loads((tmp_path / "3.json").read_text())["rows"][0]["measurement"]["blocks"] == 2


@pytest.mark.usefixtures("always_better", "model")
def test_two_processes_fine_tune_what_one_does(tmp_path: Path, text: Path) -> None:
    """And measure it: both on their share of the held-out text."""
    out = tmp_path / "out"
    convert(pico_recipe(tmp_path, "train.steps=0"), out)
    settings = (
        "train.steps=3",
        "train.gradient_accumulation_steps=2",
        "train.learning_rate=1e-3",
        "train.warmup_steps=0",
        *TUNED,
    )
    words = [f"--set={setting}" for setting in settings]
    command = ["finetune", out, "--data", text, *words, "-o"]
    assert launch(1, *command, tmp_path / "one") == [0], (tmp_path / "one.0.log").read_text()
    assert launch(2, *command, tmp_path / "two") == [0, 0], (tmp_path / "two.0.log").read_text()
    one, two, was = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two", "out"))
    for name, weight in one.items():
        if weight.is_floating_point():
            assert (two[name] - weight).norm() <= 1e-3 * (weight - was[name]).norm() + 1e-6, name
    kl = [rows_from((tmp_path / name / "evaluation.json").read_text())[-1].measurement.kl for name in ("one", "two")]
    assert kl[0] == pytest.approx(kl[1], rel=1e-3)
