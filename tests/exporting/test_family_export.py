"""`tomoe export` of families with attention of their own, from the conversion on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_contract import write_tiny
from transformers import AutoModelForCausalLM

from pico_files import SMALL, CommandLine, refused, write_text
from tomoe.budget import decoder_params, mlp_params
from tomoe.conversion import convert
from tomoe.model.structure import shape_of
from tomoe.plan import Plan
from tomoe.recipe.conversion import Recipe

pytestmark = pytest.mark.slow
# A family, its class, what the tiny model has otherwise, and how many experts a token may use.
FAMILIES = {
    "qwen3_5_text": ("qwen3_5_moe", {}, 30),
    "lfm2": ("lfm2_moe", dict(layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False), 30),
    "gemma4_text": ("gemma4", dict(num_global_key_value_heads=2, global_head_dim=32), 30),
}


def converted(place: Path, family: str, *changes: str) -> Path:
    target, sizes, _ = FAMILIES[family]
    shape = shape_of(write_tiny(family, place / "dense", **sizes))
    # half of the neurons for a token: whole experts, with a shared part or without
    active = 1 - 0.5 * shape.num_layers * mlp_params(shape, shape.mlp_size) / decoder_params(shape)
    text = write_text(place / "text.txt", sentences=400)
    changed = {
        "train.steps": "2", "model": str(place / "dense"), "data.sources": str(text), "target": target,
        "active": f"{active:.6f}", "repair.mode": "none", "experts.form": "fine", "experts.width_multiple": "8",
        "experts.num_experts": "32",
    }  # fmt: skip
    convert(
        Recipe.load(None, [*(f"{key}={value}" for key, value in (SMALL | changed).items()), *changes]), place / "moe"
    )
    return place / "moe"


@pytest.mark.parametrize("family", FAMILIES)
def test_convert_makes_what_the_family_s_class_holds(family: str, tomoe: CommandLine, tmp_path: Path) -> None:
    target, _, most = FAMILIES[family]
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
    assert used <= most
    with torch.no_grad():
        written = exported.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert written.shape == (1, 7)


def test_what_a_class_has_no_place_for_is_refused_before_anything_is_read(tomoe: CommandLine) -> None:
    convert = ("convert", "nothing", "-o", "out", "--set")
    done = tomoe(*convert, "target=gemma4", "--set", "experts.shared=0.4")
    refused(done, "target gemma4 has no place for neurons that all tokens use", "set experts.shared to 0")
    done = tomoe(*convert, "target=qwen3_5_moe", "--set", "experts.dense_layers=2")
    refused(done, "has experts in every layer", "experts.dense_layers is 2")


def test_a_family_of_another_class_is_refused(tomoe: CommandLine, tmp_path: Path) -> None:
    write_tiny("lfm2", tmp_path / "dense", **FAMILIES["lfm2"][1])
    done = tomoe("convert", tmp_path / "dense", "-o", tmp_path / "out", "--set", "target=qwen3_5_moe")
    refused(done, "target qwen3_5_moe cannot hold what this model becomes: it is a lfm2 model")
