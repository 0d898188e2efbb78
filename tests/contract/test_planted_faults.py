"""Faults that conversions like this one have had. Each is planted here, and each must break the equation."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from margins import meaning
from torch import Tensor, nn
from transformers import PreTrainedModel

import tomoe.plans.masking as masking
from conftest import make_pico, make_plan, tokens
from tomoe.methods.tomoe.gumbel import gumbel_noise
from tomoe.model.shape import ModelShape
from tomoe.moe import modeling_tomoe
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEAttention, ToMoEForCausalLM
from tomoe.plans import Plan, attention_masks
from tomoe.plans.routing import Routing, route

pytestmark = pytest.mark.usefixtures("no_grad")
RED = 1e-3


@pytest.fixture(params=["qwen2", "phi"])
def dense(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Grouped heads and a gate; rotary pairs on a part of the head, no gate, and biases everywhere."""
    return make_pico(request.param)


def difference(
    dense: PreTrainedModel, plan: Plan, damage: Callable[[ToMoEForCausalLM], None] = lambda moe: None
) -> float:
    """Largest difference of logits between the masked model and the folded one, after `damage` to the latter."""
    ids = tokens(2, 24, seed=5)
    meant = meaning(dense, plan, ids)
    moe = fold(dense, plan)
    damage(moe)
    return float((moe(ids).logits - meant).abs().max())


def attentions(moe: ToMoEForCausalLM) -> list[ToMoEAttention]:
    return [layer.self_attn for layer in moe.model.layers]


def test_softmax_scale_of_the_kept_dims(dense: PreTrainedModel) -> None:
    def damage(moe: ToMoEForCausalLM) -> None:
        for attention in attentions(moe):
            attention.scaling = attention.qk_size**-0.5

    assert difference(dense, make_plan(dense, "static"), damage) > RED


