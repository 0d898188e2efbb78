"""What masks lose on held-out text is measured before and after training; a plan whose training lost is not passed over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from pico_files import pico_recipe
from tomoe.data.corpus import Corpus
from tomoe.pipeline.convert import convert
from tomoe.report.warnings import find_warnings

pytestmark = pytest.mark.slow


@torch.no_grad()
def held_out_kl(place: Path, out: Path) -> float:
    """KL(dense || converted) on the text that the conversion holds out, from the two models' logits."""
    dense, moe = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (place / "dense", out))
    ids = Corpus.load(out / "run" / "corpus.safetensors").evaluation.input_ids
    log_p, log_q = (model(ids).logits.log_softmax(-1) for model in (dense, moe))
    return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1).mean().item()


def test_the_losses_are_those_of_the_converted_models(place: Path, tmp_path: Path) -> None:
    settings = ("repair.mode=none", "start=carved")
    start = convert(pico_recipe(place, "train.steps=0", *settings), tmp_path / "start")
    trained = convert(pico_recipe(place, "train.steps=2", *settings), tmp_path / "trained")
    assert "held_out" not in start.notes
    before, after = trained.notes["held_out_before"], held_out_kl(place, tmp_path / "trained")
    assert before == pytest.approx(held_out_kl(place, tmp_path / "start"), rel=1e-3)
    # the smaller of both is noted
    assert trained.notes["held_out"] == pytest.approx(min(before, after), rel=1e-3)


def test_a_training_that_lost_is_a_sentence(place: Path, tmp_path: Path) -> None:
    settings = ("repair.mode=none", "start=carved", "train.steps=2", "train.learning_rate=1", "train.weight_decay=0")
    # it loses by far: what it had times 1.4 to 2.9, 1.95 on average, over eight seeds
    plan = convert(pico_recipe(place, *settings), tmp_path / "lost")
    (found,) = [finding for finding in find_warnings(plan) if finding.kind == "worse than before"]
    assert f"{plan.notes['held_out_before']:.3f} before the first step" in found.text
    better = replace(plan, notes=plan.notes | {"held_out": plan.notes["held_out_before"] / 2})
    assert not [finding for finding in find_warnings(better) if finding.kind == "worse than before"]
