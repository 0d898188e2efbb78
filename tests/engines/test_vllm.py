"""Stock exports in vLLM itself, on the CPU: what it writes and predicts is what transformers does with the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_export_equation import CASES
from vllm_runs import Predicted, ask_transformers, ask_vllm, assert_alike, needs_vllm, post, serving

from conftest import make_pico, make_plan, tokens
from pico_tokenizer import make_tokenizer
from tomoe.exporting.targets import Options, choose, write_export
from tomoe.moe.fold import fold

pytestmark = [pytest.mark.slow, pytest.mark.engine, needs_vllm]

# vLLM's attention on the CPU wants heads of 32 or more dims, its experts hidden sizes that 32 divides
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}
HEADS = {"mistral": {"head_dim": 32}, "qwen3": {"head_dim": 32}}
PROMPTS = tokens(2, 20, seed=5).tolist()  # beyond the sliding window of mistral
NEW_TOKENS = 8


def write_pico_export(family: str, attention: str, target: str, folder: Path) -> None:
    """The export of a pico model that vLLM can run, with a tokenizer."""
    tokenizer = make_tokenizer()
    dense = make_pico(family, **SIZES, **HEADS.get(family, {}), vocab_size=len(tokenizer))
    moe = fold(dense, make_plan(dense, attention, active=0.8))
    write_export(choose(moe, target), moe, tokenizer, folder, Options(width_multiple=32))


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Path]:
    """A folder for every family, attention and target."""
    place = tmp_path_factory.mktemp("exports")
    folders = {case: place / "-".join(case) for case in CASES}
    for case, folder in folders.items():
        write_pico_export(*case, folder)
    return folders


@pytest.fixture(scope="module")
def predicted(
    exports: dict[tuple[str, str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str, str], list[Predicted]]:
    """What vLLM predicts for all of them: it starts once."""
    requests = [{"folder": str(f), "prompts": PROMPTS, "new_tokens": NEW_TOKENS} for f in exports.values()]
    return dict(zip(exports, ask_vllm(requests, tmp_path_factory.mktemp("vllm")), strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_vllm_predicts_what_transformers_does(
    case: tuple[str, str, str],
    exports: dict[tuple[str, str, str], Path],
    predicted: dict[tuple[str, str, str], list[Predicted]],
) -> None:
    assert_alike(predicted[case], ask_transformers(exports[case], PROMPTS, NEW_TOKENS), tolerance=1e-4)


def test_the_server_answers_with_the_text_that_transformers_writes(
    exports: dict[tuple[str, str, str], Path], tmp_path: Path
) -> None:
    folder, prompt = exports["llama", "off", "mixtral"], "the sea and a boat"
    tokenizer = make_tokenizer()
    (expected,) = ask_transformers(folder, [tokenizer(prompt).input_ids], NEW_TOKENS)
    with serving(folder, tmp_path / "log", "--dtype", "float32", "--max-model-len", "64", "--enforce-eager") as address:
        answer = post(
            f"{address}/completions", model=str(folder), prompt=prompt, max_tokens=NEW_TOKENS, temperature=0,
            ignore_eos=True, return_token_ids=True,
        )  # fmt: skip
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected.written
    text = tokenizer.decode(expected.written, skip_special_tokens=True)
    # the server holds back half a character at the end
    assert choice["text"].startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert answer["usage"]["completion_tokens"] == NEW_TOKENS
