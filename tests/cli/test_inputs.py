"""The form `inputs` on the command line: what reads a folder of it, and what refuses one."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from test_finetune import die_at

import tomoe as package
from pico_files import INPUTS, TUNED, CommandLine, Outcome, fine, refused
from tomoe.evaluation.results import read_rows
from tomoe.moe.modeling_tomoe import choices_of
from tomoe.plans import FINETUNED, InputsPlan, read_plan

pytestmark = pytest.mark.slow


def test_the_folder_is_inspected_and_measured(tomoe: CommandLine, converted_inputs: Path) -> None:
    folder = converted_inputs / "moe"
    plan = read_plan(folder)
    assert isinstance(plan, InputsPlan)
    assert abs(plan.active_fraction() - 0.6) < 0.005  # an input of a pico model is 0.3 %
    assert not (folder / "plan.safetensors").exists()
    dense, moe = read_rows(folder)
    assert moe.facts["active_share"] == pytest.approx(0.6, abs=1e-4)
    assert dense.measurement.perplexity > 0 < moe.measurement.kl
    table = tomoe("inspect", folder)
    assert table.code == 0, table.err
    assert "gate and up" in table.out
    assert "expert" not in table.out
    totals = json.loads(tomoe("inspect", folder, "--json").out)["totals"]
    assert totals["router_params"] == 0
    assert tomoe("inspect", folder, "--verify").code == 0


def test_card_and_page_speak_of_inputs(converted_inputs: Path) -> None:
    card = (converted_inputs / "moe" / "README.md").read_text("utf-8")
    page = (converted_inputs / "moe" / "report.html").read_text("utf-8")
    assert "a model that uses the largest inputs of its projections" in card
    assert "those that weigh most for it" in page
    for text in (card, page):
        assert "router" not in text
        assert "Mixture-of-Experts" not in text
    assert "plan.safetensors" not in card


def test_more_or_fewer_inputs(tomoe: CommandLine, converted_inputs: Path) -> None:
    folder = converted_inputs / "moe"
    done = tomoe("generate", folder, "the sea", "--active", "80%", "--max-new-tokens", "2")
    assert done.code == 0, done.err
    assert done.err == "the largest inputs of every projection: 0.800 active\n"
    refused(tomoe("generate", folder, "the sea", "--active", "0.01"), "active is 0.01", "to 1; choose one of these")
    counts = [[c.count for c in choices_of(package.load(folder, active=active)[0])] for active in (0.5, 0.8, 1.0)]
    assert all(a <= b <= c for a, b, c in zip(*counts, strict=True))
    dense, *moes = package.evaluate([str(converted_inputs / "dense"), str(folder)], active=[0.5, 1.0])
    assert [row.facts["active_share"] for row in moes] == pytest.approx([0.5, 1.0], abs=1e-4)
    assert moes[1].measurement.perplexity == dense.measurement.perplexity
    assert moes[0].measurement.kl > moes[1].measurement.kl == 0


def test_apply_makes_the_same_folder(tomoe: CommandLine, converted_inputs: Path, tmp_path: Path) -> None:
    done = tomoe("apply", converted_inputs / "moe", converted_inputs / "dense", "-o", tmp_path / "again")
    assert done.code == 0, done.err
    for name in ("model.safetensors", "config.json", "plan.json"):
        assert (tmp_path / "again" / name).read_bytes() == (converted_inputs / "moe" / name).read_bytes(), name


@pytest.mark.usefixtures("one_thread", "always_better", "as_shipped")
def test_it_is_fine_tuned_like_any_other(tomoe: CommandLine, converted_inputs: Path, tmp_path: Path) -> None:
    """Stopped and resumed it ends in the same bytes; it is run at other fractions, measured and tuned again."""
    given = [*(f"--set={key}" for key in TUNED), "--data"]

    def tune(folder: Path, out: str, text: str = "text.txt", *more: str) -> Outcome:
        return tomoe("finetune", folder, *given, converted_inputs / text, "--steps", "4", "-o", tmp_path / out, *more)

    moe = converted_inputs / "moe"
    outcome = tune(moe, "whole")
    assert outcome.code == 0, outcome.err
    assert "balance" not in outcome.err
    with pytest.MonkeyPatch.context() as only_here:
        die_at(3, lambda: signal.raise_signal(signal.SIGTERM), only_here)
        assert tune(moe, "cut").code == 128 + signal.SIGTERM
    assert tune(moe, "cut", "text.txt", "--resume").code == 0
    whole, plan = tmp_path / "whole", read_plan(tmp_path / "whole")
    for name in ("model.safetensors", "plan.json", "config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (whole / name).read_bytes(), name
    assert [row.name for row in read_rows(whole)] == ["dense", "moe", "whole"]
    assert read_plan(moe) == replace(plan, source=read_plan(moe).source, notes=read_plan(moe).notes)
    assert (plan.notes[FINETUNED]["learning_rate"], "kept_step" in plan.notes[FINETUNED]) == (1e-3, True)
    assert "routers" not in plan.notes[FINETUNED]
    card = (whole / "README.md").read_text("utf-8")
    assert "fine-tuned after the conversion" in card
    assert "4 steps" in card
    assert "The weights are the dense model's" not in card
    assert "router" not in card
    assert "The weights are the dense model's" in (moe / "README.md").read_text("utf-8")
    counts = [[c.count for c in choices_of(package.load(whole, active=active)[0])] for active in (0.5, 0.8)]
    assert all(a <= b for a, b in zip(*counts, strict=True))
    dense, *measured = package.evaluate([str(converted_inputs / "dense"), str(whole)], active=[0.5, 1.0])
    assert dense.measurement.perplexity != measured[1].measurement.perplexity, "the weights are other ones"
    refused(tomoe("apply", whole, converted_inputs / "dense", "-o", tmp_path / "no"), "fine-tuned after folding")
    assert tune(whole, "again").code == 0
    assert read_plan(tmp_path / "again").notes[FINETUNED]["dense"] == read_plan(moe).source


def test_what_needs_experts_says_so(tomoe: CommandLine, converted_inputs: Path, tmp_path: Path) -> None:
    folder, dense, out = converted_inputs / "moe", converted_inputs / "dense", tmp_path / "out"
    refused(tomoe("export", folder, "-o", out), "no engine supports sparse inputs", "--method carve")
    refused(tomoe("repair", folder, "-o", out), "sparse inputs", "--method carve")
    refused(tomoe("route", folder, "the sea"), "has no routers")
    refused(tomoe("doctor", folder), "choose inputs already")
    for options in (INPUTS, fine()):
        refused(
            tomoe("convert", folder, "-o", out, *options, "--data", converted_inputs / "text.txt"),
            "choose inputs already",
        )
    refused(tomoe("train", dense, "-o", out, *INPUTS), "method inputs trains nothing", "convert with it")
    refused(tomoe("convert", dense, "-o", out, *INPUTS, "--format", "hf"), "no engine supports sparse inputs")
    refused(tomoe("convert", dense, "-o", out, *INPUTS, "--format", "gguf"), "method inputs", "set target to hf")
    for key, value in {
        "train.steps": "3",
        "attention.pruning": "static",
        "repair.mode": "full",
        "offload": "true",
    }.items():
        named = ["--data", converted_inputs / "text.txt", "--set", f"{key}={value}"]
        done = tomoe("convert", dense, "-o", out, *INPUTS, *named)
        refused(done, f"method inputs needs {key} = ", f"but it is {value}; leave it out, or choose another method")
    # by its own default text, not by that of experts
    refused(tomoe("convert", dense, "-o", out, *INPUTS, "--offload"), "method inputs needs offload = false")
    assert not out.exists()


def test_a_budget_out_of_reach_is_refused(tomoe: CommandLine, converted_inputs: Path, tmp_path: Path) -> None:
    dense, text = converted_inputs / "dense", converted_inputs / "text.txt"
    done = tomoe("convert", dense, "-o", tmp_path / "moe", *INPUTS, "--data", text, "--active", "0.02")
    refused(done, "active is 0.02", "a tenth of the inputs")


def test_doctor_knows_it(tomoe: CommandLine, converted_inputs: Path) -> None:
    done = tomoe("doctor", converted_inputs / "dense", *INPUTS, "--active", "0.6")
    assert done.code == 0, done.err
    assert "choosing inputs" in done.out
    assert "expert" not in done.out
