"""A scheduler sends SIGTERM to all of a job, and torchrun sends it to its processes again, while they write their checkpoint."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from pico_files import CommandLine, small
from tomoe.pruning.learned import objective

pytestmark = pytest.mark.slow


def test_the_second_warning_does_not_break_what_the_first_one_began(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    options = [model, "--data", text, "-o", run]
    learn, write, calls = objective.distill_loss, safetensors.torch.save_file, iter(range(10**6))

    def warned(*args: Any) -> Any:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return learn(*args)

    def warned_again(tensors: Any, path: Path, **options: Any) -> None:
        # the text is written so as well
        if path.parent.name.startswith(".part-") and next(calls) > 3:
            signal.raise_signal(signal.SIGTERM)
        write(tensors, path, **options)

    with monkeypatch.context() as only_here:
        only_here.setattr(objective, "distill_loss", warned)
        only_here.setattr(safetensors.torch, "save_file", warned_again)
        stopped = tomoe("train", *options, *small(train_steps="6", train_save_every="100"))
    assert stopped.code == 143
    assert sorted(path.name for path in (run / "masks").iterdir())[-1] > "step-000000"
    assert not list((run / "masks").glob(".part-*"))
    assert tomoe("train", *options, "--resume", *small(train_steps="6", train_save_every="100")).code == 0
