"""Which models fit, by structure, and in what words the others are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from margins import assert_same, meaning
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from conftest import PICO, make_pico, make_plan, randomise, tokens
from tomoe.errors import UserError
from tomoe.model.offload import cast_
from tomoe.model.structure import check_output, shape_of
from tomoe.moe.fold import fold


def pico_of(model_type: str, **changes: Any) -> PreTrainedModel:
    try:
        config = AutoConfig.for_model(model_type, **PICO | changes)
    except ValueError:
        pytest.skip(f"this version of transformers has no {model_type}")
    torch.manual_seed(0)
    return randomise(AutoModelForCausalLM.from_config(config))


# Families that nobody named: their layers compute what ToMoE masks and folds.
ALIKE: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 8},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "stablelm": {},
    "nemotron": {"partial_rotary_factor": 0.5},
    "apertus": {},  # an activation with weights of its own, norms of Q and K
    "seed_oss": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "olmo": {},
}


# Per token both Q/K dims and values are masked; what static pruning of values cuts is tried on biases of Q, K and V.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "attention"), [*((kind, "per_token") for kind in ALIKE), ("seed_oss", "static")]
)
@torch.no_grad()
def test_families_alike_keep_the_equation(model_type: str, attention: str) -> None:
    dense = pico_of(model_type, **ALIKE[model_type])
    check_output(dense, attention=True)
    plan, ids = make_plan(dense, attention), tokens(2, 24, seed=5)
    meant = meaning(dense, plan, ids)
    assert (meant - dense(ids).logits).abs().max() > 1e-2
    assert_same(fold(dense, plan)(ids).logits, meant)


# Their attention cannot be pruned; they convert with attention whole (tests/contract/test_families.py).
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "fused QKV": ("phi3", {}, "fuses Q, K and V"),
    "latent attention": ("minicpm3", {"qk_rope_head_dim": 8, "num_key_value_heads": 4}, r"latent attention \(MLA\)"),
    "attention elsewhere": ("gpt2", {}, "no `self_attn`"),
    "interleaved pairs": ("cohere", {}, "pairs neighbouring dims"),
    "norm of all heads at once": ("olmo2", {}, "not an RMS norm over one head's dims"),
    "norm with another eps": ("gemma3_text", {"head_dim": 8}, "not an RMS norm over one head's dims"),
    "LayerNorm of Q and K": ("phi", {"qk_layernorm": True}, "LayerNorm"),
    "some layers without RoPE": (
        "smollm3",
        {"num_hidden_layers": 4},
        "the attention of layer 3 is not the usual formula",
    ),
    "RoPE in sliding layers only": (
        "exaone4",
        {"num_hidden_layers": 4, "sliding_window": 4},
        "the attention of layer 3 is not the usual formula",
    ),
    "differential attention": ("diffllama", {}, "the attention of layer 0 is not the usual formula"),
    "clipped projections": ("olmo", {"clip_qkv": 100.0}, "sets clip_qkv"),
    "capped logits": ("gemma2", {"head_dim": 8}, "sets attn_logit_softcapping"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_cannot_be_pruned_is_refused_only_if_it_is_pruned(name: str) -> None:
    model_type, changes, words = REFUSED[name]
    model = pico_of(model_type, **changes)
    with pytest.raises(
        UserError, match=f"^tomoe cannot prune the attention of this '{model_type}' model: .*{words}[^\n]*$"
    ):
        check_output(model, attention=True)
    assert not any(m._forward_hooks for m in model.modules())
    check_output(model)


def test_what_is_refused_is_not_folded() -> None:
    model = pico_of("smollm3", num_hidden_layers=4)
    with pytest.raises(UserError, match="not the usual formula"):
        fold(model, make_plan(model, "static"))


def test_an_mlp_that_does_more() -> None:
    model = make_pico("llama")
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: 1.01 * forward(x)
    with pytest.raises(UserError, match=r"the MLP of layer 1 is not the usual formula \(relative difference 0\.0099\)"):
        check_output(model)


@pytest.mark.parametrize(
    ("dtype", "implementation"), [(torch.float32, "eager"), (torch.bfloat16, "sdpa"), (torch.float16, "eager")]
)
def test_the_five_families_pass(dense: PreTrainedModel, dtype: torch.dtype, implementation: str) -> None:
    cast_(dense, dtype)
    dense.set_attn_implementation(implementation)
    check_output(dense, attention=True)


def test_a_model_that_is_no_language_model() -> None:
    with pytest.raises(UserError, match="cannot convert this 'Linear' model"):
        shape_of(nn.Linear(2, 2))
    headless = make_pico("llama").model
    with pytest.raises(UserError, match="cannot convert this 'llama' model"):
        shape_of(headless)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_damaged_weights_are_named(name: str) -> None:
    model = make_pico("llama")
    model.get_parameter(name).data[0, 0] = torch.nan
    with pytest.raises(UserError, match=f"its weights are damaged: {re.escape(name)} holds NaN or inf"):
        check_output(model)


def test_finite_weights_that_overflow_are_not_called_damaged() -> None:
    model = make_pico("llama")
    model.model.layers[0].mlp.down_proj.weight.data.fill_(3e38)
    with pytest.raises(UserError, match="no finite numbers in float32, though its weights are finite"):
        check_output(model)
