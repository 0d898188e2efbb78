"""`tomoe export` of families with attention of their own, from the conversion on."""

from __future__ import annotations

from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
import torch
from family_contract import write_tiny
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from pico_files import CommandLine, Outcome, proved, refused, small, write_text
from pico_tokenizer import TOKENIZER
from tomoe.budget import decoder_params, mlp_params, router_params
from tomoe.cli import main
from tomoe.model.structure import shape_of
from tomoe.plans import Plan
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.target_rules import MAX_EXPERTS_PER_TOKEN
from tomoe.report import build

pytestmark = pytest.mark.slow
# A family, its class, the number of experts, and what the tiny model has otherwise.
LFM2 = dict(layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False)
GEMMA4 = dict(num_global_key_value_heads=2, global_head_dim=32, vocab_size_per_layer_input=len(TOKENIZER))
FAMILIES = {
    "qwen3_5_text": ("qwen3_5_moe", 12, {}),
    "lfm2": ("lfm2_moe", 13, LFM2),
    "gemma4_text": ("gemma4", 16, GEMMA4),
}


@dataclass(frozen=True)
class Made:
    """The folder of a converted family, and what `tomoe convert --format auto` did."""

    family: str
    target: str
    folder: Path
    done: Outcome


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    place, family = tmp_path_factory.mktemp("made"), request.param
    target, number, sizes = FAMILIES[family]
    shape = shape_of(write_tiny(family, place / "dense", vocab_size=len(TOKENIZER), **sizes))
    TOKENIZER.save_pretrained(place / "dense")
    # half of the neurons for a token: whole experts, with a shared part or without
    saved = 0.5 * mlp_params(shape, shape.mlp_size) - router_params(shape, number)
    active = 1 - shape.num_layers * saved / decoder_params(shape)
    experts = {"experts_form": "fine", "experts_width_multiple": "8", "experts_num_experts": str(number)}
    options = small(train_steps="2", repair_mode="none", **experts)
    where = [str(place / "dense"), "--data", str(write_text(place / "text.txt")), "-o", str(place / "moe")]
    said = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
        patch.setattr(build, "LOOP_LENGTH", 8)
        patch.setattr(build, "all_figures", lambda *_: [])
        with pytest.raises(SystemExit) as left:
            main(["convert", *where, "--format", "auto", "--active", f"{active:.6f}", *options])
    return Made(family, target, place / "moe", Outcome(int(left.value.code or 0), "", said.getvalue()))


def test_convert_makes_what_the_family_s_class_holds(made: Made) -> None:
    family, out = made.family, made.folder / "export-auto"
    proof = proved(made.done, out)
    assert f"{made.target}: " in made.done.err
    assert Recipe.load(made.folder / "recipe.json").target == made.target
    plan = Plan.load(made.folder)
    biased = any(bool(layer.router_bias.any()) for layer in plan.layers if layer.router_bias is not None)
    assert biased == (family == "lfm2")
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
    adjustable = "How many experts a token uses is a number at load time"
    assert (adjustable in card) == (family == "lfm2")
    assert ("How many experts a token uses is fixed in this form" in card) == (family != "lfm2")


@pytest.mark.engine
def test_llama_cpp_runs_a_file_of_it(made: Made, tomoe: CommandLine, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")
    out = tmp_path / "out"
    done = tomoe("export", made.folder, "--format", "gguf", "--weights", "f32", "-o", out, "--tokens", "64")
    if made.family == "gemma4_text":
        refused(done, "gguf cannot represent this model exactly")
        return
    proof = proved(done, out)
    assert proof["routers"]["same"] > 0.95
    assert proof["all_experts"]["largest_difference"] < 1e-3
    architecture = GGUFReader(out / "model-f32.gguf").fields["general.architecture"].contents()
    assert architecture == {"lfm2": "lfm2moe", "qwen3_5_text": "qwen35moe"}[made.family]


def test_what_a_class_has_no_place_for_is_refused_before_anything_is_read(tomoe: CommandLine) -> None:
    convert = ("convert", "nothing", "-o", "out", "--set")
    done = tomoe(*convert, "target=gemma4", "--set", "experts.shared=0.4")
    refused(done, "target gemma4 has no shared part of neurons for all tokens", "set experts.shared to 0")
    done = tomoe(*convert, "target=qwen3_5_moe", "--set", "experts.dense_layers=2")
    refused(done, "has experts in every layer", "experts.dense_layers is 2")


def test_what_a_gguf_file_of_a_family_cannot_hold_is_refused_before_the_work(
    tomoe: CommandLine, tmp_path: Path
) -> None:
    write_tiny("lfm2", tmp_path / "dense", **LFM2)
    options = ("--set", "target=gguf", "--set", "experts.num_experts=32", "--active", "0.8")
    for command in (("convert", tmp_path / "dense", "-o", tmp_path / "out"), ("doctor", tmp_path / "dense")):
        refused(
            tomoe(*command, *options), "wants the experts of target = lfm2_moe, which an export to gguf then writes"
        )
