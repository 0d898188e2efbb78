"""The room on disk is looked for before the work, and is what a conversion writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from pico_files import CommandLine, pico_recipe, refused, write_pico, write_text
from pico_tokenizer import TOKENIZER
from tomoe.memory.disk import needed_bytes
from tomoe.pipeline.convert import convert
from tomoe.plans.repair import plan as repairing


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_pico(tmp_path / "dense", vocab_size=len(TOKENIZER))
    TOKENIZER.save_pretrained(tmp_path / "dense")
    write_text(tmp_path / "text.txt")
    return tmp_path


def test_what_is_written_is_what_was_counted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = pico_recipe(place, "train.steps=0", "repair.mode=full")
    kept = []
    forget = repairing.forget_repair
    monkeypatch.setattr(
        "tomoe.pipeline.convert.forget_repair",
        lambda run: (kept.append(sum(f.stat().st_size for f in (run / "repair").iterdir())), forget(run)),
    )
    convert(recipe, place / "moe")
    files = [place / "moe" / name for name in ("model.safetensors", "plan.safetensors")]
    written = sum(file.stat().st_size for file in files) + kept[0]
    # layers share a part of their neurons, routers come on top, and files have heads
    assert 0.8 * needed_bytes(recipe, 1) < written < 1.2 * needed_bytes(recipe, 1)
    assert needed_bytes(recipe, 2) > 1.3 * needed_bytes(recipe, 1)


def test_too_little_room_is_said_before_the_work(
    place: Path, tomoe: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    out = place / "out"
    command = ("convert", place / "dense", "--data", place / "text.txt", "--set", "data.seq_len=16", "-o", out)
    refused(
        tomoe(*command),
        "the conversion writes up to",
        "the model, its plan and what the repair keeps",
        "only 1 kB left",
        "free some",
    )
    assert not out.exists()
