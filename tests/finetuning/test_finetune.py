"""`tomoe finetune`: what it writes is a converted model like any other; faults lose nothing."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from conftest import tokens
from pico_files import FINE, CommandLine, contents, pico_recipe, refused, rows_from, steps_of, write_pico, write_text
from tomoe.cli import main
from tomoe.conversion.convert import convert
from tomoe.data.corpus import Corpus
from tomoe.data.evaluation_text import held_out_text
from tomoe.evaluation.compare import training_overlap
from tomoe.finetuning.students import FinetuneStep, HeldOutLoss
from tomoe.model.loading import load_tokenizer
from tomoe.plan import FINETUNED, Plan
from tomoe.recipe.conversion import Recipe
from tomoe.report.summary import conversion_summary
from tomoe.training import run_folder

# That something is learned is what test_learning measures; these tests are about what is written.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("always_better")]

SETTINGS = (
    "train.steps=4",
    "train.save_every=2",
    "train.learning_rate=1e-3",
    "data.seq_len=16",
    "data.tokens=1200",
    "data.calibration_tokens=128",
    "data.evaluation_tokens=64",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, text, and a conversion with its run."""
    place = tmp_path_factory.mktemp("place")
    write_pico(place / "dense")
    write_text(place / "text.txt")
    convert(pico_recipe(place, "train.steps=1"), place / "out")
    return place


