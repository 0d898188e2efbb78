"""The equation, one step on: masked dense model == every stock architecture that holds its plan; the rest is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from margins import assert_same, clear_tokens, meaning
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Exaone4ForCausalLM, OlmoForCausalLM, PreTrainedModel

from conftest import FORMS, PICO, make_pico, make_plan, randomise, tokens, write_export
from tomoe.errors import UserError
from tomoe.exporting.choice import TARGETS, choose_target
from tomoe.exporting.stock.plain_decoder import PlainDecoder
from tomoe.exporting.stock.table import STOCK_ARCHS
from tomoe.exporting.target import Options
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.plans import Plan
from tomoe.plans.repair.plan import repair_plan
from tomoe.recipe.conversion import RepairSection

pytestmark = pytest.mark.slow

# A pruned attention is filled up, with groups of heads or without; a window is read from it or from a whole one.
CASES = [("llama", "static"), ("llama3", "off"), ("mistral", "off"), ("mistral", "static")]
SMALL = Options(width_multiple=8)


@dataclass(frozen=True)
class Case:
    dense: PreTrainedModel
    plan: Plan
    folded: ToMoEForCausalLM
    folder: Path


def make_case(family: str, attention: str, folder: Path) -> Case:
    dense = make_pico(family)
    # many neurons, so that experts of all layers differ in width
    plan = make_plan(dense, attention, active=0.8)
    moe = fold(dense, plan)
    choice = choose_target(moe, "auto")
    assert choice.target.name == "mixtral"
    assert "exactly" in choice.reason
    write_export(choice, moe, None, folder, SMALL)
    return Case(dense, plan, moe, folder)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(*request.param, tmp_path_factory.mktemp("export") / "out")


def test_the_export_computes_what_the_masks_mean(case: Case) -> None:
    exported, report = AutoModelForCausalLM.from_pretrained(case.folder, output_loading_info=True)
    assert not any(report.values()), report
    assert type(exported).__module__.startswith("transformers.models.")
    assert exported.dtype == torch.float32
    with torch.no_grad():
        ids = clear_tokens(case.folded, lambda seed: tokens(2, 24, seed))  # beyond the sliding window of mistral
        meant = meaning(case.dense, case.plan, ids)
        assert (meant - case.dense(ids).logits).abs().max() > 1e-2, "the masks changed nothing"
        assert_same(exported(ids).logits, meant)


@pytest.mark.parametrize("form", FORMS)
def test_the_own_form_holds_every_plan(form: str, tmp_path: Path) -> None:
    """Refitted matrices and a choice of V/O dims, too, with whatever experts."""
    dense, text = make_pico("qwen2"), tokens(8, 16, seed=3)
    plan = make_plan(dense, "per_token", form=form)
    plan = repair_plan(plan, dense, text, torch.ones_like(text, dtype=torch.bool), RepairSection(mode="full"))
    moe = fold(dense, plan)
    write_export(choose_target(moe, "hf"), moe, None, tmp_path / "out", SMALL)
    with torch.no_grad():
        ids = clear_tokens(moe, lambda seed: tokens(2, 24, seed))
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert_same(exported(ids).logits, meaning(dense, plan, ids))


def refusal(dense: PreTrainedModel, target: str, attention: str = "off", form: str = "overlapping") -> str:
    """The sentence by which a target refuses what becomes of a model."""
    moe = fold(dense, make_plan(dense, attention, active=0.8, form=form))
    with pytest.raises(UserError) as refused:
        choose_target(moe, target)
    assert "\n" not in str(refused.value)
    if target == "mixtral" and form == "overlapping":
        own = choose_target(moe, "auto")
        assert own.target.name == "hf"
        assert all(target.name in own.reason for target in STOCK_ARCHS)
    return str(refused.value)


def test_what_cannot_be_held_is_refused_in_one_sentence_and_auto_takes_the_own_form() -> None:
    assert "V/O dims for each token" in refusal(make_pico("llama"), "mixtral", "per_token")
    phi = refusal(make_pico("phi"), "mixtral")
    assert "no gate" in phi
    assert "these can: hf" in phi
    assert refusal(make_pico("qwen2"), "mixtral").startswith(
        "mixtral cannot represent this model exactly: its Q, K and V projections have biases; these can: gguf, hf"
    )
    assert "normalizes Q and K" in refusal(make_pico("qwen3"), "mixtral")
    assert "output has a bias" in refusal(make_pico("llama", attention_bias=True), "mixtral")
    assert "MLP has biases" in refusal(make_pico("llama", mlp_bias=True), "mixtral")
    windowed = make_pico("qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1)
    assert "sliding windows" in str(PlainDecoder(biased=True).problem(windowed))
    assert "no export target 'mixtrel'" in refusal(make_pico("llama"), "mixtrel", "static")


@pytest.mark.parametrize(
    ("model_class", "target", "words"),
    [
        (OlmoForCausalLM, "mixtral", "its norms have no weights"),
        (OlmoForCausalLM, "glm4_moe", "its norms have no weights"),
        (Exaone4ForCausalLM, "glm4_moe", "its layers have no `input_layernorm`"),
    ],
)
def test_norms_that_stand_elsewhere_are_refused_and_auto_takes_the_own_form(
    model_class: Any, target: str, words: str
) -> None:
    sizes = {"head_dim": 8, "sliding_window": None, "layer_types": ["full_attention"] * 2}
    dense = randomise(model_class(model_class.config_class(**PICO | (sizes if "4" in model_class.__name__ else {}))))
    form = "fine" if target == "glm4_moe" else "overlapping"
    moe = fold(dense, make_plan(dense, "off", form=form))
    with pytest.raises(UserError, match=words):
        choose_target(moe, target)
    assert words in str(TARGETS[target].supports_dense(dense, form))
    assert choose_target(moe, "auto").target.name == "hf"


def test_a_model_that_does_more_than_its_parts_say_is_refused() -> None:
    """Some families differ in ways that no config key or tensor name tells; a few tokens run through it do."""
    moe = fold(make_pico("llama"), make_plan(make_pico("llama"), "off"))
    assert TARGETS["mixtral"].supports(moe) is None
    norm = moe.model.layers[0].input_layernorm
    with torch.no_grad():
        handle = norm.register_forward_hook(lambda module, args, out: out + args[0])
        assert "RMS norms" in str(TARGETS["mixtral"].supports(moe))
        handle.remove()
        handle = moe.model.layers[0].register_forward_hook(lambda module, args, out: 2 * out)
        assert "not simply added" in str(TARGETS["mixtral"].supports(moe))
        handle.remove()
        handle = moe.model.layers[0].register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
        assert "embeddings are scaled" in str(TARGETS["mixtral"].supports(moe))
        handle.remove()
    assert TARGETS["mixtral"].supports(moe) is None


def test_transformers_saves_it_under_the_same_names(case: Case, tmp_path: Path) -> None:
    assert "auto_map" not in json.loads((case.folder / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(case.folder).save_pretrained(tmp_path)
    first, again = (load_file(folder / "model.safetensors") for folder in (case.folder, tmp_path))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_large_exports_come_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tomoe.exporting.writing.SHARD_BYTES", 20_000)
    case = make_case("llama", "off", tmp_path / "out")
    shards = sorted(case.folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 30_000 for shard in shards)
    assert (case.folder / "config.json").stat().st_mode == shards[0].stat().st_mode
    with torch.no_grad():
        ids = clear_tokens(case.folded, lambda seed: tokens(seed=seed))
        assert_same(AutoModelForCausalLM.from_pretrained(case.folder)(ids).logits, case.folded(ids).logits)
    assert list(tmp_path.iterdir()) == [case.folder]
