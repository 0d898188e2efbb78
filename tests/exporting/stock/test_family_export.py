"""`tomoe export` of families with attention of their own, from the conversion on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_contract import write_tiny
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from pico_files import SMALL, CommandLine, refused, small, write_text
from pico_tokenizer import TOKENIZER
from tomoe.budget import decoder_params, mlp_params
from tomoe.conversion.convert import convert
from tomoe.model.structure import shape_of
from tomoe.plan import Plan
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.target_rules import MAX_EXPERTS_PER_TOKEN

pytestmark = pytest.mark.slow
# A family, its class, and what the tiny model has otherwise.
LFM2 = dict(layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False)
GEMMA4 = dict(num_global_key_value_heads=2, global_head_dim=32, vocab_size_per_layer_input=len(TOKENIZER))
FAMILIES = {
    "qwen3_5_text": ("qwen3_5_moe", {}),
    "lfm2": ("lfm2_moe", LFM2),
    "gemma4_text": ("gemma4", GEMMA4),
}


def converted(place: Path, family: str, *changes: str) -> Path:
    target, sizes = FAMILIES[family]
    shape = shape_of(write_tiny(family, place / "dense", vocab_size=len(TOKENIZER), **sizes))
    TOKENIZER.save_pretrained(place / "dense")
    # half of the neurons for a token: whole experts, with a shared part or without
    active = 1 - 0.5 * shape.num_layers * mlp_params(shape, shape.mlp_size) / decoder_params(shape)
    text = write_text(place / "text.txt", sentences=400)
    experts = ("experts.form=fine", "experts.width_multiple=8", "experts.num_experts=32")
    made = (f"model={place / 'dense'}", f"data.sources={text}", f"target={target}", f"active={active:.6f}")
    small = (f"{key}={value}" for key, value in SMALL.items())
    convert(Recipe.load(None, [*small, "train.steps=2", "repair.mode=none", *experts, *made, *changes]), place / "moe")
    return place / "moe"


@pytest.mark.parametrize("family", FAMILIES)
def test_convert_makes_what_the_family_s_class_holds(family: str, tomoe: CommandLine, tmp_path: Path) -> None:
    target, _ = FAMILIES[family]
    made, out = converted(tmp_path, family), tmp_path / "out"
    plan = Plan.load(made)
    biased = any(bool(layer.router_bias.any()) for layer in plan.layers if layer.router_bias is not None)
    assert biased == (family == "lfm2")
    done = tomoe("export", made, "-o", out)
    assert done.code == 0, done.err
    assert f"{target}: " in done.err
    proof = json.loads((out / "export.json").read_text())["proof"]
    assert proof["same"] is True
    assert proof["routers"]["same"] > 0.95
    assert proof["all_experts"]["largest_difference"] < 1e-4 * proof["all_experts"]["largest_logit"]
    windows = [far["what"] for far in proof["far"]]
    assert windows == (["beyond the window of 16 tokens"] if family == "gemma4_text" else [])
    exported = AutoModelForCausalLM.from_pretrained(out)
    config = exported.config
    used = config.top_k_experts if family == "gemma4_text" else config.num_experts_per_tok
    assert used <= MAX_EXPERTS_PER_TOKEN
    with torch.no_grad():
        written = exported.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert written.shape == (1, 7)
    card = " ".join((out / "README.md").read_text().split())
    dialed = "How many experts a token uses is a number at load time"
    assert (dialed in card) == (family == "lfm2")
    assert ("How many experts a token uses is fixed in this form" in card) == (family != "lfm2")


@pytest.mark.engine
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_llama_cpp_runs_a_file_of_it(family: str, tomoe: CommandLine, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")
    made, out = converted(tmp_path, family, "experts.num_experts=16"), tmp_path / "out"
    done = tomoe("export", made, "--format", "gguf", "--weights", "f32", "-o", out, "--tokens", "64")
    assert done.code == 0, done.err
    proof = json.loads((out / "export.json").read_text())["proof"]
    assert proof["same"] is True
    assert proof["routers"]["same"] > 0.95
    assert proof["all_experts"]["largest_difference"] < 1e-3
    architecture = GGUFReader(out / "model-f32.gguf").fields["general.architecture"].contents()
    assert architecture == {"lfm2": "lfm2moe", "qwen3_5_text": "qwen35moe"}[family]


def test_what_a_class_has_no_place_for_is_refused_before_anything_is_read(tomoe: CommandLine) -> None:
    convert = ("convert", "nothing", "-o", "out", "--set")
    done = tomoe(*convert, "target=gemma4", "--set", "experts.shared=0.4")
    refused(done, "target gemma4 has no place for neurons that all tokens use", "set experts.shared to 0")
    done = tomoe(*convert, "target=qwen3_5_moe", "--set", "experts.dense_layers=2")
    refused(done, "has experts in every layer", "experts.dense_layers is 2")


def test_convert_finds_the_class_of_the_family(tomoe: CommandLine, tmp_path: Path) -> None:
    write_tiny("lfm2", tmp_path / "dense", **LFM2)
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "moe"
    sizes = small(train_steps="0", experts_form="fine", experts_num_experts="32", repair_mode="none")
    done = tomoe(
        "convert", tmp_path / "dense", "--data", text, "-o", out, "--format", "auto", "--active", "0.8", *sizes
    )
    assert done.code == 0, done.err
    assert Recipe.load(out / "recipe.json").target == "lfm2_moe"
    assert json.loads((out / "export-auto" / "config.json").read_text())["model_type"] == "lfm2_moe"


@pytest.mark.parametrize(("family", "target"), [("lfm2", "lfm2_moe"), ("qwen3_5_text", "qwen3_5_moe")])
def test_what_a_gguf_file_of_a_family_cannot_hold_is_refused_before_the_work(
    family: str, target: str, tomoe: CommandLine, tmp_path: Path
) -> None:
    write_tiny(family, tmp_path / "dense", **FAMILIES[family][1])
    options = ("--set", "target=gguf", "--set", "experts.num_experts=32", "--active", "0.8")
    for verb in (("convert", tmp_path / "dense", "-o", tmp_path / "out"), ("doctor", tmp_path / "dense")):
        refused(tomoe(*verb, *options), f"wants the experts of target = {target}, which --format gguf then writes")


def test_a_family_of_another_class_is_refused(tomoe: CommandLine, tmp_path: Path) -> None:
    write_tiny("lfm2", tmp_path / "dense", **LFM2)
    done = tomoe("convert", tmp_path / "dense", "-o", tmp_path / "out", "--set", "target=qwen3_5_moe")
    refused(done, "target qwen3_5_moe cannot hold what this model becomes: it is a lfm2 model")
