"""The equation with repair: masked model with refitted matrices == folded model, and the plan carries them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from conftest import make_pico, make_plan, tokens
from tomoe.errors import UserError
from tomoe.model.structure import shape_of
from tomoe.moe.fold import fold
from tomoe.plans import REPAIRED, Plan
from tomoe.plans.masking import PlannedLayerMasks, masked, planned_masks
from tomoe.plans.repair.plan import repair_bytes, repair_plan
from tomoe.recipe.conversion import RepairSection

pytestmark = pytest.mark.slow

MODES = {"full": RepairSection(mode="full"), "low_rank": RepairSection(mode="low_rank", rank=3)}


def repaired(model: PreTrainedModel, attention: str, mode: str = "full", form: str = "overlapping") -> Plan:
    ids = tokens(8, 16, seed=3)
    return repair_plan(
        make_plan(model, attention, form=form), model, ids, torch.ones_like(ids, dtype=torch.bool), MODES[mode]
    )


@pytest.mark.parametrize(
    ("family", "attention", "mode", "form"),
    [
        ("qwen2", "per_token", "low_rank", "fine"),
        ("qwen3", "per_token", "full", "overlapping"),
        ("phi", "static", "low_rank", "overlapping"),
        ("phi", "off", "full", "fine"),
        ("mistral", "off", "full", "overlapping"),
    ],
)
def test_masked_equals_folded_with_repair(family: str, attention: str, mode: str, form: str) -> None:
    model, ids = make_pico(family), tokens(2, 12)
    plan = repaired(model, attention, mode, form)
    with torch.no_grad():
        with masked(model, planned_masks(plan)):
            expected = model(ids).logits
        bare = fold(model, make_plan(model, attention, form=form))(ids).logits
        logits = fold(model, plan)(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert (logits - bare).abs().max() > 1e-3, "repair changed nothing"


@pytest.mark.parametrize(("mode", "form"), [("full", "overlapping"), ("low_rank", "fine")])
def test_a_repaired_plan_survives_a_save(mode: str, form: str, tmp_path: Path) -> None:
    model = make_pico("qwen2")
    plan = repaired(model, "per_token", mode, form)
    plan.save(tmp_path / "plan")
    loaded = Plan.load(tmp_path / "plan")
    assert loaded.notes[REPAIRED] == plan.notes[REPAIRED]
    assert loaded.notes[REPAIRED]["error_after"] < loaded.notes[REPAIRED]["error_before"]
    for layer, other in zip(plan.layers, loaded.layers, strict=True):
        assert layer.refit.keys() == other.refit.keys()
        assert all(torch.equal(t, other.refit[name]) for name, t in layer.refit.items())
    added = sum(t.nbytes for layer in plan.layers for t in layer.refit.values())
    assert added == repair_bytes(plan.shape, MODES[mode], 4, output=True)
    assert loaded.counts == plan.counts
    ids = tokens(2, 12)
    with torch.no_grad():
        assert torch.equal(fold(model, loaded)(ids).logits, fold(model, plan)(ids).logits)


def test_the_ridge_is_that_of_the_real_tokens() -> None:
    """Padding is no token; and the note says which ridge it was."""
    model, ids = make_pico("llama"), tokens(8, 16, seed=3)
    mask = torch.arange(16).expand(8, 16) < 12
    plan = make_plan(model, "off")
    by_tokens = repair_plan(plan, model, ids, mask, RepairSection())
    meant = 4 * plan.shape.mlp_size / 96
    given = repair_plan(plan, model, ids, mask, RepairSection(ridge=meant))
    other = repair_plan(plan, model, ids, mask, RepairSection(ridge=0.01))
    assert by_tokens.notes[REPAIRED]["ridge"] == given.notes[REPAIRED]["ridge"] == pytest.approx(meant)
    for a, b, c in zip(by_tokens.layers, given.layers, other.layers, strict=True):
        torch.testing.assert_close(a.refit["down.weight"], b.refit["down.weight"])
        assert (a.refit["down.weight"] - c.refit["down.weight"]).abs().max() > 1e-3


def test_without_its_repair_a_plan_is_the_one_before_it_and_another_replaces_it(tmp_path: Path) -> None:
    model, ids = make_pico("llama"), tokens(8, 16, seed=3)
    once = repaired(model, "off")
    twice = repair_plan(once, model, ids, torch.ones_like(ids, dtype=torch.bool), MODES["full"])
    for one, other in ((make_plan(model, "off"), once.without_repair()), (once, twice)):
        one.save(tmp_path / "one")
        other.save(tmp_path / "other")
        for name in ("plan.json", "plan.safetensors"):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_a_device_gets_each_refitted_matrix_once() -> None:
    """Of a plan that is measured masked; the CPU has it already."""
    model = make_pico("llama")
    layer = make_plan(model, "off").layers[0]
    weight = model.model.layers[0].mlp.down_proj.weight
    masks = PlannedLayerMasks(
        replace(layer, refit={"down.weight": 2 * weight.detach()}), shape_of(model), weight.device
    )
    there = weight.to("meta")
    first = masks.refitted("down", there)
    assert first.is_meta
    assert masks.refitted("down", there) is first
    assert torch.equal(masks.refitted("down", weight), 2 * weight)


def test_broken_refits_are_refused() -> None:
    plan = make_plan(make_pico("llama"), "off")
    first, *others = plan.layers
    for refit in (
        {"down.weight": torch.zeros(32, 47)},
        {"down.left": torch.zeros(32, 2)},
        {"down.weight": torch.full((32, 48), torch.nan)},
        {"gate.weight": torch.zeros(2)},
    ):
        with pytest.raises(UserError, match="layer 0 of the plan is broken"):
            replace(plan, layers=(replace(first, refit=refit), *others))
