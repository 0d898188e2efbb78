"""A frozen base in 8 or 4 bits serves training only: everything that comes out is about the original weights."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conftest import make_network, make_pico, mask_step, tokens
from pico_files import pico_recipe, small, succeed, write_pico, write_text
from stored_models import write_gguf
from tomoe.conversion import verbs
from tomoe.data.corpus import Corpus, Sequences
from tomoe.errors import UserError
from tomoe.evaluation.evaluate import evaluate
from tomoe.evaluation.results import read_rows
from tomoe.memory import estimate
from tomoe.model import quantized
from tomoe.model.loading import fingerprint, load_config, load_dense
from tomoe.model.structure import check_output, shape_of
from tomoe.moe.fold import fold
from tomoe.plan import REPAIRED, Plan
from tomoe.pruning.repair.plan import repair_plan
from tomoe.recipe.conversion import Recipe

pytestmark = pytest.mark.slow

needs_library = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
KINDS = [pytest.param(kind, marks=needs_library) for kind in ("int8", "nf4")]
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}


def fill(folder: Path) -> Path:
    write_pico(folder / "dense", **SIZES)
    write_text(folder / "text.txt")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path)


def unpacked(module: Any) -> Tensor:
    """The numbers that a quantized projection stands for, by the library's own definition of its format."""
    weight = module.weight
    if type(weight).__name__ == "Int8Params":
        codes, scales = (module.state.CB, module.state.SCB) if module.state.CB is not None else (weight.CB, weight.SCB)
        return codes.float() * scales.float()[:, None] / 127
    import bitsandbytes as bnb

    return bnb.functional.dequantize_4bit(weight.data, weight.quant_state).float()


def projections(model: torch.nn.Module) -> list[Any]:
    """The matrices of all layers, in order."""
    return [module for name, module in model.named_modules() if name.endswith("_proj")]


@needs_library
def test_masks_learn_what_they_would_from_the_unpacked_weights(folder: Path) -> None:
    """In 4 bits: in 8, activations are rounded, too."""
    packed = load_dense(str(folder / "dense"), torch.float32, quantization="nf4")
    plain = load_dense(str(folder / "dense"), torch.float32)
    original = {name: t.clone() for name, t in plain.state_dict().items()}
    assert shape_of(packed) == shape_of(plain)
    for theirs, ours in zip(projections(packed), projections(plain), strict=True):
        ours.weight.data = unpacked(theirs)
    for name, t in original.items():
        off = float((plain.state_dict()[name] - t).norm() / t.norm())
        assert (0.001 < off < 0.15) if "_proj" in name else off == 0, (name, off)
    assert torch.equal(packed.lm_head.weight, plain.lm_head.weight)
    check_output(packed)
    ids = tokens(2, 16)
    sequences = Sequences(ids, torch.ones_like(ids, dtype=torch.bool))
    grads = []
    for model in (packed, plain):
        net = make_network(plain, "per_token")
        mask_step(model, net, pico_recipe(folder))(sequences, 0, 0)
        grads.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    assert float(grads[1].norm()) > 0
    assert apart(grads[0], grads[1]) < 1e-4


def learned(run: Path, step: int) -> dict[str, Tensor]:
    return load_file(run / "masks" / f"step-{step:06d}" / "masks.safetensors")


def apart(found: Tensor, meant: Tensor) -> float:
    return float((found - meant).norm() / meant.norm())


@pytest.mark.parametrize("quantization", KINDS)
def test_gradients_come_through_every_projection(quantization: str, folder: Path) -> None:
    """Also after a pass without gradients, at which some libraries change how weights are stored."""
    packed = load_dense(str(folder / "dense"), torch.float32, quantization=quantization)
    generator = torch.Generator().manual_seed(0)
    for module in projections(packed):
        weight = unpacked(module)
        x = torch.randn(1, 9, weight.shape[1], generator=generator)
        with torch.no_grad():
            module(x)
        y = module(x.requires_grad_())
        given = torch.randn(y.shape, generator=generator)
        y.backward(given)
        assert apart(x.grad, given @ weight) < 1e-5


@needs_library
@pytest.mark.parametrize(("start", "quantization"), [("carved", "int8"), ("random", "nf4")])
def test_masks_start_from_the_original_weights(start: str, quantization: str, folder: Path) -> None:
    """A random start needs the basis of their values. Then other weights give other gradients."""
    recipe = pico_recipe(folder, f"start={start}", "train.steps=2", "attention.pruning=static")
    packed, whole = (
        verbs.train(recipe.changed([f"train.quantization={kind}"]), folder / kind) for kind in (quantization, "none")
    )
    for step, same in ((0, True), (2, False)):
        meant = learned(whole, step)
        assert all(torch.equal(t, meant[name]) for name, t in learned(packed, step).items()) is same


