"""Every verb on a pico model: what it prints, what it writes, how it ends."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tomoe as package
from pico_files import CommandLine, contents, small
from tomoe.plan import Plan
from tomoe.recipe.conversion import DataSection


def test_version_and_help(tomoe: CommandLine) -> None:
    assert tomoe("--version").out == f"tomoe {package.__version__}\n"
    shown = tomoe("--help")
    assert shown.code == 0
    for verb in [
        "convert",
        "carve",
        "train",
        "plan",
        "apply",
        "evaluate",
        "benchmark",
        "generate",
        "report",
        "route",
        "inspect",
        "fetch",
        "push",
    ]:
        assert verb in shown.out


def test_convert_writes_all_and_says_what_came_out(tomoe: CommandLine, tmp_path: Path, model: Path, text: Path) -> None:
    out = tmp_path / "moe"
    done = tomoe("convert", model, "--active", "0.6", "-o", out, "--data", text, "--seed", "3", *small())
    assert done.code == 0, done.err
    for name in ("config.json", "model.safetensors", "plan.json", "plan.safetensors", "recipe.json", "tokenizer.json",
                 "modeling_tomoe.py", "README.md", "evaluation.json", "report.html"):  # fmt: skip
        assert (out / name).is_file(), name
    assert not list(out.rglob("*.bin"))
    assert not list(out.rglob("*.pt"))
    assert Plan.load(out).active_fraction() == pytest.approx(0.6, abs=0.002)
    rows = json.loads((out / "evaluation.json").read_text())["rows"]
    assert [row["measurement"]["model"] for row in rows] == ["dense", "moe"]
    assert rows[1]["measurement"]["kl"] > 0
    assert all(row["measurement"]["seed"] == 3 and row["measurement"]["context_length"] == 16 for row in rows)
    # the table and its footnote: both models, the context length, the seed, and what to do next
    for word in ("dense", "moe", "perplexity", "KL", "16", "seed 3", "text.txt", "tomoe generate"):
        assert word in done.out
    assert "learning 4/4" in done.err
    assert json.loads((out / "recipe.json").read_text())["seed"] == 3


def test_the_stages_make_what_convert_makes(tomoe: CommandLine, tmp_path: Path, model: Path, text: Path) -> None:
    options = ["--active", "0.6", "--data", text, *small()]
    assert tomoe("convert", model, "-o", tmp_path / "whole", *options).code == 0
    assert tomoe("train", model, "-o", tmp_path / "run", *options).code == 0
    assert tomoe("plan", tmp_path / "run", "-o", tmp_path / "plan").code == 0
    assert tomoe("apply", tmp_path / "plan", "-o", tmp_path / "folded").code == 0
    ids = torch.arange(3, 30)[None]
    logits = [AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits for name in ("whole", "folded")]
    assert torch.equal(*logits)
    assert contents(tmp_path / "plan") == {
        name: digest
        for name, digest in contents(tmp_path / "whole").items()
        if name in ("plan.json", "plan.safetensors")
    }
    assert tomoe("plan", tmp_path / "run", "-o", tmp_path / "narrow", "--active", "0.5").code == 0
    assert Plan.load(tmp_path / "narrow").active_fraction() == pytest.approx(0.5, abs=0.002)


def test_carve_prepares_the_text_that_it_needs(tomoe: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is asked for; what is said of data.tokens itself holds too, and is refused where it cannot."""
    made: list[DataSection] = []
    carving = importlib.import_module("tomoe.cli.carve")
    monkeypatch.setattr(carving, "run_conversion", lambda recipe, *_: made.append(recipe.data))
    much = ["--set", "data.calibration_tokens=100000"]
    for own in ([], ["--set", "data.tokens=200000"], ["--set", "data.tokens=5000"]):
        done = tomoe("carve", "pico", "-o", "out", *much, *own)
    assert [(data.calibration_tokens, data.tokens) for data in made] == [(100_000, 116_896), (100_000, 200_000)]
    assert done.code == 2
    assert "data.tokens is 5000" in done.err


