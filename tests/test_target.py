"""`target` in the recipe: the plan fits the architecture that it goes to, from the start to the export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conftest import make_network, make_pico, tokens
from pico_files import CommandLine, pico_recipe, small, write_pico, write_text
from tomoe.budget import BUDGET_TOLERANCE, active_params, decoder_params, mlp_params, router_params
from tomoe.errors import UserError
from tomoe.exporting.choice import TARGETS
from tomoe.methods.tomoe.carving import carve_
from tomoe.methods.tomoe.extract import extract_plan
from tomoe.methods.tomoe.objective import budget_penalty, layer_fractions, layer_widths, log_ratio, sampled_masks
from tomoe.model.structure import shape_of
from tomoe.pipeline.convert import convert
from tomoe.plans import Plan
from tomoe.plans.partition.layouts import layout_of
from tomoe.recipe.conversion import Recipe

pytestmark = pytest.mark.slow

IDS = tokens(2, 24)
CALIBRATION = IDS, torch.ones_like(IDS, dtype=torch.bool)


def wide(family: str = "llama") -> PreTrainedModel:
    """A model of 512 neurons a layer: widths of 64 are an eighth."""
    return make_pico(family, intermediate_size=512)


def planned(attention: str, active: float, common_multiple: int) -> Plan:
    model = wide()
    net = make_network(model, attention, common_multiple=common_multiple)
    with torch.no_grad():
        net.neurons[0].start += 1.5  # so that layers left alone would differ
    return extract_plan(net, model, active, CALIBRATION)


@pytest.mark.parametrize(("attention", "active"), [("off", 0.5), ("off", 0.8), ("static", 0.65)])
def test_all_layers_get_one_width_and_the_budget_is_met(attention: str, active: float) -> None:
    free, plan = planned(attention, active, 0), planned(attention, active, 64)
    assert len({w for w, _, _ in free.widths()}) == 2
    assert len({w for w, _, _ in plan.widths()}) == 1
    assert abs(plan.active_fraction(routers=False) - active) <= BUDGET_TOLERANCE
    width = plan.counts[0].width
    assert width % (1 if attention == "off" else 4) == 0  # attention takes up what a coarse width leaves over
    mean = sum(w for w, _, _ in free.widths()) / 2
    assert abs(width - mean) <= 64


def test_a_coarse_width_stays_where_attention_can_take_up_the_rest() -> None:
    """Attention of a pico model is small beside 512 neurons; here it is as large as in a real model."""
    model = make_pico("llama", intermediate_size=128, hidden_size=64, num_attention_heads=4, num_key_value_heads=4)
    net = make_network(model, "static", width_multiple=8, common_multiple=32)
    for active in (0.55, 0.6, 0.7):
        plan = extract_plan(net, model, active, CALIBRATION, tolerance=0.01)
        assert {w % 32 for w, _, _ in plan.widths()} == {0}
        assert plan.active_fraction(routers=False) == pytest.approx(active, abs=0.01)


def test_a_budget_that_no_width_meets_is_refused() -> None:
    model = make_pico("llama")
    net = make_network(model, "off", width_multiple=8, common_multiple=64)
    with pytest.raises(UserError, match="the nearest plan has"):
        extract_plan(net, model, 0.7, CALIBRATION, tolerance=1e-6)


@pytest.mark.parametrize("attention", ["off", "static"])
def test_a_carved_start_is_equally_wide_everywhere(attention: str) -> None:
    model = wide()
    net = make_network(model, attention, common_multiple=64)
    carve_(net, model, *CALIBRATION, active=0.7, seed=0)
    net.layout = replace(net.layout, common_multiple=0)
    plan = extract_plan(net, model, 0.7, CALIBRATION)  # free to choose, and yet
    widths = [w for w, _, _ in plan.widths()]
    assert max(widths) - min(widths) <= 2


def test_training_holds_every_layer_to_the_budget() -> None:
    model = wide()
    shape, net = shape_of(model), make_network(model, "static")
    with torch.no_grad():
        masks = sampled_masks(net, 0, 1)
    fractions = layer_fractions(masks, shape)
    widths = [[float(n) for n in layer_widths([m], shape)] for m in masks]
    each = [float(active_params(shape, [tuple(layer)])) for layer in widths]
    for actual, params in zip(fractions.tolist(), each, strict=True):
        assert actual == pytest.approx(params * shape.num_layers / decoder_params(shape), rel=1e-5)
    expected = sum(float(log_ratio(torch.tensor(f), 0.6)) for f in fractions.tolist()) / shape.num_layers
    assert float(budget_penalty(fractions, 0.6)) == pytest.approx(expected, rel=1e-5)
    # one layer too wide and one too narrow: the whole may be right, the layers are not
    uneven = torch.tensor([0.4, 0.8])
    assert float(budget_penalty(uneven.mean(), 0.6)) == pytest.approx(0, abs=1e-6)
    assert float(budget_penalty(uneven, 0.6)) > 0.3


def test_a_target_and_its_opposite_are_refused() -> None:
    with pytest.raises(UserError, match="target mixtral cannot choose V/O dims"):
        Recipe.load(None, ["target=mixtral", "attention.pruning=per_token"])
    for target, multiple, common in (("gguf", 8, 64), ("gguf", 256, 256), ("hf", 8, 0)):
        keys = [f"target={target}", f"experts.width_multiple={multiple}", "experts.form=overlapping", "active=0.97"]
        assert layout_of(Recipe.load(None, keys), shape_of(wide())).common_multiple == common
    biases = "its Q, K and V projections have biases"
    assert TARGETS["mixtral"].supports_dense(make_pico("qwen2"), "overlapping") == biases
    assert TARGETS["mixtral"].supports_dense(make_pico("qwen3"), "overlapping") == "it normalizes Q and K"
    assert TARGETS["mixtral"].supports_dense(make_pico("llama"), "overlapping") is None
    assert TARGETS["glm4_moe"].supports_dense(make_pico("llama3"), "fine") is None


def test_convert_makes_a_plan_that_fits_and_exports_it(tomoe: CommandLine, tmp_path: Path) -> None:
    dense, text, out = write_pico(tmp_path / "dense"), write_text(tmp_path / "text.txt"), tmp_path / "out"
    biased = write_pico(tmp_path / "biased", "qwen2")
    refused = tomoe("convert", biased, "--data", text, "-o", out, "--format", "mixtral", *small())
    assert refused.code == 2
    assert "target mixtral cannot represent the converted model" in refused.err
    assert not out.exists()

    sizes = ("--attention", "static", *small(train_steps="0"))
    done = tomoe("convert", dense, "--data", text, "-o", out, "--format", "mixtral", *sizes)
    assert done.code == 0, done.err
    plan = Plan.load(out)
    assert len({w for w, _, _ in plan.widths()}) == 1
    assert plan.active_fraction() == pytest.approx(0.7, abs=0.002)
    assert Recipe.load(out / "recipe.json").target == "mixtral"
    export = json.loads((out / "export-mixtral" / "export.json").read_text())
    assert export["proof"]["same"] is True
    with torch.no_grad():
        actual = AutoModelForCausalLM.from_pretrained(out / "export-mixtral")(IDS).logits
        expected = AutoModelForCausalLM.from_pretrained(out)(IDS).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_a_gguf_plan_may_be_a_little_further_from_the_budget(tmp_path: Path) -> None:
    """Experts of whole blocks meet few budgets; another target would have been refused."""
    model, _ = write_pico(tmp_path / "dense"), write_text(tmp_path / "text.txt")
    shape = shape_of(AutoModelForCausalLM.from_pretrained(model))
    left_out = (mlp_params(shape, 5 * 32) - shape.num_layers * router_params(shape, 12)) / decoder_params(shape)
    asked = round(1 - left_out + 0.0025, 6)
    experts = ("form=fine", "num_experts=12", "expert_size=32", "dense_layers=1")
    changes = ["train.steps=0", "repair.mode=none", "target=gguf", *(f"experts.{key}" for key in experts)]
    recipe = pico_recipe(tmp_path, f"active={asked}", *changes)
    plan = convert(recipe, tmp_path / "out")
    assert plan.active_fraction() == pytest.approx(asked - 0.0025, abs=1e-6)
    with pytest.raises(UserError, match="cannot divide 512 neurons"):
        layout_of(recipe.changed(["target=glm4_moe"]), shape)