@pytest.fixture(scope="module")
def whole(place: Path, always_better: None) -> Path:
    """Its fine-tuning, never interrupted; to be read only."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in (*options(place), "-o", place / "whole")])
    assert not left.value.code
    return place / "whole"


def options(place: Path, *changes: str) -> list[str | Path]:
    sets = [word for setting in (*SETTINGS, *changes) for word in ("--set", setting)]
    return ["finetune", place / "out", "--data", place / "text.txt", *sets]


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(tokens()).logits


def test_the_result_is_a_converted_model_like_any_other(tomoe: CommandLine, place: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    outcome = tomoe(*options(place), "-o", out)
    assert outcome.code == 0, outcome.err
    assert all(name in outcome.out for name in ("dense", "out", "tuned", "perplexity"))
    assert "fine-tuning 4/4" in outcome.err
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
    assert [row.name for row in rows_from((out / "evaluation.json").read_text())] == ["dense", "out", "tuned"]
    card = (out / "README.md").read_text()
    assert "Fine-tuning" in card
    assert "tomoe finetune out" in card
    assert "4 steps" in tomoe("inspect", out).out
    assert tomoe("evaluate", place / "dense", out, "--tokens", "64").code == 0
    exported = tomoe("export", out, "--format", "mixtral", "-o", tmp_path / "stock")
    assert exported.code == 0, exported.err
    torch.testing.assert_close(logits(tmp_path / "stock"), logits(out), rtol=0, atol=1e-4)


def test_fine_grained_experts_are_tuned_like_any_others(tomoe: CommandLine, tmp_path: Path) -> None:
    """Stopped and resumed; routers with their biases are trained and written into the plan."""
    write_pico(tmp_path / "dense")
    write_text(tmp_path / "text.txt")
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
        assert tomoe(*half).code == 128 + signal.SIGTERM
    assert tomoe(*half, "--resume").code == 0
    for name in LEARNED:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "tuned" / name).read_bytes(), name


def test_its_plan_fits_no_dense_model_and_says_so(tomoe: CommandLine, place: Path, whole: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "tuned", tmp_path / "again"
    shutil.copytree(whole, out)
    applied = tomoe("apply", out, place / "dense", "-o", again)
    assert applied.code == 2
    assert "fine-tuned after folding" in applied.err
    shutil.rmtree(out / "run" / "weights")
    more: list[str | Path] = ["finetune", out, *options(place)[2:], "-o", again]
    assert tomoe(*more).code == 0
    assert Plan.load(again).notes[FINETUNED]["dense"] == Plan.load(place / "out").source


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


def test_what_the_conversion_kept_is_the_text_where_none_is_given(
    tomoe: CommandLine, place: Path, tmp_path: Path
) -> None:
    sets = [word for setting in SETTINGS[:3] for word in ("--set", setting)]
    out = tmp_path / "tuned"
    assert tomoe("finetune", place / "out", *sets, "-o", out).code == 0
    tuned, converted = (Corpus.load(folder / "run" / "corpus.safetensors") for folder in (out, place / "out"))
    assert tuned.digest() == converted.digest()


@pytest.mark.parametrize("named", [False, True], ids=["kept text", "named text"])
def test_an_evaluation_source_takes_nothing_from_the_text_to_learn_from(
    tomoe: CommandLine, place: Path, tmp_path: Path, named: bool
) -> None:
    (tmp_path / "other.txt").write_text(" ".join(f"{i} apples" for i in range(90)))
    command = options(place) if named else ["finetune", place / "out", *options(place)[4:]]
    learned = []
    for more in ([], ["--set", f"data.evaluation_source={tmp_path / 'other.txt'}"]):
        out = tmp_path / f"tuned{len(more)}"
        assert tomoe(*command, *more, "-o", out).code == 0
        learned.append(Corpus.load(out / "run" / "corpus.safetensors"))
    held_out, of_its_own = learned
    assert (held_out.evaluation_name, of_its_own.evaluation_name) == (None, "other.txt")
    assert held_out.train.tokens <= of_its_own.train.tokens <= held_out.tokens_of_sources
    assert (held_out.train.tokens < of_its_own.train.tokens) == named
    assert load_tokenizer(str(place / "out")).decode(of_its_own.evaluation.input_ids[0]).startswith("0 apples 1")


def test_text_of_the_conversion_counts_as_trained_on(tomoe: CommandLine, place: Path, tmp_path: Path) -> None:
    """Fine-tuned on other text, it still knows what the conversion learned from."""
    (tmp_path / "other.txt").write_text(" ".join(f"{i} apples" for i in range(900)))
    out, own = tmp_path / "tuned", options(place, "data.seq_len=32")
    own[3] = tmp_path / "other.txt"
    assert tomoe(*own, "-o", out).code == 0
    seen = Corpus.load(place / "out" / "run" / "corpus.safetensors").train
    assert training_overlap(str(out), seen) == 1.0
    assert training_overlap(str(out), held_out_text([str(place / "out")]).sequences) < 1.0


def die_at(call: int, how: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of that forward pass, counted from 0."""
    real, calls = FinetuneStep.__call__, iter(range(10**6))

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
    pid = os.fork()
    if pid == 0:  # kill -9, after the checkpoint of step 2 and one more step
        die_at(3, lambda: os.kill(os.getpid(), signal.SIGKILL), monkeypatch)
        try:
            main([str(word) for word in (*own, "-o", out)])
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not (out / "config.json").exists()
    assert "Last whole checkpoint: step 2" in tomoe("inspect", out).out
    assert tomoe(*own, "-o", out).code == 2, "a run that is there was started over without --force"
    assert tomoe(*own, "-o", out, "--resume").code == 0
    for name in LEARNED:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert steps_of(out / "run") == steps_of(whole / "run")
    assert contents(out / "run" / "weights") == contents(whole / "run" / "weights")


