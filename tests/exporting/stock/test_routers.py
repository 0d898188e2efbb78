"""The stock router of fine-grained experts: how far its weights and its choices can be from the converted model's."""

from __future__ import annotations

import copy
import math
from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from conftest import make_pico, make_plan
from tomoe.exporting.stock.fine_grained import StockLayout, router_scales, router_tensors
from tomoe.exporting.stock.routers import Sigmoid
from tomoe.exporting.stock.table import glm4_sizes
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP
from tomoe.plans import ALWAYS


def stock_router(mlp: ToMoEMLP, layout: StockLayout, eps: float) -> Glm4MoeTopkRouter:
    """The router of transformers with the tensors of the export."""
    sizes = {"hidden_size": mlp.router.in_features} | glm4_sizes(pico(), layout)
    router = Glm4MoeTopkRouter(Glm4MoeConfig(**sizes))
    weight, corrections = router_tensors(mlp, layout, eps, Sigmoid())
    router.weight.data, router.e_score_correction_bias = weight, corrections
    return router


@cache
def pico() -> ToMoEForCausalLM:
    dense = make_pico("llama")
    return fold(dense, make_plan(dense, "off", form="fine"))


def fine_mlp(seed: int, top_k: int, scale: float) -> ToMoEMLP:
    """A layer of 8 experts with a random router; the first of them is always chosen."""
    mlp = copy.deepcopy(pico().model.layers[0].mlp)
    generator = torch.Generator().manual_seed(seed)
    mlp.router.weight.data.normal_(0.3 * scale, scale, generator=generator)
    mlp.router.bias.data.normal_(0, scale, generator=generator)
    mlp.router.bias.data[0] = ALWAYS
    mlp.config.tomoe_experts_per_token = [top_k, top_k]
    mlp.config.num_experts_per_tok = top_k
    return mlp


def inputs(seed: int) -> Tensor:
    return torch.randn(2048, 32, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), top_k=st.integers(2, 7), exponent=st.integers(-6, 3))
@torch.no_grad()
def test_weights_and_choices_keep_within_the_derived_bounds(seed: int, top_k: int, exponent: int) -> None:
    """In float64: weights are 1 within eps Z / 2, and only experts closer than 2^-20 / eps change places."""
    mlp = fine_mlp(seed, top_k, 2.0**exponent)
    x = inputs(seed + 1)
    z = x.double() @ mlp.router.weight.double().t()
    reach = float(z.abs().max())
    eps = Sigmoid().scale(reach)
    assert math.log2(eps) == round(math.log2(eps))
    assert 2**-10.5 < eps * reach <= 2**-9.5
    _, weights, chosen = stock_router(mlp, StockLayout(4, 16, 8, top_k, 0, 0), eps)(x)
    assert float((weights.double() - 1).abs().max()) <= eps * reach / 2 + 2**-23
    # the stock router rounds x W in float32, as ours does
    logits = z + mlp.router.bias.double()
    rounding = float((mlp.router(x).double() - logits).abs().max()) * 4
    least_chosen = logits.gather(1, chosen).amin(1)
    best_left = logits.scatter(1, chosen, -torch.inf).amax(1)
    assert float((best_left - least_chosen).max()) <= 2**-20 / eps + rounding
    assert bool((chosen == 0).any(1).all()), "an expert that is always chosen was not"


def test_scales_are_measured_on_the_model() -> None:
    moe = copy.deepcopy(pico())
    before = router_scales(moe, Sigmoid())
    assert all(0 < eps <= 1 for eps in before)
    with torch.no_grad():
        moe.model.layers[1].mlp.router.weight.mul_(16)
    assert router_scales(moe, Sigmoid()) == [before[0], before[1] / 16]
    with torch.no_grad():
        moe.model.layers[0].mlp.router.weight.zero_()
    assert router_scales(moe, Sigmoid())[0] == 1.0
