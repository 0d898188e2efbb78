"""Every command on a pico model: what it prints, what it writes, how it ends."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

import tomoe as package
from pico_files import FINE, CommandLine, contents, fine, pico_recipe, small
from tomoe.cli import COMMANDS, evaluate, export, options
from tomoe.cli.convert import next_commands
from tomoe.cli.options import with_fractions
from tomoe.evaluation.tasks import BATCH
from tomoe.exporting import choice, target
from tomoe.exporting.export import PROOF_TOKENS
from tomoe.pipeline.convert import convert
from tomoe.plans import Plan
from tomoe.recipe.conversion import DataSection, Recipe

pytestmark = pytest.mark.usefixtures("as_shipped")


def test_version_and_help(tomoe: CommandLine) -> None:
    assert tomoe("--version").out == f"tomoe {package.__version__}\n"
    shown = tomoe("--help")
    assert shown.code == 0
    found = [line.split()[1] for line in shown.out.splitlines() if re.match(r"│ [a-z]+  ", line)]
    assert found == [command.__name__ for commands in COMMANDS.values() for command in commands]
    for command in found:
        assert tomoe(command, "--help").code == 0, command


def test_defaults_that_the_command_line_repeats() -> None:
    """They stand there twice, so that `--help` imports no torch."""
    import inspect

    defaults = {name: p.default for name, p in inspect.signature(export).parameters.items()}
    assert defaults["tokens"] == PROOF_TOKENS
    assert (defaults["width_multiple"], defaults["weights"]) == (
        target.Options.width_multiple,
        target.Options.precision,
    )
    exporting = importlib.import_module("tomoe.cli.export")
    assert set(get_args(exporting.Format)) == {"auto", *choice.TARGETS}
    assert inspect.signature(evaluate).parameters["batch_size"].default == BATCH


WRITTEN = (
    "config.json model.safetensors plan.json plan.safetensors recipe.json tokenizer.json modeling_tomoe.py README.md "
    "evaluation.json report.html"
).split()


@pytest.mark.slow
def test_convert_writes_all_says_what_came_out_and_makes_what_the_stages_make(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path
) -> None:
    out, options = tmp_path / "moe", ["--active", "0.6", "--data", text, "--seed", "3", *small()]
    done = tomoe("convert", model, "-o", out, *options)
    assert done.code == 0, done.err
    assert set(WRITTEN) <= {path.name for path in out.iterdir()}
    assert not list(out.rglob("*.bin"))
    assert not list(out.rglob("*.pt"))
    assert Plan.load(out).active_fraction() == pytest.approx(0.6, abs=0.002)
    rows = json.loads((out / "evaluation.json").read_text())["rows"]
    assert [row["measurement"]["model"] for row in rows] == ["dense", "moe"]
    assert rows[1]["measurement"]["kl"] > 0
    assert all(row["measurement"]["seed"] == 3 and row["measurement"]["context_length"] == 16 for row in rows)
    # the table and its footnote: both models, the context length, the seed, and what to do next
    for word in (
        "dense",
        "moe",
        "perplexity",
        "KL",
        "16",
        "seed 3",
        "text.txt",
        "dense writes",
        "moe writes",
        "tomoe generate",
    ):
        assert word in done.out
    assert "learning 4/4" in done.err
    assert json.loads((out / "recipe.json").read_text())["seed"] == 3
    inspected(tomoe, out)
    staged(tomoe, tmp_path, out, options)
    assert tomoe("plan", tmp_path / "run", "-o", tmp_path / "narrow", "--active", "0.5").code == 0
    assert Plan.load(tmp_path / "narrow").active_fraction() == pytest.approx(0.5, abs=0.002)


@pytest.mark.slow
def test_the_stages_make_the_same_of_fine_grained_experts(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path
) -> None:
    convert(pico_recipe(tmp_path, "active=0.6", "attention.pruning=per_token", *FINE), tmp_path / "whole")
    options = ["--active", "0.6", "--data", text, *fine(attention_pruning="per_token")]
    staged(tomoe, tmp_path, tmp_path / "whole", options)
    assert Plan.load(tmp_path / "plan").form == "fine"


def staged(tomoe: CommandLine, folder: Path, whole: Path, options: list[str | Path]) -> None:
    """Train, plan and apply `dense` by themselves: what comes out is what the conversion `whole` is."""
    assert tomoe("train", folder / "dense", "-o", folder / "run", *options).code == 0
    assert tomoe("plan", folder / "run", "-o", folder / "plan").code == 0
    assert tomoe("apply", folder / "plan", "-o", folder / "folded").code == 0
    ids = torch.arange(3, 30)[None]
    assert torch.equal(*(AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (whole, folder / "folded")))
    made = contents(whole)
    assert contents(folder / "plan") == {name: made[name] for name in ("plan.json", "plan.safetensors")}


def inspected(tomoe: CommandLine, out: Path) -> None:
    """What `inspect` says of a conversion of four steps to 60 %, and of its run."""
    shown = tomoe("inspect", out)
    assert shown.code == 0
    assert "expert width" in shown.out
    known = json.loads(tomoe("inspect", out, "--json").out)
    assert len(known["layers"]) == known["totals"]["num_layers"] == 2
    assert known["totals"]["active_fraction"] == pytest.approx(0.6, abs=0.002)
    weights = AutoModelForCausalLM.from_pretrained(out)
    routers = sum(p.numel() for name, p in weights.named_parameters() if "router" in name)
    assert known["totals"]["router_params"] == routers
    run = json.loads(tomoe("inspect", out / "run", "--json").out)
    assert run["checkpoint"] == 4
    assert run["last"]["step"] == 4
    assert "step 4" in tomoe("inspect", out / "run").out


def test_suggested_commands_are_quoted() -> None:
    recipe = Recipe(model="my models/$(touch x)", train={"steps": 0})
    for command, _ in next_commands(recipe, Path("rx my out")):
        words = shlex.split(command)
        assert "$(touch" not in words
        assert {"my models/$(touch x)", "rx my out"} & set(words), command


def test_percentages(tomoe: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Recipe] = []
    converting = importlib.import_module("tomoe.cli.convert")
    monkeypatch.setattr(converting, "run_conversion", lambda recipe, *_: conversions.append(recipe))
    for chosen in (["--active", "62.5%"], ["--active", "0.625"], ["--set", "active=62.5%"]):
        assert tomoe("convert", "pico", "-o", "out", *chosen).code == 0
    assert [recipe.active for recipe in conversions] == [0.625] * 3
    assert with_fractions("active=70%, 0.5") == "active=0.7, 0.5"
    assert with_fractions("data.sources=50%.txt") == "data.sources=50%.txt"
    wrong = tomoe("convert", "pico", "-o", "out", "--active", "half")
    assert wrong.code == 2
    assert "neither a fraction" in " ".join(wrong.err.split())


def test_without_learning_the_text_is_as_long_as_is_needed(tomoe: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is asked for; what is said of data.tokens itself holds too, and is refused where it cannot."""
    made: list[DataSection] = []
    converting = importlib.import_module("tomoe.cli.convert")
    monkeypatch.setattr(converting, "run_conversion", lambda recipe, *_: made.append(recipe.data))
    much = ["--set", "data.calibration_tokens=100000"]
    for changes in (["repair.mode=none"], [], ["repair.tokens=150000"], ["data.tokens=200000"], ["data.tokens=5000"]):
        done = tomoe("convert", "pico", "-o", "out", *much, *(word for change in changes for word in ("--set", change)))
    # repair fits to the calibration text, too, and to 50,000 tokens more if it is asked to
    sizes = [(100_000, 116_896), (100_000, 116_896), (100_000, 166_384), (100_000, 200_000)]
    assert [(data.calibration_tokens, data.tokens) for data in made] == sizes
    assert done.code == 2
    assert "data.tokens is 5000" in done.err