def test_a_scheduler_s_warning_keeps_the_last_whole_step(
    tomoe: CommandLine, place: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, out = options(place, "train.save_every=100"), tmp_path / "cut"
    with monkeypatch.context() as only_here:
        die_at(3, lambda: signal.raise_signal(signal.SIGTERM), only_here)
        outcome = tomoe(*own, "-o", out)
    assert outcome.code == 128 + signal.SIGTERM
    assert "--resume" in outcome.err.splitlines()[-1]
    assert sorted(path.name for path in (out / "run" / "weights").iterdir()) == ["step-000000", "step-000003"]
    assert tomoe(*own, "-o", out, "--resume").code == 0
    for name in LEARNED:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


def test_stopped_in_a_check_it_ends_in_the_same_bytes(
    tomoe: CommandLine, place: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, out = options(place), tmp_path / "cut"
    real, calls = HeldOutLoss.__call__, iter(range(10**6))

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


def test_a_model_that_got_worse_is_not_written(
    tomoe: CommandLine, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter(range(5, 99))
    monkeypatch.setattr(HeldOutLoss, "__call__", lambda self: float(next(losses)))
    out, own = tmp_path / "tuned", options(place)
    outcome = tomoe(*own, "-o", out)
    assert outcome.code == 2
    said = "fine-tuning did not make the model better (loss on held-out text 5.000 before the first step"
    assert said in outcome.err.splitlines()[-1]
    assert [path.name for path in out.iterdir() if not path.name.startswith(".")] == ["run"]
    again = tomoe(*own, "-o", out, "--resume")
    assert again.err.splitlines()[-1] == outcome.err.splitlines()[-1]


def test_a_folder_without_a_better_model_says_so_and_its_advice_helps(
    tomoe: CommandLine, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, losses = tmp_path / "tuned", itertools.count(1.0)
    monkeypatch.setattr(HeldOutLoss, "__call__", lambda self: next(losses))
    assert "start over (--force)" in tomoe(*options(place), "-o", out).err
    for command in (("generate", out, "the sea"), ("evaluate", out), ("export", out, "-o", tmp_path / "export")):
        outcome = tomoe(*command)
        refused(outcome, "did not make the model better", "--force")
        assert "--resume" not in outcome.err
    losses = itertools.count(9.0, -1.0)
    assert tomoe(*options(place, "train.learning_rate=1e-4"), "-o", out, "--force").code == 0
    assert tomoe("generate", out, "the sea", "--max-new-tokens", "1").code == 0


def test_the_best_step_is_kept_and_named(
    tomoe: CommandLine, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([5.0, 4.0, 3.0, 4.0, 4.0])
    monkeypatch.setattr(HeldOutLoss, "__call__", lambda self: next(losses))
    assert tomoe(*options(place), "-o", tmp_path / "tuned").code == 0
    plan = Plan.load(tmp_path / "tuned")
    assert [plan.notes[FINETUNED][key] for key in ("kept_step", "held_out_before", "held_out")] == [2, 5.0, 3.0]
    assert "step 2 was best on held-out text" in tomoe("inspect", tmp_path / "tuned").out
    kept = safetensors.torch.load_file(tmp_path / "tuned" / "run" / "weights" / "step-000002" / "weights.safetensors")
    moe = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert torch.equal(moe.model.layers[0].mlp.up_proj, kept["model/layers/0/mlp/up_proj"])


def test_a_full_disk_keeps_the_last_checkpoint(
    tomoe: CommandLine, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, calls = tmp_path / "tuned", safetensors.torch.save_file, iter(range(10**6))

    def full(tensors: Any, path: Path, **options: Any) -> None:
        # two files of step 0, one of step 2; the text is written so as well
        if path.parent.name.startswith(".part-") and next(calls) >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tensors, path, **options)

    with monkeypatch.context() as only_here:
        only_here.setattr(run_folder, "save_file", full)
        outcome = tomoe(*options(place), "-o", out)
    assert outcome.code == 2
    assert "checkpoint of step 2" in outcome.err.splitlines()[-1]
    assert "No space left" in outcome.err.splitlines()[-1]
    assert [path.name for path in (out / "run" / "weights").iterdir()] == ["step-000000"]
    assert tomoe(*options(place), "-o", out, "--resume").code == 0


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
    assert "name it with --dense" in sentence(*own, "--dense", tmp_path / "off", "-o", out)
    shutil.copytree(place / "out", tmp_path / "bare", ignore=shutil.ignore_patterns("run"))
    assert "name some with --data" in sentence("finetune", tmp_path / "bare", "-o", out)
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
    moe = AutoModelForCausalLM.from_pretrained(place / "out", dtype=torch.bfloat16)
    shutil.copytree(place / "out", tmp_path / "half")
    moe.save_pretrained(tmp_path / "half")
    own = options(place, "train.dtype=float32")
    own[1] = tmp_path / "half"
    assert tomoe(*own, "-o", tmp_path / "tuned").code == 0
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert {name for name, p in tuned.named_parameters() if p.dtype != torch.bfloat16} == {
        name for name, _ in tuned.named_parameters() if "router." in name
    }
