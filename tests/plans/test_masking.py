"""What the masks of a plan do to a dense model."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from conftest import ATTENTION_MODES, PAIRS, make_pico, make_plan, tokens
from tomoe.plans.masking import masked, planned_masks


def hooks(model: PreTrainedModel) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_outside_the_block_the_dense_model_is_untouched(family: str, attention: str) -> None:
    dense, ids = make_pico(family), tokens()
    plan = make_plan(dense, attention)
    weights = copy.deepcopy(dense.state_dict())
    before = dense(ids).logits
    with masked(dense, planned_masks(plan)):
        assert not torch.equal(dense(ids).logits, before)
    assert torch.equal(dense(ids).logits, before)
    with pytest.raises(KeyError, match="inside"), masked(dense, planned_masks(plan)):
        raise KeyError("inside")
    with pytest.raises(ValueError, match="shorter"), masked(dense, planned_masks(plan)[:1]):
        pass
    assert torch.equal(dense(ids).logits, before)
    assert hooks(dense) == 0
    assert all(torch.equal(value, weights[name]) for name, value in dense.state_dict().items())


@pytest.mark.parametrize("form", ["fine", "overlapping"])
@pytest.mark.parametrize("attention", ATTENTION_MODES)
def test_attention_that_stays_whole_runs_as_it_is(attention: str, form: str) -> None:
    dense = make_pico("llama")
    with masked(dense, planned_masks(make_plan(dense, attention, form=form))):
        hooked = sum(hooks(layer.self_attn) for layer in dense.model.layers)
    assert (hooked == 0) is (attention == "off")
