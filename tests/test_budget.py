"""Active parameters: the arithmetic against the weights that are really there."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from conftest import ATTENTION_MODES, make_pico, make_plan
from tomoe.budget import active_params, decoder_params
from tomoe.model.structure import layer_parts, shape_of
from tomoe.moe.fold import fold


def test_decoder_params_are_all_projection_weights(dense: PreTrainedModel) -> None:
    counted = 0
    for p in layer_parts(dense):
        of_attention = (p.attention.q, p.attention.k, p.attention.v, p.attention.o)
        counted += sum(m.weight.numel() for m in (p.mlp.gate, p.mlp.up, p.mlp.down, *of_attention) if m is not None)
    assert decoder_params(shape_of(dense)) == counted


@pytest.mark.parametrize("attention", ATTENTION_MODES)
def test_active_parameters_are_those_a_token_meets(dense: PreTrainedModel, attention: str) -> None:
    plan = make_plan(dense, attention)
    moe, s = fold(dense, plan), plan.shape
    counted = 0
    for i, layer in enumerate(moe.model.layers):
        matrices = [m for m in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj) if m is not None]
        counted += sum(m[layer.mlp.expert_rows[0].long()].numel() for m in matrices)
        a = layer.self_attn
        counted += a.q_proj.weight.numel() + a.k_proj.weight.numel()
        share = plan.layers[i].value_top_k / int(plan.layers[i].value_kept.sum())  # of V and O a token uses K dims
        counted += round(
            share * (a.v_proj.weight.numel() + getattr(a, "o_proj", getattr(a, "dense", None)).weight.numel())
        )
    assert active_params(s, plan.widths()) == counted
    assert plan.active_fraction(routers=False) == counted / decoder_params(s)


def test_arithmetic_takes_numbers_and_tensors_alike() -> None:
    shape = shape_of(make_pico("qwen2"))
    width, qk, values = (torch.tensor(float(n), requires_grad=True) for n in (20, 6, 5))
    total = active_params(shape, [(width, qk, values)] * 2)
    assert total.item() == active_params(shape, [(20, 6, 5)] * 2) == 2 * (3 * 32 * 20 + 32 * 6 * 11)
    total.backward()
    assert (width.grad, qk.grad, values.grad) == (2 * 3 * 32, 2 * 32 * 6, 2 * 32 * 6)