def test_a_conversion_learns_nothing_unless_asked_to(converted: Path) -> None:
    recipe = json.loads((converted / "moe" / "recipe.json").read_text())
    assert recipe["train"]["steps"] == 0
    assert recipe["start"] == "carved"
    assert "Nothing was trained" in (converted / "moe" / "README.md").read_text()


@pytest.mark.slow
def test_generate(tomoe: CommandLine, converted: Path) -> None:
    for folder in (converted / "dense", converted / "moe"):
        greedy = tomoe("generate", folder, "the sea", "--max-new-tokens", "5")
        assert greedy.code == 0, greedy.err
        assert greedy.out.startswith("the sea")
        assert greedy.err == ""
    drawn = ["generate", folder, "the sea", "--max-new-tokens", "8", "--temperature", "2", "--seed"]
    first, again, other = (tomoe(*drawn, str(seed)).out for seed in (1, 1, 2))
    assert first == again != other


def test_a_run_whose_metrics_are_no_numbers(tomoe: CommandLine, tmp_path: Path, converted: Path) -> None:
    """A loss that was not finite is null in the rows; anything else stands there if somebody else wrote it."""
    run = tmp_path / "run"
    shutil.copytree(converted / "moe" / "run", run)
    for line in (
        '{"step": 5, "distill": null, "active_fraction": null, "tokens_per_second": null}',
        '{"step": null, "distill": "much", "budget": [1], "coverage": {}, "balance": true}',
        f'{{"distill": 1{"0" * 400}}}',
        "3",
        "null",
        "[[]]",
    ):
        (run / "metrics.jsonl").write_text(f"{line}\n")
        for option in ([], ["--json"]):
            done = tomoe("inspect", run, *option)
            assert done.code == 0, (line, done.err)
            assert "Traceback" not in done.err


def test_names_in_a_plan_cannot_steer_the_terminal(tomoe: CommandLine, tmp_path: Path, converted: Path) -> None:
    folder, name = tmp_path / "plan", "sea\x1b[2J\x1b]0;owned\x07[red]\u202e"
    folder.mkdir()
    plan = Plan.load(converted / "moe")
    dataclasses.replace(plan, recipe=plan.recipe | {"model": name}).save(folder)
    (folder / "run" / "masks").mkdir(parents=True)
    Recipe(**plan.recipe | {"model": name}).save(folder / "run" / "recipe.json")
    for done in (
        tomoe("inspect", folder),
        tomoe("inspect", folder / "run"),
        tomoe("apply", folder, "-o", tmp_path / "x"),
    ):
        assert "sea" in done.out + done.err
        assert "[red]" in done.out + done.err
        assert not {"\x1b", "\x07", "\u202e"} & set(done.out + done.err)


def test_the_older_name_of_a_method_is_still_taken() -> None:
    """`--form` of version 0.1; it goes with the next."""
    for form, keys in (("inputs", ("method.name", "inputs")), ("overlapping", ("experts.form", "overlapping"))):
        made = options.RecipeOptions("smollm2-135m", form=form, data=["text.txt"]).make()  # type: ignore[arg-type]
        section, key = keys[0].split(".")
        assert getattr(getattr(made, section), key) == keys[1]
