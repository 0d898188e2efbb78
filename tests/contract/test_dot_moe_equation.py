"""The equation of learned groups: masked == folded == reloaded, and all experts == dense."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_contract import tiny_model, tokens, without_tomoe
from margins import assert_same, clear_tokens, meaning

import tomoe as api
from tomoe.budget import BUDGET_TOLERANCE, decoder_params, mlp_params
from tomoe.model.structure import shape_of
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold

IDS = tokens(8, 40)


# a gate, fused gates, and none
@pytest.mark.parametrize("family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("phi3", "gpt_neox"))])
def test_what_was_learned_is_one_function_in_every_form(family: str, tmp_path: Path) -> None:
    dense = tiny_model(family)
    shape = shape_of(dense)
    active = 1 - 0.5 * shape.num_layers * mlp_params(shape, shape.mlp_size) / decoder_params(shape)
    # so fast that neurons move within three steps
    recipe = {"train.warmup_steps": 0, "train.learning_rate": 0.05, "train.dtype": "float32", "experts.num_experts": 64}
    plans = {n: api.plan(dense, "dot_moe", IDS, active=active, recipe=recipe | {"train.steps": n}) for n in (0, 3)}
    plan = plans[3]
    assert abs(plan.active_fraction() - active) <= BUDGET_TOLERANCE
    pairs = list(zip(plan.layers, plans[0].layers, strict=True))
    assert any(not torch.equal(a.expert_masks, b.expert_masks) for a, b in pairs), "no neuron moved"
    moe = fold(dense, plan)
    save_moe(moe, plan, None, tmp_path / "moe")
    with torch.no_grad():
        ids = clear_tokens(moe, lambda seed: tokens(2, 40, seed))
        meant, whole = meaning(dense, plan, ids), dense(ids).logits
        assert (meant - whole).abs().max() > 1e-3, "the masks changed nothing"
        assert_same(moe(ids).logits, meant, "folded")
        assert_same(without_tomoe(tmp_path / "moe")(ids).logits, meant, "reloaded without tomoe")
        everything = without_tomoe(tmp_path / "moe", **{moe.config.top_k_key: plan.num_experts})
        assert_same(everything(ids).logits, whole, "all experts")
