"""The dtype that weights are multiplied in: which one is chosen, and that it leaves no trace in what is stored."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pico_files import pico_recipe, write_pico, write_text
from stored_models import edit_config, edit_tensors, write_gguf
from tomoe.errors import Note
from tomoe.finetuning.repair import repair
from tomoe.memory.estimate import least_memory, sizes_of
from tomoe.methods.registry import resolve_method
from tomoe.model.base_weights import BaseWeights
from tomoe.model.compute_dtype import compute_dtype
from tomoe.model.loading import fingerprint, load_dense, load_model, load_tokenizer
from tomoe.pipeline.convert import convert
from tomoe.pipeline.stages import plan, train
from tomoe.pipeline.steps import open_dense
from tomoe.plans import Plan
from tomoe.recipe.conversion import Recipe


def processor(monkeypatch: pytest.MonkeyPatch, *instructions: str) -> None:
    """Pretend to run on a processor with these instructions and no others."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(("avx512_f", *instructions), True))


@pytest.mark.parametrize(
    ("setting", "stored", "device", "instructions", "expected"),
    [
        ("auto", torch.bfloat16, "cpu", (), torch.float32),
        ("auto", torch.bfloat16, "cpu", ("avx512_bf16",), torch.bfloat16),
        ("auto", torch.bfloat16, "cpu", ("amx_bf16",), torch.bfloat16),
        ("auto", torch.bfloat16, "cuda", (), torch.bfloat16),
        ("auto", torch.float16, "cpu", (), torch.float16),
        ("stored", torch.bfloat16, "cpu", (), torch.bfloat16),
        ("float32", torch.bfloat16, "cpu", ("amx_bf16",), torch.float32),
    ],
)
def test_the_processor_decides_what_bfloat16_weights_compute_in(
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    stored: torch.dtype,
    device: str,
    instructions: tuple[str, ...],
    expected: torch.dtype,
) -> None:
    processor(monkeypatch, *instructions)
    assert compute_dtype(setting, stored, device) == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`dense`, stored in bfloat16, and `text.txt`."""
    folder = tmp_path_factory.mktemp("bfloat16")
    dense = write_pico(folder / "dense")
    edit_tensors(dense, lambda tensors: {name: t.bfloat16() for name, t in tensors.items()})
    edit_config(dense, dtype="bfloat16")
    write_text(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def in_float32(folder: Path) -> Recipe:
    """A recipe for weights stored in bfloat16 that compute in float32, and what `convert` makes of it, in `moe`."""
    recipe = pico_recipe(folder, "train.steps=2", "train.dtype=bfloat16", "train.compute_dtype=float32")
    convert(recipe, folder / "moe")
    return recipe


@pytest.mark.slow
@pytest.mark.usefixtures("in_float32")
def test_bfloat16_weights_in_float32_products_are_converted_as_float32_weights(folder: Path, tmp_path: Path) -> None:
    whole, halves = (
        convert(pico_recipe(folder, "train.steps=2", "train.dtype=float32"), tmp_path),
        Plan.load(folder / "moe"),
    )
    for a, b in zip(whole.layers, halves.layers, strict=True):
        assert torch.equal(a.router_weight, b.router_weight)
        assert torch.equal(a.expert_masks, b.expert_masks)
        assert (a.refit["down.weight"].dtype, b.refit["down.weight"].dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(a.refit["down.weight"].bfloat16(), b.refit["down.weight"])


@pytest.mark.slow
@pytest.mark.usefixtures("in_float32")
def test_the_result_is_stored_as_the_recipe_says_with_the_dense_values(folder: Path) -> None:
    moe, dense = (load_dense(str(folder / name), torch.float32) for name in ("moe", "dense"))
    stored = load_model(str(folder / "moe"), "bfloat16", "cpu")
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert torch.equal(moe.get_parameter(name), dense.get_parameter(name))
    assert {p.dtype for name, p in stored.named_parameters() if "router" not in name} == {torch.bfloat16}
    assert '"dtype": "bfloat16"' in (folder / "moe" / "config.json").read_text()


@pytest.mark.slow
def test_train_then_plan_and_repair_compute_as_convert_does(folder: Path, in_float32: Recipe, tmp_path: Path) -> None:
    train(in_float32, tmp_path / "run")
    plan(tmp_path / "run", tmp_path / "plan")
    repair(folder / "moe", tmp_path / "again")
    made = (folder / "moe" / "plan.safetensors").read_bytes()
    assert all((tmp_path / name / "plan.safetensors").read_bytes() == made for name in ("plan", "again"))


def test_weights_that_are_read_layer_by_layer_are_multiplied_as_whole_ones_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor(monkeypatch)
    models = []
    for changes in ([], ["offload=true", "train.steps=0", "data.sources=text.txt"]):
        base = BaseWeights.of(Recipe.load(None, [f"model={folder / 'dense'}", "device=cpu", *changes]))
        assert base.compute == torch.float32
        models.append(base.for_training())
    whole, offloaded = models
    ids = torch.arange(3, 35)[None]
    assert offloaded(ids).logits.dtype == torch.float32
    assert torch.equal(offloaded(ids).logits, whole(ids).logits)
    assert fingerprint(offloaded) == fingerprint(whole)
    base.to_stored_dtype_(offloaded)
    assert {p.dtype for p in offloaded.parameters()} == {torch.bfloat16}


def test_float32_products_are_counted_in_memory(folder: Path) -> None:
    config = load_dense(str(folder / "dense"), torch.bfloat16).config
    recipes = [Recipe.load(None, ["device=cpu", f"train.compute_dtype={dtype}"]) for dtype in ("stored", "float32")]
    half, whole = (least_memory(sizes_of(config, recipe), *resolve_method(recipe))[0].parts for recipe in recipes)
    assert 2 * half["weights in bfloat16"] == whole["weights in float32"]


@pytest.mark.parametrize(
    ("kept", "computing"), [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")]
)
def test_auto_leaves_weights_as_they_are_stored(
    model: Path, monkeypatch: pytest.MonkeyPatch, kept: str, computing: str
) -> None:
    processor(monkeypatch, "avx512_bf16")
    edit_tensors(model, lambda tensors: {name: t.to(getattr(torch, kept)) for name, t in tensors.items()})
    loaded = load_model(str(model), "auto", "cpu")
    assert loaded.dtype == getattr(torch, computing)
    stored = load_file(model / "model.safetensors")
    assert all(torch.equal(t, stored[name].to(t.dtype)) for name, t in loaded.state_dict().items() if name in stored)


@pytest.mark.parametrize(
    ("file", "kept", "words"),
    [
        ("", "float32", "float32"),
        ("", "float16", "float16"),
        ("", "bfloat16", None),
        ("model.gguf", "float32", "float32"),
        ("model.gguf", "float16", "float16"),
    ],
)
def test_weights_that_a_conversion_rounds_are_named(model: Path, file: str, kept: str, words: str | None) -> None:
    """Unless the recipe asks for that dtype."""
    place, dtype = model / file, getattr(torch, kept)
    if file:
        write_gguf(load_dense(str(model), dtype), place, load_tokenizer(str(model)))
    else:
        edit_tensors(model, lambda tensors: {name: t.to(dtype) for name, t in tensors.items()})

    def opened(*changes: str) -> list[str]:
        recipe = Recipe.load(None, [f"model={place}", "method.name=inputs", "device=cpu", *changes])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", Note)
            open_dense(*resolve_method(recipe), BaseWeights.of(recipe))
        return [str(warning.message) for warning in caught]

    said = [f"are stored in {words}, and are rounded to bfloat16" in message for message in opened()]
    assert said == ([True] if words else [])
    assert opened("train.dtype=bfloat16") == opened("train.dtype=float32") == []


def test_measuring_chooses_as_well(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch)
    assert load_model(str(folder / "dense"), "auto", "cpu").dtype == torch.float32
    processor(monkeypatch, "avx512_bf16")
    assert load_model(str(folder / "dense"), "auto", "cpu").dtype == torch.bfloat16


def test_the_paper_computes_as_stored() -> None:
    assert Recipe.load("paper").train.compute_dtype == "stored"
    assert Recipe(train={"steps": 3}).train.compute_dtype == "auto"