def test_output_mask_missing(dense: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks on V only: other tokens' dims then leak through the output of a token that did not choose them."""
    plan = make_plan(dense, "per_token")
    assert difference(dense, plan) < 1e-4
    whole = masking.mask_hooks

    def without_output(*args: object) -> list[object]:
        *kept, output = whole(*args)
        output.remove()
        return kept

    monkeypatch.setattr(masking, "mask_hooks", without_output)
    assert difference(dense, plan) > RED


def test_bias_forgotten(dense: PreTrainedModel) -> None:
    plan = make_plan(dense, "per_token")
    parts = dict(fold(dense, plan).model.layers[0].named_parameters())
    names = {name for name in parts if re.fullmatch(r"(self_attn|mlp)\.[a-z_]+[._]bias", name)}
    assert len(names) == {"qwen2": 3, "phi": 6}[dense.config.model_type]
    for name in names:
        damage = lambda moe, name=name: moe.model.layers[0].get_parameter(name).zero_()  # noqa: E731
        assert difference(dense, plan, damage) > RED, name


def test_norm_of_q_and_k_over_kept_dims_only() -> None:
    def damage(moe: ToMoEForCausalLM) -> None:
        for attention in attentions(moe):
            attention.head_dim = attention.qk_size

    dense = make_pico("qwen3")
    assert difference(dense, make_plan(dense, "static"), damage) > RED


def test_rotary_partners_out_of_order(dense: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs written side by side, where the slim head expects first halves and then second halves."""
    plan = make_plan(dense, "static", active=0.9)
    right = ModelShape.qk_dims

    def side_by_side(shape: ModelShape, kept: Tensor) -> Tensor:
        dims, pairs = right(shape, kept), int(kept[: shape.rotary_size // 2].sum())
        assert pairs > 1, "one pair alone has no order"
        return torch.cat([dims[: 2 * pairs].view(2, pairs).T.flatten(), dims[2 * pairs :]])

    monkeypatch.setattr(ModelShape, "qk_dims", side_by_side)
    assert difference(dense, plan) > RED


def test_rotary_frequencies_of_other_pairs(dense: PreTrainedModel) -> None:
    """The first P frequencies instead of those of the kept pairs."""

    def damage(moe: ToMoEForCausalLM) -> None:
        for attention in attentions(moe):
            first = torch.arange(len(attention.rotary_ids))
            dropped_before_kept = bool((attention.rotary_ids != first).any())
            attention.rotary_ids.copy_(first if dropped_before_kept else first.flip(0))

    assert difference(dense, make_plan(dense, "static"), damage) > RED


def test_noise_left_on_the_router(dense: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(logits: Tensor, top_k: int | None) -> Routing:
        return route(logits + gumbel_noise(logits, 0), top_k)

    monkeypatch.setattr(masking, "route", noisy)
    assert difference(dense, make_plan(dense, "off")) > RED


def test_noise_left_on_the_values(dense: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(logits: Tensor, top_k: int) -> Tensor:
        noisy_logits = logits + gumbel_noise(logits, 0)
        return torch.zeros_like(logits).scatter_(-1, noisy_logits.topk(top_k, -1).indices, 1.0)

    plan = make_plan(dense, "per_token")
    monkeypatch.setattr(attention_masks, "largest", noisy)
    assert difference(dense, plan) > RED


def test_top_k_as_a_cap_only(dense: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most K dims, those above zero, where the plan promises exactly K."""
    true_top_k = modeling_tomoe.ValueRouter.forward

    def capped(router: nn.Module, x: Tensor, top_k: int) -> Tensor:
        logits = router.project_out(nn.functional.gelu(router.norm(router.project_in(x))))
        return true_top_k(router, x, top_k) * (logits > 0)

    plan = make_plan(dense, "per_token")
    monkeypatch.setattr(modeling_tomoe.ValueRouter, "forward", capped)
    assert difference(dense, plan) > RED


def test_largest_k_for_all_tokens(dense: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dim that some token chose, for all tokens."""
    true_top_k = modeling_tomoe.ValueRouter.forward

    def union(router: nn.Module, x: Tensor, top_k: int) -> Tensor:
        mask = true_top_k(router, x, top_k)
        return mask.amax((0, 1), keepdim=True).expand_as(mask)

    plan = make_plan(dense, "per_token")
    monkeypatch.setattr(modeling_tomoe.ValueRouter, "forward", union)
    assert difference(dense, plan) > RED


@pytest.mark.parametrize("backend", modeling_tomoe.BACKENDS["experts"])
def test_neurons_of_another_expert(dense: PreTrainedModel, backend: str) -> None:
    def damage(moe: ToMoEForCausalLM) -> None:
        moe.config.tomoe_expert_backend = backend
        for layer in moe.model.layers:
            layer.mlp.expert_rows.copy_(layer.mlp.expert_rows.roll(1, 0))

    assert difference(dense, make_plan(dense, "off"), damage) > RED


def test_expert_weighted_by_its_probability(dense: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight of the chosen expert is 1, not its softmax probability."""

    def weighted(mlp: nn.Module, x: Tensor, expert_ids: Tensor) -> Tensor:
        weight = mlp.router(x).softmax(-1).gather(1, expert_ids)
        return modeling_tomoe.run_masked(mlp, x, expert_ids) * weight

    plan = make_plan(dense, "off")
    monkeypatch.setitem(modeling_tomoe.BACKENDS, "experts", {"weighted": modeling_tomoe.Backend(weighted)})
    assert difference(dense, plan) > RED


def test_query_heads_on_the_wrong_key_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads: repeating the key heads as a block instead of each in place."""

    def eager(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> object:
        groups = module.num_key_value_groups
        order = torch.arange(k.shape[1]).repeat(groups).view(k.shape[1], groups).flatten()
        monkeypatch.setattr(module, "num_key_value_groups", 1)
        out = right(module, q, k[:, order], v[:, order], *args, **kwargs)
        monkeypatch.setattr(module, "num_key_value_groups", groups)
        return out

    right = modeling_tomoe.eager_attention
    dense = make_pico("qwen2")
    dense.set_attn_implementation("eager")
    plan = make_plan(dense, "static")
    assert difference(dense, plan) < 1e-4
    monkeypatch.setattr(modeling_tomoe, "eager_attention", eager)
    assert difference(dense, plan) > RED
