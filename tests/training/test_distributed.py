"""Several processes learn, carve, sample and measure what one does. What happens when one is lost: test_lost_processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launcher import ALWAYS_BETTER, Launcher, assert_same_run, masks, train
from pico_files import rows_from, small, write_pico, write_text
from tomoe.conversion.convert import convert
from tomoe.plan import Plan
from tomoe.recipe.conversion import Recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, run: Launcher) -> Path:
    """A model, a text, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("distributed")
    write_pico(folder / "dense", num_hidden_layers=3)  # not a multiple of the processes: they carve unequal shares
    write_text(folder / "text.txt")
    assert run(1, *train(folder, folder / "one")) == [0]
    return folder


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_learn_what_one_learns(run: Launcher, inputs: Path, tmp_path: Path, count: int) -> None:
    assert run(count, *train(inputs, tmp_path / "run")) == [0] * count
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(
        p.name for p in (inputs / "one").iterdir()
    )
    for name, tensor in masks(tmp_path / "run", 0).items():
        assert torch.equal(tensor, masks(inputs / "one", 0)[name]), f"{name} was carved otherwise"
    assert_same_run(tmp_path / "run", inputs / "one")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_sharded_base_gives_the_same(run: Launcher, inputs: Path, tmp_path: Path, family: str) -> None:
    """Each process holds half of every layer; text is sampled, carved and learned from with all of them."""
    sharded = ["--set", "train.shard=true"]
    if family != "llama":
        write_pico(tmp_path / "dense", family, num_hidden_layers=3)
        inputs = Path(shutil.copy(inputs / "text.txt", tmp_path)).parent
        assert run(1, *train(inputs, inputs / "one")) == [0]
    assert run(2, *train(inputs, tmp_path / "run", *sharded)) == [0, 0], (tmp_path / "run.0.log").read_text()
    for name, tensor in masks(tmp_path / "run", 0).items():
        assert torch.equal(tensor, masks(inputs / "one", 0)[name]), f"{name} was carved otherwise"
    assert_same_run(tmp_path / "run", inputs / "one")


def test_a_sharded_base_becomes_a_whole_model(run: Launcher, inputs: Path, tmp_path: Path) -> None:
    sizes = small(
        train_steps="2", train_gradient_accumulation_steps="2", train_gradient_checkpointing="true", data_tokens="800"
    )
    for count, name in ((2, "two"), (1, "one")):
        command = [
            "convert",
            inputs / "dense",
            "--data",
            "self",
            "-o",
            tmp_path / name,
            *sizes,
            "--set",
            "train.shard=true",
        ]
        assert run(count, *command) == [0] * count
    two, one = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert {n: t.shape for n, t in two.items()} == {n: t.shape for n, t in one.items()}
    for n, t in one.items():
        torch.testing.assert_close(two[n], t, rtol=1e-3, atol=1e-5)


def test_processes_that_cannot_share_a_step(run: Launcher, inputs: Path, tmp_path: Path) -> None:
    command = train(inputs, tmp_path / "run")
    assert run(3, *command) == [2, 2, 2]
    assert "4 forward passes" in Path(f"{tmp_path / 'run'}.0.log").read_text().splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_only_the_first_process_says_what_is_wrong(run: Launcher, inputs: Path, tmp_path: Path) -> None:
    """Text is prepared by one process; the others must not wait for it for ever."""
    (tmp_path / "empty.txt").write_text("\n")
    command = [*train(inputs, tmp_path / "run"), "--set", f"data.sources={tmp_path / 'empty.txt'}"]
    assert run(2, *command) == [2, 2]
    assert "tomoe: " in Path(f"{tmp_path / 'run'}.0.log").read_text()
    assert Path(f"{tmp_path / 'run'}.1.log").read_text() == ""


def test_a_whole_conversion_is_written_once(run: Launcher, inputs: Path, tmp_path: Path) -> None:
    sizes = small(train_steps="2", train_gradient_accumulation_steps="2")
    moe = tmp_path / "moe"
    command = ["convert", inputs / "dense", "--data", inputs / "text.txt", "--data", "self", "-o", moe, *sizes]
    assert run(2, *command) == [0, 0]
    assert (moe / "report.html").exists(), Path(f"{moe}.0.log").read_text()
    assert Plan.load(moe).active_fraction() == pytest.approx(0.7, abs=0.002)
    assert Path(f"{moe}.1.log").read_text() == ""
    # both have measured their half of the text; one process finds the same to the bit
    together = (moe / "evaluation.json").read_text()
    for count in (1, 3):
        shown = tmp_path / f"{count}.json"
        assert run(count, "evaluate", inputs / "dense", moe, "--dtype", "float32", "--json", shown) == [0] * count
        assert json.loads(shown.read_text())["rows"] == json.loads(together)["rows"]
    assert Path(f"{tmp_path / '3.json'}.2.log").read_text() == ""
    assert "dense" in Path(f"{tmp_path / '3.json'}.0.log").read_text()


def test_overlapping_windows_are_divided(run: Launcher, inputs: Path, tmp_path: Path) -> None:
    """More processes than windows: the last one measures nothing, and waits."""
    options = [
        "--text",
        inputs / "text.txt",
        "--context",
        "64",
        "--stride",
        "16",
        "--tokens",
        "80",
        "--dtype",
        "float32",
    ]
    for count in (1, 3):
        shown = tmp_path / f"{count}.json"
        assert run(count, "evaluate", inputs / "dense", inputs / "dense", *options, "--json", shown) == [0] * count
    assert (tmp_path / "1.json").read_text() == (tmp_path / "3.json").read_text()
    assert json.loads((tmp_path / "3.json").read_text())["rows"][0]["measurement"]["blocks"] == 2


def test_two_processes_fine_tune_what_one_does(run: Launcher, tmp_path: Path) -> None:
    """And measure it: both on their share of the held-out text."""
    text, dense, out = write_text(tmp_path / "text.txt"), write_pico(tmp_path / "dense"), tmp_path / "out"
    sets = [option for option in small(train_steps="0") if option != "--set"]
    convert(Recipe.load(None, [f"model={dense}", f"data.sources={text}", *sets]), out)
    settings = (
        "train.steps=3",
        "train.gradient_accumulation_steps=2",
        "train.learning_rate=1e-3",
        "train.warmup_steps=0",
        "data.evaluation_tokens=64",
    )
    words = [
        word
        for setting in (*settings, *(s for s in sets if s.startswith("data.") and "eval" not in s))
        for word in ("--set", setting)
    ]
    command = ["finetune", out, "--data", text, *words, "-o"]
    assert run(1, ALWAYS_BETTER, *command, tmp_path / "one") == [0], (tmp_path / "one.0.log").read_text()
    assert run(2, ALWAYS_BETTER, *command, tmp_path / "two") == [0, 0], (tmp_path / "two.0.log").read_text()
    one, two, was = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two", "out"))
    for name, weight in one.items():
        if weight.is_floating_point():
            assert (two[name] - weight).norm() <= 1e-3 * (weight - was[name]).norm() + 1e-6, name
    kl = [rows_from((tmp_path / name / "evaluation.json").read_text())[-1].measurement.kl for name in ("one", "two")]
    assert kl[0] == pytest.approx(kl[1], rel=1e-3)
