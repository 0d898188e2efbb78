"""`tomoe finetune`: what it writes is a converted model like any other; faults lose nothing."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import tokens
from pico_files import (
    FINE,
    TUNED,
    CommandLine,
    contents,
    ended,
    forked,
    pico_recipe,
    refused,
    rows_from,
    steps_of,
    write_pico,
)
from tomoe.cli import main
from tomoe.data.corpus import Corpus
from tomoe.data.evaluation_text import held_out_text
from tomoe.evaluation.compare import training_overlap
from tomoe.finetuning.students import FinetuneStep, HeldOutLoss
from tomoe.pipeline.convert import convert
from tomoe.plans import FINETUNED, Plan
from tomoe.recipe.conversion import Recipe
from tomoe.report.summary import conversion_summary

# That something is learned is what test_learning measures; these tests are about what is written.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "always_better", "as_shipped")]

SETTINGS = ("train.steps=4", "train.save_every=2", "train.learning_rate=1e-3", *TUNED)


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    """And a conversion with its run."""
    convert(pico_recipe(place, "train.steps=1"), place / "out")
    return place


@pytest.fixture(scope="module")
def whole(place: Path, always_better: None) -> Path:
    """Its fine-tuning, never interrupted, with what it printed beside it; to be read only."""
    printed, command = place / "whole.txt", [str(word) for word in (*options(place), "-o", place / "whole")]
    with printed.open("w") as shown, redirect_stdout(shown), redirect_stderr(shown), pytest.raises(SystemExit) as left:
        main(command)
    assert not left.value.code
    return place / "whole"


def options(place: Path, *changes: str) -> list[str | Path]:
    sets = [word for setting in (*SETTINGS, *changes) for word in ("--set", setting)]
    return ["finetune", place / "out", "--data", place / "text.txt", *sets]


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(tokens()).logits


def test_the_result_is_a_converted_model_like_any_other(
    tomoe: CommandLine, place: Path, whole: Path, tmp_path: Path
) -> None:
    out, printed = whole, (place / "whole.txt").read_text()
    assert all(word in printed for word in ("dense", "out", "whole", "perplexity", "fine-tuning 4/4"))
    moe, plan, before = AutoModelForCausalLM.from_pretrained(out), Plan.load(out), Plan.load(place / "out")
    assert not torch.equal(logits(out), logits(place / "out"))
    for layer, own, old in zip(moe.model.layers, plan.layers, before.layers, strict=True):
        assert torch.equal(layer.mlp.router.weight, own.router_weight)
        assert torch.equal(own.router_weight, own.router_weight.bfloat16().float())
        assert not torch.equal(own.router_weight, old.router_weight)
        assert torch.equal(own.expert_masks, old.expert_masks)
    assert (plan.notes[FINETUNED]["steps"], plan.notes[FINETUNED]["dense"]) == (4, before.source)
    assert plan.source == moe.config.tomoe_plan_source != before.source
    assert Recipe.load(out / "recipe.json") == Recipe.load(place / "out" / "recipe.json")
    assert [row.name for row in rows_from((out / "evaluation.json").read_text())] == ["dense", "out", "whole"]
    card = (out / "README.md").read_text()
    assert "Fine-tuning" in card
    assert "tomoe finetune out" in card
    assert "4 steps" in tomoe("inspect", out).out
    assert tomoe("evaluate", place / "dense", out, "--tokens", "64").code == 0
    exported = tomoe("export", out, "--format", "mixtral", "-o", tmp_path / "stock")
    assert exported.code == 0, exported.err
    torch.testing.assert_close(logits(tmp_path / "stock"), logits(out), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("model", "text")
def test_fine_grained_experts_are_tuned_like_any_others(tomoe: CommandLine, tmp_path: Path) -> None:
    """Stopped and resumed; routers with their biases are trained and written into the plan."""
    before = convert(pico_recipe(tmp_path, "train.steps=1", "active=0.6", *FINE), tmp_path / "out")
    assert tomoe(*options(tmp_path), "-o", tmp_path / "tuned").code == 0
    moe, plan = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned"), Plan.load(tmp_path / "tuned")
    assert (plan.form, plan.active_fraction()) == ("fine", before.active_fraction())
    for layer, own, old in zip(moe.model.layers, plan.layers, before.layers, strict=True):
        router = layer.mlp.router
        assert torch.equal(router.weight, own.router_weight)
        assert torch.equal(router.weight, router.weight.bfloat16().float())
        assert torch.equal(router.bias, own.router_bias)
        assert not torch.equal(own.router_weight, old.router_weight)
        assert not torch.equal(own.router_bias, old.router_bias)
        assert (own.top_k, layer.mlp.top_k) == (old.top_k, old.top_k)
        assert torch.equal(own.expert_masks, old.expert_masks)
        assert torch.equal(own.shared_mask, old.shared_mask)
    # half of it, then the rest
    half = [*options(tmp_path), "-o", tmp_path / "cut"]
    with pytest.MonkeyPatch.context() as only_here:
        die_at(3, lambda: signal.raise_signal(signal.SIGTERM), only_here)
        outcome = tomoe(*half)
    assert outcome.code == 128 + signal.SIGTERM
    assert "--resume" in outcome.err.splitlines()[-1]
    assert (tmp_path / "cut" / "run" / "weights" / "step-000003").exists(), "the last whole step is kept"
    assert tomoe(*half, "--resume").code == 0
    for name in LEARNED:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "tuned" / name).read_bytes(), name


def test_its_plan_fits_no_dense_model_and_it_can_be_tuned_again(
    tomoe: CommandLine, place: Path, whole: Path, tmp_path: Path
) -> None:
    """On other text: the result still knows what the conversion learned from."""
    out, again = tmp_path / "tuned", tmp_path / "again"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("weights"))
    refused(tomoe("apply", out, place / "dense", "-o", again), "fine-tuned after folding")
    (tmp_path / "other.txt").write_text(" ".join(f"{i} apples" for i in range(900)))
    own = options(place, "data.seq_len=32")
    own[1], own[3] = out, tmp_path / "other.txt"
    assert tomoe(*own, "-o", again).code == 0
    assert Plan.load(again).notes[FINETUNED]["dense"] == Plan.load(place / "out").source
    seen = Corpus.load(place / "out" / "run" / "corpus.safetensors").train
    assert training_overlap(str(again), seen) == 1.0
    assert training_overlap(str(again), held_out_text([str(place / "out")]).sequences) < 1.0


@pytest.mark.filterwarnings(
    "ignore:.*is deprecated and will be removed:FutureWarning"
)  # peft asks as transformers did before
def test_adapters_end_as_ordinary_weights(tomoe: CommandLine, place: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    out = tmp_path / "tuned"
    outcome = tomoe(*options(place, "lora.rank=2"), "-o", out, "--weights", "lora", "--objective", "lm")
    assert outcome.code == 0, outcome.err
    assert (out / "model.safetensors").stat().st_size == (place / "out" / "model.safetensors").stat().st_size
    assert not torch.equal(logits(out), logits(place / "out"))


@pytest.mark.parametrize("note", [{"sources": 5, "steps": [1] * 999}, {"sources": [["x"]]}, {"dense": 3}])
def test_a_note_that_makes_no_sense_is_shown_as_it_is(place: Path, note: dict[str, object]) -> None:
    plan = Plan.load(place / "out")
    (line,) = [how for what, how in conversion_summary(replace(plan, notes={FINETUNED: note})) if what == "Fine-tuning"]
    assert len(line) < 800


def die_at(call: int, how: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of that forward pass, counted from 0."""
    real, calls = FinetuneStep.__call__, itertools.count()

    def step(self: FinetuneStep, *args: Any) -> dict[str, float]:
        if next(calls) == call:
            how()
        return real(self, *args)

    monkeypatch.setattr(FinetuneStep, "__call__", step)


