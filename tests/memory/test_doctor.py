"""The doctor: counts from the config alone, stages that do not fit, settings that would help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from family_contract import tiny_config
from transformers import AutoConfig

from conftest import make_pico
from pico_files import CommandLine, write_pico
from tomoe.errors import UserError
from tomoe.memory import doctor, estimate
from tomoe.methods.registry import resolve_method
from tomoe.model.structure import shape_of
from tomoe.recipe.conversion import Recipe
from tomoe.training.tuning_memory import Tuning


def test_an_mlp_of_another_formula_is_refused_without_weights() -> None:
    with pytest.raises(UserError, match="the MLP of layer 0 is not the usual formula"):
        estimate.sizes_of(tiny_config("falcon_h1", mlp_multipliers=[0.9, 0.2]), Recipe())


@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "opt", "phi3", "apertus", "nemotron_h"])
def test_the_doctor_passes_the_usual_formula(model_type: str) -> None:
    assert estimate.sizes_of(tiny_config(model_type), Recipe()).shape.num_layers > 0


def test_a_model_that_reads_more_than_text_is_called_by_its_name() -> None:
    config = AutoConfig.for_model("qwen3_vl")
    with pytest.raises(UserError, match=r"'qwen3_vl' model, which reads more than text, .* \('qwen3_vl_text'\) alone"):
        estimate.sizes_of(config, Recipe())


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    return write_pico(tmp_path / "deep", num_hidden_layers=6)


def free(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """So much is free that a stage of so many bytes just fits."""
    available = estimate.AvailableMemory(int((1 - estimate.MARGIN) * memory) + 1, 0)
    monkeypatch.setattr(doctor, "available_memory", lambda device: available)


def test_remedies_are_settings_with_which_training_may_fit(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["train.steps=10", "train.batch_size=8", "train.dtype=float32", "repair.mode=none"]
    recipe = Recipe.load(None, [f"model={deep}", *changes])
    found = doctor.examine(recipe)

    def needed(*settings: str) -> int:
        return estimate.least_memory(found.sizes, *resolve_method(recipe.changed(settings)))[0].total

    checkpointed, shorter, single = "train.gradient_checkpointing=true", "data.seq_len=256", "train.batch_size=1"
    assert needed(single) < needed(checkpointed) < needed(shorter) < needed()
    assert needed() == found.least[0].total
    free(monkeypatch, needed())
    assert doctor.examine(recipe).lacking == []
    free(monkeypatch, needed(shorter))
    found = doctor.examine(recipe)
    assert found.lacking == ["training"]
    assert found.remedies == [checkpointed, shorter, single]


def test_too_little_memory_is_said_with_what_would_help(
    tomoe: CommandLine, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sentence(*options: str) -> str:
        outcome = tomoe("doctor", deep, *options)
        assert outcome.code == 2
        return " ".join(outcome.err.split()).rpartition("tomoe: ")[2]

    free(monkeypatch, 10**4)
    words = "this machine has too little free memory for carving, repair, folding"
    assert sentence() == f"{words}; with offload=true and a text of your own, carving holds one layer at a time"
    learning = sentence("--steps", "10", "--set", "data.sources=text.txt")
    assert learning.endswith("folding; with offload=true, train.steps=0, carving holds one layer at a time")
    assert sentence("--set", "offload=true", "--set", "data.sources=text.txt") == words
    # whatever a processor computes in
    changes = ("data.seq_len=100000", "repair.mode=none", "train.dtype=float32")
    checkpointed = Recipe.load(None, [f"model={deep}", "train.steps=10", *changes, "train.gradient_checkpointing=true"])
    free(monkeypatch, doctor.examine(checkpointed).least[0].total)
    long = ("--steps", "10", *(word for change in changes for word in ("--set", change)))
    assert "for training; training may fit with train.gradient_checkpointing=true; with" in sentence(*long)


def test_the_doctor_says_what_is_always_read(tomoe: CommandLine, deep: Path) -> None:
    """Here that is nearly all but the experts, of which one is left."""
    found = doctor.examine(Recipe.load(None, [f"model={deep}", "active=0.5"]))
    read, decoding = found.sizes.decoder_params + found.sizes.output, found.decoding
    assert decoding.speedup(0.5) == pytest.approx(read / (read - found.sizes.decoder_params / 2))
    assert found.active == 0.5
    paper = doctor.examine(Recipe.load("paper", [f"model={deep}", "active=0.5"]))
    assert paper.active == 0.5 + paper.decoding.routers / paper.sizes.decoder_params, "its budget counts no routers"
    assert decoding.speedup(0.5) < decoding.speedup(found.one_expert) < 1 / decoding.always
    assert found.sizes.least_active <= found.one_expert < 0.5
    shown = tomoe("doctor", deep, "--active", "0.5", "--set", "device=cpu").out
    assert f"{decoding.speedup(0.5):.1f} times at 50%" in shown
    assert "in Q4_K" in shown
    inputs = tomoe("doctor", deep, "--method", "inputs", "--set", "device=cpu").out
    assert "in bf16." in inputs, "there is no GGUF of them"


def test_the_bound_that_is_named_is_one_that_works(tomoe: CommandLine, deep: Path) -> None:
    refused = tomoe("doctor", deep, "--active", "0.05")
    assert refused.code == 2
    said = " ".join(refused.err.split())
    assert "no further" in said
    named = said.partition("can be cut to ")[2].split()[0]
    assert "can be cut to" not in tomoe("doctor", deep, "--active", named).err


@pytest.mark.parametrize("method", ["carve", "inputs"])
def test_the_doctor_says_which_work_fits(
    tomoe: CommandLine, deep: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    needed = doctor.examine(Recipe.load(None, [f"model={deep}", "active=0.6", f"method.name={method}"])).works
    assert list(needed)[:2] == ["conversion", "the paper's training"]
    eight_bit, full = (size for name, size in needed.items() if name.startswith("full"))
    assert 0 < eight_bit < full
    monkeypatch.setattr(doctor, "available_memory", lambda device: estimate.AvailableMemory(eight_bit, 0))
    said = " ".join(tomoe("doctor", deep, "--active", "0.6", "--method", method).out.split())
    fits, _, left = said.partition("Does not fit: ")
    assert "full fine-tuning with train.optimizer=adamw8bit" in fits.partition("Fits into what is free: ")[2]
    assert "full fine-tuning " in left


def test_adapters_take_less_than_all_weights() -> None:
    shape = shape_of(make_pico("llama", hidden_size=512, intermediate_size=2048))
    full = Tuning(shape, 0, 1, 64)
    assert replace(full, rank=8).total(16) < replace(full, eight_bit=True).total(16) < full.total(16)
    assert replace(full, checkpointing=True).of_a_token() < full.of_a_token()
    # a step has 32,768 tokens at most, whatever fits, and a batch that does not fit is none
    assert (full.rows(10**12, 16, 1), full.rows(10**12, 16, 4), full.rows(0, 16, 1)) == (2048, 512, 0)
