"""`tomoe export` of fine-grained experts: what it says, how it proves by parts, and what a wrong export is caught by."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tomoe.exporting.stock.fine_grained as fine_grained
import tomoe.exporting.verify as verify
from pico_files import SMALL, CommandLine, Outcome, pico_recipe, proved, refused, write_pico, write_text
from pico_tokenizer import TOKENIZER
from tomoe.exporting.stock.architecture import StockArch
from tomoe.exporting.verify import RouterAgreement, StoredRun
from tomoe.files import format_bytes
from tomoe.moe.modeling_tomoe import ToMoEMLP
from tomoe.pipeline.convert import convert
from tomoe.recipe.conversion import Recipe

pytestmark = pytest.mark.slow
FINE = ("experts.form=fine", "experts.num_experts=8", "experts.expert_size=32", "target=glm4_moe", "train.steps=0")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder with fine-grained experts, the first layer whole."""
    place = tmp_path_factory.mktemp("made")
    dense = write_pico(place / "dense", vocab_size=len(TOKENIZER), num_hidden_layers=3)
    TOKENIZER.save_pretrained(dense)
    write_text(place / "text.txt")
    convert(pico_recipe(place, *FINE, "active=0.8125"), place / "moe")
    return place / "moe"


def test_auto_writes_a_glm4_moe_and_proves_it_by_parts(tomoe: CommandLine, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = tomoe("export", made, "-o", out)
    proof = proved(done, out)
    assert "glm4_moe: Glm4Moe holds it up to the rounding of its router" in done.err
    assert "in each of 2 layers, 1 dense before them" in done.err
    assert "not for speed" not in done.err
    assert "with all experts largest difference" in done.out
    metadata = json.loads((out / "export.json").read_text())
    assert format_bytes(metadata["bytes"]) in done.err
    tensors = load_file(out / "model.safetensors")
    assert metadata["bytes"] == sum(t.nbytes for name, t in tensors.items() if "e_score" not in name)
    routers, whole = proof["routers"], proof["all_experts"]
    assert routers["choices"] == 2 * int(SMALL["data.evaluation_tokens"])
    assert routers["same"] > 0.95  # 0.996 to 1 over six seeds
    assert 0 < routers["weight_error"] < 2**-9
    assert whole["largest_difference"] < 1e-5 * whole["largest_logit"]
    assert whole["reference_perplexity"] != proof["reference_perplexity"]
    assert "routers choose the same experts" in (out / "README.md").read_text()


def caught(done: Outcome, *words: str) -> None:
    """The proof of the export failed with these words, and nothing was left."""
    assert done.code == 2, done
    last = " ".join(done.err.splitlines()[-1].split())
    assert last.startswith("tomoe: the export would not be the same model: ")
    for word in ("nothing was written", *words):
        assert word in last


Fault = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What makes a function wrong."""


def scaled(factor: float) -> Fault:
    return lambda right: lambda *args: [factor * eps for eps in right(*args)]


def biased(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: object) -> tuple[Tensor, Tensor]:
        weight, corrections = right(*args)
        return weight, 4 * corrections

    return wrong


def without(expert: int | None) -> Fault:
    def fault(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(target: StockArch, mlp: ToMoEMLP, layout: object, n: int | None) -> tuple[Tensor, Tensor, Tensor]:
            gate, up, down = right(target, mlp, layout, n)
            return gate, up, torch.zeros_like(down) if n == expert else down

        return wrong

    return fault


def backwards(right: Callable[..., Any]) -> Callable[..., Any]:
    """With all experts nothing differs, and the routers choose the same numbers."""
    return lambda target, mlp, layout, n: right(target, mlp, layout, n if n is None else mlp.num_experts - 1 - n)


MISSING = "with all experts its predictions", "layer 1 is the first to differ"
FAULTS: dict[str, tuple[object, str, Fault, tuple[str, ...]]] = {
    "a scale that is too large": (fine_grained, "router_scales", scaled(2.0**6), ("weights of its experts are off",)),
    "a scale that is too small": (fine_grained, "router_scales", scaled(2.0**-10), ("its routers choose",)),
    "a wrong bias": (fine_grained, "router_tensors", biased, ("its routers choose",)),
    "an expert is missing": (StockArch, "matrices", without(3), MISSING),
    "the shared expert is missing": (StockArch, "matrices", without(None), MISSING),
    "another order": (
        StockArch,
        "matrices",
        backwards,
        ("with the planned experts its predictions differ by a KL of",),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_export_is_caught(
    fault: str, tomoe: CommandLine, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, name, wrong, words = FAULTS[fault]
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    # the experts of so small a model are much alike: 0.034 to 0.086 over six seeds
    monkeypatch.setattr(verify, "PLANNED_KL", 1e-3)
    caught(tomoe("export", made, "-o", tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 20 neurons, stored in bfloat16."""
    place = tmp_path_factory.mktemp("narrow")
    TOKENIZER.save_pretrained(write_pico(place / "dense", vocab_size=len(TOKENIZER), num_hidden_layers=3))
    write_text(place / "text.txt")
    changes = ("experts.num_experts=16", "experts.expert_size=20", "train.dtype=bfloat16", "repair.mode=none")
    convert(pico_recipe(place, *FINE, *changes, "active=0.8173"), place / "moe")
    return place / "moe"


def test_what_runs_in_float32_alone_is_caught(tomoe: CommandLine, narrow: Path, tmp_path: Path) -> None:
    """Rows of 20 numbers are 80 bytes in float32 and 40 in bfloat16: transformers' grouped product wants multiples of 16."""
    done = tomoe("export", narrow, "-o", tmp_path / "out", "--width-multiple", "4")
    caught(done, "it does not run in bfloat16, in which it is stored: ")
    done = tomoe("export", narrow, "-o", tmp_path / "out")
    assert 0 < proved(done, tmp_path / "out")["as_stored"]["kl"] < 0.1
    assert "bfloat16, as stored: KL" in done.out


def test_a_run_in_the_stored_dtype_can_fail() -> None:
    assert StoredRun("bfloat16", 32, 0.02).problem is None
    for kl in (2.0, float("nan")):
        assert "in bfloat16, in which it is stored, its predictions differ" in str(
            StoredRun("bfloat16", 32, kl).problem
        )


def test_a_conversion_takes_fewer_experts_where_that_saves_zeros(tomoe: CommandLine, tmp_path: Path) -> None:
    """32 experts of 10 neurons would be stored as 32 of 16; 24 of 16 are asked for, learned, extracted and exported."""
    TOKENIZER.save_pretrained(write_pico(tmp_path / "dense", vocab_size=len(TOKENIZER), num_hidden_layers=3))
    write_text(tmp_path / "text.txt")
    sizes = ("experts.num_experts=32", "experts.width_multiple=8", "experts.shared=0.4")
    changes = (*sizes, "train.steps=2", "active=0.8221")
    plan = convert(pico_recipe(tmp_path, "experts.form=fine", "target=glm4_moe", *changes), tmp_path / "moe")
    assert plan.num_experts == 24
    assert {layer.expert_size for layer in plan.counts} == {16}
    assert plan.active_fraction() == pytest.approx(0.8221, abs=0.002)
    done = tomoe("export", tmp_path / "moe", "-o", tmp_path / "out", "--unverified")
    assert done.code == 0, done.err
    assert "24 experts of 16 neurons, 14 for each token, and a shared one of 128" in done.err
    assert tomoe("plan", tmp_path / "moe" / "run", "-o", tmp_path / "plan").code == 0


def test_every_part_of_the_proof_can_fail() -> None:
    good = RouterAgreement(
        choices=122_880, same=0.99, furthest_logits=0.003, furthest=0.5, weight_error=1e-3, weight_bound=2**-8
    )
    assert good.problem is None
    for changes, words in (
        ({"same": 0.8}, "20.0% of 122,880 cases, ties are at most 3.5%"),
        ({"same": 0.96}, "4.0% of"),
        ({"same": 0.9, "choices": 96}, "10.0% of 96 cases, ties are at most 8.9%"),
        ({"furthest": 3.0}, "0.003 lower"),
        ({"weight_error": 0.01}, "off 1 by up to 0.01"),
        ({"weight_error": float("nan")}, "off 1"),
    ):
        assert words in str(replace(good, **changes).problem)


def test_targets_and_forms_that_do_not_fit_are_refused_before_anything_is_read(tomoe: CommandLine) -> None:
    done = tomoe("convert", "nothing", "-o", "out", "--set", "experts.form=fine", "--set", "target=mixtral")
    refused(done, "target mixtral does not support experts.form = fine", "set target to glm4_moe, ", "hf or gpu")
    done = tomoe("convert", "nothing", "-o", "out", "--set", "experts.form=overlapping", "--set", "target=glm4_moe")
    refused(done, "target glm4_moe does not support experts.form = overlapping", "mixtral, gguf or hf")
    for target, form in (("gguf", "fine"), ("gguf", "overlapping"), ("hf", "fine"), ("glm4_moe", "fine")):
        Recipe.load(None, [f"target={target}", f"experts.form={form}"])


@pytest.mark.engine
def test_a_gguf_file_is_proved_by_parts_too_and_a_wrong_one_is_caught(
    tomoe: CommandLine, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")
    out = tmp_path / "out"
    command = ("export", made, "--format", "gguf", "--weights", "f32", "--tokens", "64", "-o")
    proof = proved(tomoe(*command, out), out)
    assert proof["all_experts"]["largest_difference"] < 5e-3
    assert proof["routers"]["same"] > 0.95
    # the file without experts, which ran beside it, is gone
    assert sorted(p.name for p in out.iterdir()) == [".README.md.sha256", "README.md", "export.json", "model-f32.gguf"]
    right = StockArch.matrices
    monkeypatch.setattr(StockArch, "matrices", lambda *args: tuple(1.3 * t for t in right(*args)))
    caught(tomoe(*command, tmp_path / "wrong"), "with all experts")
