"""Stock classes with a family's own attention in vLLM on the CPU: it predicts what transformers does, or says why it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from family_contract import tiny_model
from test_family_export_equation import FAMILIES, fitting
from vllm_runs import ask_transformers, ask_vllm, assert_routed_alike, needs_vllm

from conftest import make_plan, tokens
from pico_tokenizer import make_tokenizer
from tomoe.exporting.fine_grained import FineGrained
from tomoe.exporting.target import Options
from tomoe.exporting.targets import TARGETS, choose, write_export
from tomoe.moe.fold import fold

pytestmark = [pytest.mark.slow, pytest.mark.engine, needs_vllm]

# What vLLM's attention and experts on the CPU want.
SIZES: dict[str, Any] = {"intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
# Latent attention has sizes of its own.
LATENT: dict[str, Any] = {"intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
PROMPTS, NEW_TOKENS = tokens(2, 20, seed=5).tolist(), 8
# What vLLM 0.32 says of the others on a CPU.
CANNOT: dict[str, str] = {}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The folder of each family, and what vLLM predicts with it."""
    place, tokenizer = tmp_path_factory.mktemp("families"), make_tokenizer()
    for family, (name, changes) in FAMILIES.items():
        target = cast(FineGrained, TARGETS[name])
        dense = tiny_model(family, **(LATENT if family == "youtu" else SIZES) | changes)
        moe = fold(dense, fitting(make_plan(dense, "off", form="fine"), target))
        write_export(choose(moe, name), moe, tokenizer, place / family, Options(width_multiple=32))
    request = {"prompts": PROMPTS, "new_tokens": NEW_TOKENS, "may_fail": True}
    found = ask_vllm([request | {"folder": str(place / family)} for family in FAMILIES], place)
    return {family: (place / family, answer) for family, answer in zip(FAMILIES, found, strict=True)}


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_predicts_what_transformers_does(family: str, answers: dict[str, tuple[Path, Any]]) -> None:
    folder, answer = answers[family]
    if family in CANNOT:
        assert CANNOT[family] in answer
        pytest.skip(CANNOT[family])
    assert not isinstance(answer, str), answer
    assert_routed_alike(answer, ask_transformers(folder, PROMPTS, NEW_TOKENS), tolerance=1e-4)
