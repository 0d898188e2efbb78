"""The equation where values are rotated: masked == folded == reloaded == exported, repaired or not; and its faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from margins import TOLERANCE, assert_same, clear_tokens, meaning
from torch import Tensor
from transformers import AutoModelForCausalLM

import tomoe.moe.fold as fold_module
from conftest import make_network, make_pico, make_plan, tokens, write_export
from tomoe.exporting.choice import choose_target
from tomoe.exporting.target import Options
from tomoe.model.attention import rotate_heads, rotate_weights
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.plans import Plan, attention_masks
from tomoe.plans.repair.plan import repair_plan
from tomoe.recipe.conversion import RepairSection

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_grad")]
RED = 1e-3
# A family for each layout of values and their output projection; what is repaired, on both ways to prune attention.
CELLS = [
    ("llama", "static", True, "overlapping"),
    ("qwen2", "static", False, "overlapping"),
    ("qwen2", "per_token", True, "overlapping"),
    ("qwen2", "per_token", False, "fine"),
    ("qwen3", "per_token", True, "overlapping"),
    ("qwen3", "static", False, "fine"),
    ("phi", "static", True, "overlapping"),
    ("phi", "per_token", False, "overlapping"),
]


@cache
def rotated_plan(family: str, attention: str, repaired: bool = False, **options: object) -> Plan:
    dense = make_pico(family)
    plan = make_plan(dense, attention, rotate=True, **options)
    assert plan.rotated
    if not repaired:
        return plan
    ids = tokens(8, 24, seed=3)
    return repair_plan(plan, dense, ids, torch.ones_like(ids, dtype=torch.bool), RepairSection(mode="full"))


@pytest.mark.parametrize(("family", "attention", "repaired", "form"), CELLS)
def test_folded_and_reloaded_compute_what_the_masks_mean(
    family: str, attention: str, repaired: bool, form: str, tmp_path: Path
) -> None:
    dense = make_pico(family)
    plan = rotated_plan(family, attention, repaired, form=form)
    folded = fold(dense, plan)
    ids = clear_tokens(folded, lambda seed: tokens(2, 24, seed))
    meant = meaning(dense, plan, ids)
    plain = replace(plan, layers=tuple(replace(layer, value_rotation=None) for layer in plan.layers))
    assert (meant - meaning(dense, plain, ids)).abs().max() > 1e-2, "the rotation changed nothing"
    save_moe(folded, plan, None, tmp_path / "moe")
    for moe in (folded, AutoModelForCausalLM.from_pretrained(tmp_path / "moe")):
        assert_same(moe(ids).logits, meant)
    again = Plan.load(tmp_path / "moe")
    assert_same(fold(dense, again)(ids).logits, meant)
    if repaired:
        assert all("output.weight" in layer.refit for layer in plan.layers)


@pytest.mark.parametrize(("family", "form"), [("qwen2", "overlapping"), ("qwen3", "fine"), ("phi", "overlapping")])
def test_rotated_and_whole_it_is_the_dense_model(family: str, form: str) -> None:
    dense = make_pico(family)
    plan = make_plan(dense, "off", 1.0, form=form)
    ids = clear_tokens(fold(dense, plan), lambda seed: tokens(2, 24, seed))
    net = make_network(dense, "static", rotate=True)
    layers = (
        replace(layer, value_rotation=r) for layer, r in zip(plan.layers, net.attention.value_rotations, strict=True)
    )
    rotated = replace(plan, layers=tuple(layers))
    meant = meaning(dense, plan, ids)
    if form == "overlapping":
        assert_same(meant, dense(ids).logits)
    assert_same(meaning(dense, rotated, ids), meant)
    assert_same(fold(dense, rotated)(ids).logits, meant)


def test_stock_architectures_hold_rotated_values(tmp_path: Path) -> None:
    dense = make_pico("mistral")
    plan = rotated_plan("mistral", "static", repaired=True, active=0.8)
    moe = fold(dense, plan)
    ids = clear_tokens(moe, lambda seed: tokens(2, 24, seed))
    write_export(choose_target(moe, "mixtral"), moe, None, tmp_path / "moe", Options(width_multiple=8))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert_same(exported(ids).logits, meaning(dense, plan, ids))


Weights = tuple[Tensor, Tensor | None, Tensor]


def transposed(v: Tensor, bias: Tensor | None, o: Tensor, r: Tensor) -> Weights:
    return rotate_weights(v, bias, o, r.mT)


def no_bias(v: Tensor, bias: Tensor | None, o: Tensor, r: Tensor) -> Weights:
    return rotate_weights(v, None, o, r)[0], bias, rotate_heads(o, r)


def no_output(v: Tensor, bias: Tensor | None, o: Tensor, r: Tensor) -> Weights:
    return (*rotate_weights(v, bias, o, r)[:2], o)


def other_groups(v: Tensor, bias: Tensor | None, o: Tensor, r: Tensor) -> Weights:
    """Query heads dealt out to key/value heads one by one, not in runs."""
    heads = o.shape[1] // r.shape[-1]
    return (*rotate_weights(v, bias, o, r)[:2], rotate_heads(o, r.repeat(heads // len(r), 1, 1)))


def of_the_other_head(v: Tensor, bias: Tensor | None, o: Tensor, r: Tensor) -> Weights:
    return rotate_weights(v, bias, o, r.flip(0))


@pytest.mark.parametrize(("attention", "repaired"), [("static", True), ("per_token", False)])
@pytest.mark.parametrize("fault", [transposed, no_bias, no_output, other_groups, of_the_other_head])
def test_a_rotation_folded_wrongly_is_seen(
    fault: Callable[..., Weights], attention: str, repaired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turned wrongly on both sides, a whole model would still be the same; a cut one is not."""
    dense, ids = make_pico("qwen2"), tokens(2, 24, seed=5)
    plan = rotated_plan("qwen2", attention, repaired)
    meant = meaning(dense, plan, ids)
    monkeypatch.setattr(fold_module, "rotate_weights", fault)
    assert float((fold(dense, plan)(ids).logits - meant).abs().max()) > RED > 10 * TOLERANCE * float(meant.abs().max())


@pytest.mark.parametrize("fault", ["not back", "back the wrong way", "V not turned"])
def test_masks_that_rotate_wrongly_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, ids = make_pico("qwen2"), tokens(2, 24, seed=5)
    plan = rotated_plan("qwen2", "static")
    meant = fold(dense, plan)(ids).logits

    def faulty(x: Tensor, rotation: Tensor, inverse: bool = False) -> Tensor:
        if fault == "V not turned":
            return rotate_heads(x, rotation, inverse) if inverse else x
        return x if inverse and fault == "not back" else rotate_heads(x, rotation)

    monkeypatch.setattr(attention_masks, "rotate_heads", faulty)
    assert float((meaning(dense, plan, ids) - meant).abs().max()) > RED
