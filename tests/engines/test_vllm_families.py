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
from tomoe.exporting.stock.fine_grained import FineGrained
from tomoe.exporting.target import Options
from tomoe.exporting.targets import TARGETS, choose, write_export
from tomoe.moe.fold import fold

pytestmark = [pytest.mark.slow, pytest.mark.engine, needs_vllm]

# What vLLM's attention and experts on the CPU want.
SIZES: dict[str, Any] = {"intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
OTHERWISE: dict[str, dict[str, Any]] = {
    # tokens beyond a window of cohere2 differ in vLLM's dense model alike
    "cohere2": {"sliding_window": 64},
    # latent attention has sizes of its own
    "youtu": {
        "num_key_value_heads": 2, "qk_head_dim": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "kv_lora_rank": 32, "q_lora_rank": 32,
    },
}  # fmt: skip
PROMPTS, NEW_TOKENS = tokens(2, 20, seed=5).tolist(), 8
# What vLLM 0.32 says of others on a CPU, in float32.
REFUSED = {"qwen3_5_text": "failed to be inspected", "youtu": "expect weight to be bfloat16"}
# Its router on a CPU leaves the correction of a softmax out; of lfm2 its dense model differs alike, from the second token on.
DIFFERS = {"ernie4_5", "lfm2"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The folder of each family, and what vLLM predicts with it."""
    place, tokenizer = tmp_path_factory.mktemp("families"), make_tokenizer()
    for family, (name, changes) in FAMILIES.items():
        target = cast(FineGrained, TARGETS[name])
        dense = tiny_model(family, **SIZES | changes | OTHERWISE.get(family, {}))
        moe = fold(dense, fitting(make_plan(dense, "off", form="fine"), target))
        write_export(choose(moe, name), moe, tokenizer, place / family, Options(width_multiple=32))
    request = {"prompts": PROMPTS, "new_tokens": NEW_TOKENS, "may_fail": True}
    found = ask_vllm([request | {"folder": str(place / family)} for family in FAMILIES], place)
    return {family: (place / family, answer) for family, answer in zip(FAMILIES, found, strict=True)}


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_predicts_what_transformers_does(family: str, answers: dict[str, tuple[Path, Any]]) -> None:
    folder, answer = answers[family]
    if family in REFUSED:
        assert REFUSED[family] in answer
        return
    assert not isinstance(answer, str), answer
    expected = ask_transformers(folder, PROMPTS, NEW_TOKENS)
    if family in DIFFERS:
        with pytest.raises(AssertionError):
            assert_routed_alike(answer, expected, tolerance=1e-4)
    else:
        assert_routed_alike(answer, expected, tolerance=1e-4)