def test_carve_learns_nothing_and_needs_little_text(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path
) -> None:
    assert tomoe("carve", model, "--active", "0.6", "-o", tmp_path / "moe", "--data", text, *small()).code == 0
    recipe = json.loads((tmp_path / "moe" / "recipe.json").read_text())
    assert recipe["train"]["steps"] == 0
    assert recipe["start"] == "carved"
    assert "Nothing was learned" in (tmp_path / "moe" / "README.md").read_text()


def test_evaluate(tomoe: CommandLine, tmp_path: Path, model: Path, text: Path) -> None:
    assert tomoe("carve", model, "-o", tmp_path / "moe", "--data", text, *small()).code == 0
    held_out = tomoe("evaluate", model, tmp_path / "moe", "--dtype", "float32")
    assert held_out.code == 0, held_out.err
    assert "held out" in held_out.out
    written = tmp_path / "numbers.json"
    given = tomoe(
        "evaluate", model, tmp_path / "moe", "--text", text, "--context", "32", "--tokens", "320", "--json", written
    )
    assert given.code == 0, given.err
    first, second = (row["measurement"] for row in json.loads(written.read_text())["rows"])
    assert first["context_length"] == 32
    assert first["tokens"] == second["tokens"] <= 320
    assert first["kl"] is None
    assert second["kl"] > 0


def test_generate(tomoe: CommandLine, tmp_path: Path, model: Path, text: Path) -> None:
    assert tomoe("carve", model, "-o", tmp_path / "moe", "--data", text, *small()).code == 0
    for folder in (model, tmp_path / "moe"):
        greedy = tomoe("generate", folder, "the sea", "--max-new-tokens", "5")
        assert greedy.code == 0, greedy.err
        assert greedy.out.startswith("the sea")
        assert greedy.err == ""
        drawn = [tomoe("generate", folder, "the sea", "--temperature", "2", "--seed", str(s)).out for s in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]


def test_inspect(tomoe: CommandLine, tmp_path: Path, model: Path, text: Path) -> None:
    out = tmp_path / "moe"
    assert tomoe("convert", model, "--active", "0.6", "-o", out, "--data", text, *small()).code == 0
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


def test_the_tokenizer_travels(tomoe: CommandLine, tmp_path: Path, model: Path, text: Path) -> None:
    assert tomoe("carve", model, "-o", tmp_path / "moe", "--data", text, *small()).code == 0
    here, there = (AutoTokenizer.from_pretrained(folder) for folder in (model, tmp_path / "moe"))
    assert here("the sea").input_ids == there("the sea").input_ids
    # and in a process that cannot import tomoe, by the words of the card, with nobody there to be asked
    *_, words = re.findall(r"```python\n(.*?)```", (tmp_path / "moe" / "README.md").read_text("utf-8"), re.DOTALL)
    script = f"import sys; sys.modules['tomoe'] = None\n{words}\nprint(tokenizer('the sea').input_ids, type(model).__module__)"
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.startswith(f"{here('the sea').input_ids} transformers_modules."), ran.stdout


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_in_one_sentence_and_the_run_goes_on(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path, signum: signal.Signals, code: int
) -> None:
    run = tmp_path / "run"
    options = [str(o) for o in ("train", model, "-o", run, "--data", text, *small(train_steps="100000"))]
    process = subprocess.Popen(
        [sys.executable, "-m", "tomoe", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    # any checkpoint but that of the start: on a fast machine the first ones are gone before anyone looks
    while not any((run / "masks").glob("step-*[1-9]*")) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signum)
    _, err = process.communicate()
    assert process.returncode == code, err
    last = err.splitlines()[-1]
    assert "--resume" in last
    assert "Traceback" not in err
    assert "no whole checkpoint" not in tomoe("inspect", run).out
