"""The doctor: counts from the config alone, trials that really run, a line through two of them, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GPT2Config

from conftest import FAMILIES, make_pico
from pico_files import CommandLine, fine, small, write_pico
from tomoe.errors import UserError
from tomoe.memory import doctor, estimate, probe
from tomoe.memory.probe import STAGES, StageCost, Trial
from tomoe.model.structure import shape_of
from tomoe.recipe.conversion import Recipe

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_from_the_config_are_those_of_the_weights(family: str) -> None:
    model = make_pico(family)
    found = estimate.sizes_of(model.config, Recipe())
    assert found.shape == shape_of(model)
    assert found.total == sum(p.numel() for p in model.parameters())
    assert found.of_all(1.0) == 1.0
    assert found.of_all(0.0) == pytest.approx(1 - found.decoder_params / found.total)


def test_what_does_not_fit_is_refused_without_weights() -> None:
    with pytest.raises(UserError, match="decoder layers"):
        estimate.sizes_of(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64), Recipe())


@pytest.mark.parametrize("options", [small(repair_mode="full"), fine(active="0.6")], ids=["overlapping", "fine"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_can_be_tried(stage: probe.Stage, options: list[str], tmp_path: Path) -> None:
    folder = write_pico(tmp_path / "dense")
    recipe = Recipe.load(None, [f"model={folder}", *options[1::2]])
    cost = probe.run_trial(Trial(stage, str(folder), recipe.model_dump(mode="json")))
    assert cost.memory > 10**8  # Python and torch alone take more
    assert cost.seconds > 0


def linear(trial: Trial) -> StageCost:
    """The first layer takes 130 MB, every other one 30 MB more; checkpointing saves half of that in training."""
    layers = int(Path(trial.folder).name)
    a_layer = 15 if trial.recipe["train"]["gradient_checkpointing"] and trial.stage == "train" else 30
    return StageCost((100 + a_layer * layers) * 10**6, 0, 2.0 + layers)


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    return write_pico(tmp_path / "deep", num_hidden_layers=20)


def test_a_model_that_learns_nothing_is_not_trained_in_a_trial(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def note(trial: Trial) -> StageCost:
        tried.append(trial.stage)
        return linear(trial)

    monkeypatch.setattr(doctor, "_try", note)
    found = doctor.examine(Recipe.load(None, [f"model={deep}", *small(train_steps="0")[1::2]]), trials=True)
    assert set(tried) == {"carve", "repair", "fold"}
    assert [e.stage for e in found.estimates] == ["carve", "repair", "fold"]


def test_the_line_through_two_trials(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_try", linear)
    recipe = Recipe.load(None, [f"model={deep}", "train.steps=10", "repair.target=half", "train.compute_dtype=stored"])
    found = doctor.examine(recipe, trials=True)
    memory = {e.stage: e.memory for e in found.estimates}
    assert memory["train"] == memory["fold"] == 700 * 10**6
    # 4,096 tokens tried of 65,536: two streams of 32 and one layer's 512 activations, in bfloat16
    assert memory["repair"] == 700 * 10**6 + (65_536 - 4_096) * (2 * 32 + 512) * 2
    layer = sum(
        p.numel() for p in make_pico("llama", intermediate_size=512).model.layers[0].parameters() if p.dim() == 2
    )
    assert memory["carve"] == 310 * 10**6 + 13 * layer * (2 + 4)  # 7 layers tried, 13 more as bfloat16 and float32
    assert found.train_seconds == pytest.approx(10 * 22.0)


@pytest.mark.parametrize(("free", "remedy"), [(500, "train.gradient_checkpointing=true"), (200, None)])
def test_too_little_memory_is_said_with_what_would_help(
    tomoe: CommandLine, deep: Path, monkeypatch: pytest.MonkeyPatch, free: int, remedy: str | None
) -> None:
    monkeypatch.setattr(doctor, "_try", linear)
    monkeypatch.setattr(doctor, "available_memory", lambda device: estimate.AvailableMemory(free * 10**6, 0))
    outcome = tomoe("doctor", deep, "--trial", "--steps", "10")
    assert outcome.code == 2
    assert "too little free memory for " in outcome.err.splitlines()[-1]
    assert "700 MB" in outcome.out
    assert (f"would fit with {remedy}" in outcome.err) if remedy else ("would fit" not in outcome.err)


def test_nothing_runs_unless_it_is_requested(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_try", None)
    found = doctor.examine(Recipe.load(None, [f"model={deep}", "train.steps=10", "repair.mode=full"]))
    assert found.estimates == []
    assert [need.stage for need in found.least] == ["training", "repair", "folding"]


def test_progress_counts_the_trials(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_try", linear)
    progress: list[tuple[str, int, int]] = []
    recipe = Recipe.load(None, [f"model={deep}", "train.steps=10", "repair.mode=none"])
    doctor.examine(recipe, lambda stage, i, n, _: progress.append((stage, i, n)), trials=True)
    assert progress == [("trying on few layers", i, 6) for i in range(7)]


def test_a_trial_that_fails_is_one_sentence(tomoe: CommandLine, tmp_path: Path) -> None:
    """For real, in a process of its own."""
    folder = write_pico(tmp_path / "dense")
    (folder / "tokenizer.json").unlink()
    outcome = tomoe("doctor", folder, "--trial", *small())
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("tomoe: the stage carve failed on a model of only 2 layers")
    assert "cannot load the tokenizer" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_budget_out_of_reach_needs_no_trial(tomoe: CommandLine, deep: Path) -> None:
    outcome = tomoe("doctor", deep, "--active", "0.05")
    assert outcome.code == 2
    assert "can be cut to" in outcome.err


def test_what_it_prints_as_json(tomoe: CommandLine, deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_try", linear)
    settings = ["--steps", "10", "--set", "repair.mode=full"]
    outcome = tomoe("doctor", deep, "--trial", "--json", "--active", "0.6", *settings)
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found["sizes"]["shape"]["num_layers"] == 20
    assert found["remedies"] == {}
    assert [e["stage"] for e in found["estimates"]] == list(STAGES)
    assert found["estimates"][1]["memory"] == 700 * 10**6


def test_a_model_that_is_read_layer_by_layer(tomoe: CommandLine, deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Carving takes no more for more layers; nothing is learned."""
    monkeypatch.setattr(doctor, "_try", linear)
    settings = ("offload=true", "train.steps=0", "data.sources=text.txt", "repair.mode=none")
    values = [word for setting in settings for word in ("--set", setting)]
    done = tomoe("doctor", deep, "--trial", "--json", *values)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert {e["stage"]: e["memory"] for e in found["estimates"]} == {"carve": 310 * 10**6, "fold": 700 * 10**6}
    monkeypatch.setattr(doctor, "available_memory", lambda device: estimate.AvailableMemory(650 * 10**6, 0))
    assert "too little free memory for fold\n" in tomoe("doctor", deep, "--trial", *values).err
    monkeypatch.setattr(doctor, "available_memory", lambda device: estimate.AvailableMemory(300 * 10**6, 0))
    err = tomoe("doctor", deep, "--trial").err
    assert "; with offload=true and a text of your own, carving holds one layer at a time" in " ".join(err.split())
    err = tomoe("doctor", deep, "--trial", "--steps", "10", "--set", "data.sources=text.txt").err
    assert "; with offload=true, train.steps=0, carving holds one layer at a time" in " ".join(err.split())
