"""Starts several processes on one command, as torchrun does; and the small run that tests share."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import pytest
import torch
from jaxtyping import config
from safetensors.torch import load_file

from pico_files import ended, forked, metrics, small
from tomoe.cli import main


def launch(
    count: int,
    *command: str | Path,
    victims: Sequence[int] = (),
    signum: int = signal.SIGKILL,
    limits: Mapping[int, int] | None = None,
) -> list[int]:
    """Run a command in several processes, forked from this one, which has imported everything; return their exit codes.

    What process R prints is in OUT.R.log, where OUT follows -o or --json. `victims` get the signal as soon as there is a
    checkpoint after that of step 0; `limits` maps the rank of a process to the bytes that its files may have.
    """
    words = [str(word) for word in command]
    out = Path(words[words.index("-o" if "-o" in words else "--json") + 1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}

    def work(rank: int) -> None:
        os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank))
        config.update("jaxtyping_disable", True)  # as users run it
        if limits and rank in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[rank], limits[rank]))
        with Path(f"{out}.{rank}.log").open("w", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
            try:
                main(words)
            except Exception:
                traceback.print_exc()
                raise

    children = [forked(partial(work, rank)) for rank in range(count)]
    while victims and not any((out / "masks").glob("step-*[1-9]*")):
        time.sleep(0.01)
    for victim in victims:
        os.kill(children[victim], signum)
    return [ended(child) for child in children]


def masks(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "masks" / f"step-{step:06d}" / "masks.safetensors")


def train(inputs: Path, out: Path, *more: str) -> list[str | Path]:
    sizes = small(
        train_steps="4",
        train_save_every="4",
        train_gradient_accumulation_steps="4",
        train_learning_rate="0.01",
        attention_pruning="per_token",
        data_calibration_tokens="64",
        data_evaluation_tokens="32",
    )
    return ["train", inputs / "dense", "--data", inputs / "text.txt", "-o", out, *sizes, *more]


def assert_same_run(actual: Path, expected: Path) -> None:
    """Sums of gradients are taken in another order, so the last bits differ, and AdamW's division makes more of them."""
    for mine, theirs in zip(metrics(actual), metrics(expected), strict=True):
        assert mine["tokens"] == theirs["tokens"]
        for name in ("loss", "distill", "budget", "coverage", "balance", "gradient_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), (name, mine["step"])
    before, ours, whole = masks(expected, 0), masks(actual, 4), masks(expected, 4)
    moved = sum(float((whole[n] - before[n]).norm()) for n in whole)
    apart = sum(float((ours[n] - whole[n]).norm()) for n in whole)
    assert moved > 1
    assert apart < 1e-3 * moved