@pytest.fixture(scope="module")
def in_4_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `dense`, `text.txt` and `moe`, whose masks learned from weights in 4 bits."""
    folder = fill(tmp_path_factory.mktemp("in_4_bits"))
    learning = {"train_quantization": "nf4", "train_steps": "2", "attention_pruning": "static"}
    after = {"repair_mode": "full", "repair_tokens": "256", "data_evaluation_tokens": "32"}
    options = small(**learning, **after)
    succeed("convert", folder / "dense", "--data", folder / "text.txt", "-o", folder / "moe", *options)
    return folder


@needs_library
def test_a_conversion_is_planned_repaired_and_folded_from_the_original_weights(in_4_bits: Path, tmp_path: Path) -> None:
    moe, original = in_4_bits / "moe", load_dense(str(in_4_bits / "dense"), torch.float32)
    made, found = Plan.load(moe), load_dense(str(moe), torch.float32)
    assert made.source == fingerprint(original)
    config = json.loads(original.config.to_json_string(use_diff=False))
    assert made.dense_config == {key: value for key, value in config.items() if not key.startswith("_")}
    assert made.rotated
    text = Corpus.load(moe / "run" / "corpus.safetensors").train.truncate(256)
    meant = repair_plan(made, original, text.input_ids, text.mask, Recipe.load(moe / "recipe.json").repair)
    for ours, theirs in zip(made.layers, meant.layers, strict=True):
        assert all(torch.equal(t, theirs.refit[name]) for name, t in ours.refit.items())
    assert made.notes[REPAIRED] == meant.notes[REPAIRED]
    assert made.notes[REPAIRED]["error_after"] < made.notes[REPAIRED]["error_before"]
    assert "quantization_config" not in found.config.to_dict()
    assert all(torch.equal(t, found.state_dict()[name]) for name, t in fold(original, made).state_dict().items())
    verbs.plan(moe / "run", tmp_path / "plan")
    assert (tmp_path / "plan" / "plan.safetensors").read_bytes() == (moe / "plan.safetensors").read_bytes()


@needs_library
def test_what_came_out_is_measured_beside_the_original(in_4_bits: Path) -> None:
    moe = in_4_bits / "moe"
    assert (moe / "report.html").exists()
    whole = evaluate([str(in_4_bits / "dense"), str(moe)], dtype="float32")
    assert [row.measurement.nll for row in read_rows(moe)] == [row.measurement.nll for row in whole]


@needs_library
def test_a_run_that_was_cut_off_resumes(in_4_bits: Path, tmp_path: Path) -> None:
    began = in_4_bits / "moe" / "run"
    run = shutil.copytree(began, tmp_path / "run")
    shutil.rmtree(run / "masks" / "step-000002")
    verbs.train(Recipe.load(began / "recipe.json"), run, resume=True)
    whole = learned(began, 2)
    assert all(torch.equal(t, whole[name]) for name, t in learned(run, 2).items())


@needs_library
@pytest.mark.parametrize(("quantization", "dtype"), [("int8", "float32"), ("nf4", "bfloat16")])
def test_packed_layers_take_the_memory_that_is_counted(quantization: str, dtype: str, folder: Path) -> None:
    packed = load_dense(str(folder / "dense"), getattr(torch, dtype), quantization=quantization)
    own = pico_recipe(folder, f"train.quantization={quantization}", f"train.dtype={dtype}")
    sizes = estimate.sizes_of(load_config(str(folder / "dense")), own)
    least = estimate.weight_bytes(sizes, getattr(torch, dtype), quantization)
    assert least < 0.8 * estimate.weight_bytes(sizes, getattr(torch, dtype))
    assert least <= sum(p.nbytes for p in packed.parameters()) < 1.1 * least
    with torch.no_grad():
        assert packed(tokens()).logits.dtype == getattr(torch, dtype)


def test_a_library_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"checkout of tomoe with: pip install '\.\[quantized\]'"):
        verbs.train(pico_recipe(folder, "train.quantization=nf4"), folder / "run")
    assert not (folder / "run").exists()


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.shard and train\.quantization = int8 cannot be combined"):
        Recipe.load(None, ["train.quantization=int8", "train.shard=true"])
    write_gguf(make_pico("llama"), tmp_path / "model.gguf")
    with pytest.raises(UserError, match=r"stored quantized already \(GGUF\)"):
        load_dense(str(tmp_path / "model.gguf"), torch.float32, quantization="nf4")