LEARNED = ("model.safetensors", "plan.safetensors", "plan.json")


def test_killed_and_resumed_it_ends_in_the_same_bytes(
    tomoe: CommandLine, place: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, out = options(place), tmp_path / "cut"

    def killed() -> None:
        """After the checkpoint of step 2 and one more step."""
        die_at(3, lambda: os.kill(os.getpid(), signal.SIGKILL), monkeypatch)
        main([str(word) for word in (*own, "-o", out)])

    assert ended(forked(killed)) == -signal.SIGKILL
    assert not (out / "config.json").exists()
    assert "Last complete checkpoint: step 2" in tomoe("inspect", out).out
    assert tomoe(*own, "-o", out).code == 2, "a run that is there was started over without --force"
    assert tomoe(*own, "-o", out, "--resume").code == 0
    for name in LEARNED:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert steps_of(out / "run") == steps_of(whole / "run")
    assert contents(out / "run" / "weights") == contents(whole / "run" / "weights")


def test_stopped_in_a_check_it_ends_in_the_same_bytes(
    tomoe: CommandLine, place: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, out = options(place), tmp_path / "cut"
    real, calls = HeldOutLoss.__call__, itertools.count()

    def stopped(self: HeldOutLoss) -> float:
        # of the start, of step 1, of step 2
        if next(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return real(self)

    with monkeypatch.context() as only_here:
        only_here.setattr(HeldOutLoss, "__call__", stopped)
        assert tomoe(*own, "-o", out).code == 128 + signal.SIGTERM
    assert tomoe(*own, "-o", out, "--resume").code == 0
    for name in (*LEARNED, "run/best.safetensors", "run/weights/step-000004/state.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


def test_the_best_step_is_kept_and_no_model_that_got_worse(
    tomoe: CommandLine, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, losses = tmp_path / "tuned", iter(range(5, 99))
    monkeypatch.setattr(HeldOutLoss, "__call__", lambda self: float(next(losses)))
    outcome = tomoe(*options(place), "-o", out)
    assert outcome.code == 2
    said = "fine-tuning did not make the model better (loss on held-out text 5.000 before the first step"
    assert said in outcome.err.splitlines()[-1]
    assert "use --force to start over" in outcome.err
    assert [path.name for path in out.iterdir() if not path.name.startswith(".")] == ["run"]
    again = tomoe(*options(place), "-o", out, "--resume")
    assert again.err.splitlines()[-1] == outcome.err.splitlines()[-1]
    for command in (("generate", out, "the sea"), ("evaluate", out), ("export", out, "-o", tmp_path / "export")):
        outcome = tomoe(*command)
        refused(outcome, "did not make the model better", "--force")
        assert "--resume" not in outcome.err
    # as advised
    losses = iter([5, 4, 3, 4, 4])
    assert tomoe(*options(place, "train.learning_rate=1e-4"), "-o", out, "--force").code == 0
    plan = Plan.load(out)
    assert [plan.notes[FINETUNED][key] for key in ("kept_step", "held_out_before", "held_out")] == [2, 5.0, 3.0]
    assert "step 2 was best on held-out text" in tomoe("inspect", out).out
    kept = load_file(out / "run" / "weights" / "step-000002" / "weights.safetensors")
    moe = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(moe.model.layers[0].mlp.up_proj, kept["model/layers/0/mlp/up_proj"])
    assert tomoe("generate", out, "the sea", "--max-new-tokens", "1").code == 0


def test_what_cannot_be_trained_is_refused_in_one_sentence(tomoe: CommandLine, place: Path, tmp_path: Path) -> None:
    out, own = tmp_path / "tuned", options(place)

    def sentence(*args: str | Path) -> str:
        outcome = tomoe(*args)
        assert outcome.code == 2
        return outcome.err.splitlines()[-1]

    assert "choose another folder for the result" in sentence(*own, "-o", place / "out", "--force")
    assert "already holds a model" in sentence(*own, "-o", place / "dense")
    assert "name a folder that `tomoe convert` wrote" in sentence("finetune", place / "dense", "-o", out)
    assert "holds no converted model" in sentence("finetune", tmp_path, "-o", out)
    other = write_pico(tmp_path / "other", "llama3")
    assert "did not come from" in sentence(*own, "--dense", other, "-o", out)
    assert "use --dense MODEL to name the dense model" in sentence(*own, "--dense", tmp_path / "off", "-o", out)
    shutil.copytree(place / "out", tmp_path / "bare", ignore=shutil.ignore_patterns("run"))
    assert "use --data FILE to name some" in sentence("finetune", tmp_path / "bare", "-o", out)
    assert "no key 'shrad'" in sentence(*own, "--set", "train.shrad=1", "-o", out)
    assert not out.exists()


def test_the_recipe_of_another_run_is_not_resumed(tomoe: CommandLine, place: Path, whole: Path) -> None:
    before = contents(whole)
    outcome = tomoe(*options(place), "--weights", "lora", "-o", whole, "--resume")
    assert contents(whole) == before
    assert outcome.code == 2
    assert 'weights: "full" here, "lora" there' in outcome.err


def test_a_run_does_not_go_on_from_another_conversion(tomoe: CommandLine, place: Path, tmp_path: Path) -> None:
    """The same path, recipe and sizes: only what the folder holds tells that what was learned belongs to another model."""
    shutil.copytree(place / "out", tmp_path / "out")
    shutil.copy(place / "text.txt", tmp_path)
    own, out = [*options(tmp_path), "--dense", place / "dense"], tmp_path / "tuned"
    assert tomoe(*own, "-o", out).code == 0
    for name in LEARNED:
        shutil.copy(out / name, tmp_path / "out" / name)
    before = contents(out)
    outcome = tomoe(*own, "-o", out, "--resume")
    assert outcome.code == 2
    assert "changed since" in outcome.err.splitlines()[-1]
    assert contents(out) == before


def test_weights_stay_of_the_dtype_that_they_had(tomoe: CommandLine, place: Path, tmp_path: Path) -> None:
    """And the text is what the conversion kept, where none is named."""
    moe = AutoModelForCausalLM.from_pretrained(place / "out", dtype=torch.bfloat16)
    shutil.copytree(place / "out", tmp_path / "half")
    moe.save_pretrained(tmp_path / "half")
    own = ["finetune", tmp_path / "half", *options(place, "train.dtype=float32")[4:]]
    assert tomoe(*own, "-o", tmp_path / "tuned").code == 0
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert {name for name, p in tuned.named_parameters() if p.dtype != torch.bfloat16} == {
        name for name, _ in tuned.named_parameters() if "router." in name
    }
