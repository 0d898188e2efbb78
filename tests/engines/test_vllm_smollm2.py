"""The real SmolLM2-135M in vLLM: its stock export writes the text that the converted model writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm_runs import ask_transformers, ask_vllm, assert_alike, needs_vllm

from pico_files import CommandLine, write_text
from tomoe.model.catalog import MODELS, cache_folder
from tomoe.model.loading import load_tokenizer
from tomoe.moe.checkpoint import load_moe

NAME = "smollm2-135m"
cached = pytest.mark.skipif(
    not (cache_folder() / NAME / MODELS[NAME].gguf).is_file(), reason=f"{NAME} is not in the cache"
)
pytestmark = [pytest.mark.slow, pytest.mark.engine, needs_vllm, cached, pytest.mark.usefixtures("as_shipped")]

QUICK = {
    "train.steps": "0",
    "data.seq_len": "128",
    "data.tokens": "3072",
    "data.calibration_tokens": "1024",
    "data.evaluation_tokens": "512",
    "experts.form": "overlapping",
    "experts.num_experts": "2",
}
PROMPTS = ("The three most important things about the sea are", "In 1815, Napoleon was defeated at Waterloo by")
NEW_TOKENS = 24


def carve(tomoe: CommandLine, place: Path, **changes: str) -> Path:
    """A conversion of SmolLM2 without learning, on a text that is soon read."""
    text, out = write_text(place / "text.txt", sentences=400), place / "moe"
    settings = [word for key, value in (QUICK | changes).items() for word in ("--set", f"{key}={value}")]
    done = tomoe("carve", NAME, "-o", out, "--data", text, "--active", "0.8", *settings)
    assert done.code == 0, done.err
    return out


def test_the_mixtral_export_writes_the_same_text(tomoe: CommandLine, tmp_path: Path) -> None:
    made, out = carve(tomoe, tmp_path), tmp_path / "export"
    done = tomoe("export", made, "--format", "mixtral", "-o", out, "--tokens", "256")
    assert done.code == 0, done.err
    tokenizer = load_tokenizer(NAME)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    (answers,) = ask_vllm([{"folder": str(out), "prompts": prompts, "new_tokens": NEW_TOKENS}], tmp_path)
    assert_alike(answers, ask_transformers(out, prompts, NEW_TOKENS), tolerance=1e-3)
    moe = load_moe(made, "float32", "cpu")
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        written = moe.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        assert written[0, len(prompt) :].tolist() == answer.written
