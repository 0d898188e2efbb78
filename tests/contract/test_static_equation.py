"""The equation where all tokens use the same neurons: masked == folded == reloaded == the dense class with fewer of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_contract import tiny_model, tokens
from margins import assert_same, meaning
from transformers import AutoModelForCausalLM, PreTrainedModel

import tomoe as api
from conftest import make_pico, make_plan, write_export
from tomoe.budget import BUDGET_TOLERANCE, decoder_params, mlp_params
from tomoe.errors import UserError
from tomoe.exporting.choice import TARGETS, check_target, choose_target
from tomoe.exporting.target import Options
from tomoe.model.structure import shape_of
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.plans import Plan
from tomoe.recipe.conversion import Recipe

pytestmark = pytest.mark.usefixtures("no_grad")

# Separate and fused gates, none, biases, transposed matrices (gpt2), MLPs without a module of their own (opt), parameters in the
# activation (apertus), and layers of two kinds.
FAMILIES = ("llama", "phi3", "phi", "gpt2", "opt", "gemma3_text", "apertus", "granitemoehybrid")
IDS = tokens(4, 40)


def half(dense: PreTrainedModel) -> float:
    """The fraction that leaves half of the neurons."""
    s = shape_of(dense)
    return 1 - 0.5 * s.num_layers * mlp_params(s, s.mlp_size) / decoder_params(s)


def planned(dense: PreTrainedModel, **recipe: object) -> Plan:
    plan = api.plan(dense, "static", IDS, active=half(dense), recipe={"train.dtype": "float32"} | recipe)
    return api.repair(plan, dense, IDS)


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("family", [FAMILIES[0], *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES[1:])])
def test_masked_folded_reloaded_and_the_dense_class_are_one_function(family: str, tmp_path: Path) -> None:
    dense = tiny_model(family)
    plan = planned(dense, target="dense")
    assert abs(plan.active_fraction() - half(dense)) <= BUDGET_TOLERANCE
    assert len({layer.width for layer in plan.counts}) == 1
    moe = fold(dense, plan)
    save_moe(moe, plan, None, tmp_path / "moe")
    choice = choose_target(moe, "auto")
    assert choice.target.name == "dense"
    write_export(choice, moe, None, tmp_path / "dense", Options())
    exported, report = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert not any(report.values()), report
    assert type(exported) is type(dense)
    ids = tokens(2, 60, seed=3)
    meant, whole = meaning(dense, plan, ids), dense(ids).logits
    assert (meant - whole).abs().max() > 1e-2 * whole.abs().max(), "the masks changed nothing"
    assert_same(moe(ids).logits, meant, "folded")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "moe")(ids).logits, meant, "reloaded")
    assert_same(exported(ids).logits, meant, "the dense class")
    # half of the neurons are gone, from memory and from the disk
    dense.save_pretrained(tmp_path / "whole")
    gone = shape_of(dense).num_layers * int(mlp_params(shape_of(dense), shape_of(dense).mlp_size // 2)) * 4
    assert choice.target.sizes(moe, Options()).bytes == sum(p.nbytes for p in exported.parameters())
    assert stored(tmp_path / "dense") <= stored(tmp_path / "whole") - gone


def test_a_width_that_is_asked_for_is_filled_up_with_zeros(tmp_path: Path) -> None:
    """As group-wise quantization needs it, with biases."""
    dense = tiny_model("phi")
    plan = planned(dense, target="dense")
    moe, options = fold(dense, plan), Options(width_multiple=96)
    write_export(choose_target(moe, "dense"), moe, None, tmp_path, options)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert exported.config.intermediate_size == 288
    assert "filled up from 256" in TARGETS["dense"].sizes(moe, options).words
    assert_same(exported(tokens(2, 30)).logits, meaning(dense, plan, tokens(2, 30)))


def refusal(dense: PreTrainedModel, plan: Plan) -> str:
    with pytest.raises(UserError) as refused:
        choose_target(fold(dense, plan), "dense")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_a_dense_class_cannot_hold_is_refused_in_one_sentence() -> None:
    pico = make_pico("llama")
    assert "choose among experts" in refusal(pico, make_plan(pico, "off", active=0.8))
    assert "choose among experts" in refusal(pico, make_plan(pico, "off", form="fine"))
    assert "its attention is pruned" in refusal(pico, make_plan(pico, "static", active=0.8, num_experts=1))
    wide = tiny_model("llama")
    uneven = api.plan(wide, "static", IDS, active=0.7, recipe={"experts.width_multiple": 8, "train.dtype": "float32"})
    assert len({layer.width for layer in uneven.counts}) > 1
    assert "convert with target = dense" in refusal(wide, uneven)
    # its config has a ratio only
    mpt = tiny_model("mpt")
    with pytest.raises(UserError, match="no key of the config of mpt makes all MLPs that were converted narrower"):
        check_target(Recipe(target="dense"), mpt)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["experts.num_experts=4"], "holds 1 expert a layer"),
        (["attention.pruning=static"], "needs dense attention"),
        (["experts.form=fine"], "does not support experts.form = fine"),
    ],
)
def test_a_recipe_that_asks_for_more_than_a_dense_class_holds_is_refused(keys: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Recipe.load(None, ["target=dense", *keys])
