"""Attention of one new bfloat16 token by matrix products is what `sdpa` computes, and stands in for it only there."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from conftest import FAMILIES, make_pico, pico_moe, tokens
from tomoe import load
from tomoe.model import single_query
from tomoe.model.structure import CACHE

B, G, T = 2, 3, 11


def drawn(heads: int, width: int = 8, values: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values in float64."""
    generator = torch.Generator().manual_seed(heads)
    sizes = (B, heads, 1, width), (B, G, T, width), (B, G, T, values)
    query, key, value = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes)
    return query, key, value


def masks() -> dict[str, Tensor | None]:
    seen = torch.ones(B, 1, 1, T, dtype=torch.bool)
    seen[0, ..., :4] = False
    added = torch.linspace(-2, 2, T, dtype=torch.float64).expand(1, 1, 1, T)
    return {"none": None, "seen": seen, "added": added}


@pytest.mark.parametrize("mask", ["none", "seen", "added"])
@pytest.mark.parametrize(("heads", "values"), [(12, 8), (3, 8), (6, 5)])
def test_it_is_the_attention_of_pytorch(heads: int, values: int, mask: str) -> None:
    query, key, value = drawn(heads, values=values)
    given = masks()[mask]
    found = single_query.attend(query, key, value, given, 0.3)
    assert found.shape == (B, 1, heads, values)
    repeated = (t.repeat_interleave(heads // G, 1) for t in (key, value))
    meant = F.scaled_dot_product_attention(query, *repeated, attn_mask=given, scale=0.3)
    # the scores are kept in float32
    assert (found - meant.transpose(1, 2)).abs().max() < 1e-5


class Asked:
    """How often `attend` was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.times, attend = 0, single_query.attend

        def counted(*args: Any) -> Tensor:
            self.times += 1
            return attend(*args)

        monkeypatch.setattr(single_query, "attend", counted)


def step(model: PreTrainedModel, cached: int = 9) -> Tensor:
    """Logits of one more token of two rows, one of which began with padding."""
    ids = tokens(2, cached + 1)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache = {CACHE: DynamicCache(config=model.config)}
    model(ids[:, :cached], attention_mask=mask[:, :cached], use_cache=True, **cache)
    logits: Tensor = model(ids[:, cached:], attention_mask=mask, use_cache=True, **cache).logits
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("no_grad")
def test_models_decode_what_they_decoded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where roundings hide nothing."""
    monkeypatch.setattr(single_query, "DTYPE", torch.float32)
    model = make_pico(family)
    asked, before = Asked(monkeypatch), step(model)
    single_query.use_matrix_products_(model)
    after = step(model)
    assert asked.times == model.config.num_hidden_layers
    assert (after - before).abs().max() < 1e-4 * before.abs().max()


@pytest.mark.usefixtures("no_grad")
def test_a_family_that_compares_names_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_pico("llama")
    monkeypatch.setattr(inspect, "getsource", lambda _: 'if self.config._attn_implementation == "sdpa":')
    single_query.use_matrix_products_(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("no_grad")
def test_pruned_heads_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other functions than eager and sdpa get them padded."""
    moe, _ = pico_moe("llama")
    moe.to(torch.bfloat16)
    single_query.use_matrix_products_(moe)
    asked, widths = Asked(monkeypatch), set()
    own = single_query.attend

    def seen(query: Tensor, *args: Any) -> Tensor:
        widths.add(query.shape[-1])
        return own(query, *args)

    monkeypatch.setattr(single_query, "attend", seen)
    step(moe)
    assert asked.times == moe.config.num_hidden_layers
    assert widths == set(moe.config.tomoe_qk_dims)
    assert min(widths) < moe.config.head_dim


@pytest.mark.usefixtures("no_grad")
def test_what_else_sdpa_does_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several new tokens, other dtypes, masks of single heads, dropout."""
    taken: list[dict[str, Any]] = []

    def stock(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        taken.append(kwargs)
        return args[1], None

    functions = AttentionInterface()
    functions["sdpa"] = stock
    monkeypatch.setattr(single_query, "ALL_ATTENTION_FUNCTIONS", functions)
    asked, module = Asked(monkeypatch), torch.nn.Module()
    query, key, value = (t.bfloat16() for t in drawn(6))
    single_query.attention(module, query, key, value, None)
    assert (asked.times, len(taken)) == (1, 0)
    others: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((query.expand(-1, -1, 2, -1), key, value), {}),
        ((query.float(), key.float(), value.float()), {}),
        ((query, key, value), {"attention_mask": torch.ones(B, 6, 1, T, dtype=torch.bool)}),
        ((query, key, value), {"dropout": 0.1}),
        ((query, key, value), {"position_bias": torch.zeros(1, 6, 1, T)}),
        ((query, key, value), {"softcap": 30.0}),
    ]
    for tensors, options in others:
        single_query.attention(module, *tensors, **({"attention_mask": None} | options))
    assert (asked.times, len(taken)) == (1, len(others))
    assert taken[-1]["softcap"] == 30.0
    assert "position_bias" in taken[-2]


def test_loaded_models_have_it(model: Path) -> None:
    assert load(model, "bfloat16", "cpu")[0].config._attn_implementation == single_query.NAME
    # who chose another kind keeps it
    other = load(model, "bfloat16", "cpu")[0]
    other.set_attn_implementation("eager")
    single_query.use_matrix_products_(other)
    assert other.config._attn_implementation == "eager"
