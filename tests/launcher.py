"""Starts several processes on one command, as torchrun does; and the small run that tests share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pico_files import small

# What the command line loads when it is first used, and what transformers does: a forked process has it then.
EVERYTHING = """
import sys
import gguf, torch, torch.distributed, torch.profiler
import tomoe.conversion.convert, tomoe.conversion.verbs, tomoe.data.corpus, tomoe.evaluation.evaluate, tomoe.finetuning.finetune
import tomoe.report.build, tomoe.training.loop
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM
from tomoe.cli import main
"""

ALWAYS_BETTER = "always better: "
"""The word before a command whose processes take every step of fine-tuning for better."""
# Does what torchrun does without importing torch in every process: for each line of JSON on stdin it forks that many
# processes, tells each its rank, and sends the signal to the victims as soon as there is a checkpoint after that of step 0.
FORK = (
    EVERYTHING
    + f"""
ALWAYS_BETTER = {ALWAYS_BETTER!r}
sys.path.insert(0, {str(Path(__file__).parent)!r})
"""
    + """
import pico_files, pytest
import json, os, resource, signal, socket, sys, time
from pathlib import Path

torch.set_num_threads(1)
for line in sys.stdin:
    count, victims, signum, limits, command = json.loads(line)
    limits = {int(rank): size for rank, size in limits.items()}
    out = Path(command[command.index("-o" if "-o" in command else "--json") + 1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
            os.environ.update({name: str(value) for name, value in place.items()})
            log = os.open(f"{out}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if rank in limits:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limits[rank], limits[rank]))
            if command[0] == ALWAYS_BETTER:
                pico_files.always_better(pytest.MonkeyPatch())
                del command[0]
            try:
                main(command)
            except SystemExit as left:
                os._exit(left.code or 0)
        children.append(pid)
    while victims and not any((out / "masks").glob("step-*[1-9]*")):
        time.sleep(0.01)
    for victim in victims:
        os.kill(children[victim], signum)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]), flush=True)
"""
)


class Launcher:
    """Runs a command in several processes, forked from one that has imported everything."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def __call__(
        self,
        count: int,
        *command: str | Path,
        victims: Sequence[int] = (),
        signum: int = signal.SIGKILL,
        limits: Mapping[int, int] | None = None,
    ) -> list[int]:
        """Return the exit codes. What process R prints is in OUT.R.log, where OUT follows -o or --json.

        `victims` get the signal; `limits` maps the rank of a process to the bytes that its files may have.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(
            json.dumps([count, list(victims), signum, dict(limits or {}), [str(word) for word in command]]) + "\n"
        )
        self.process.stdin.flush()
        codes: list[int] = json.loads(self.process.stdout.readline())
        return codes


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def masks(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "masks" / f"step-{step:06d}" / "masks.safetensors")


def train(inputs: Path, out: Path, *more: str) -> list[str | Path]:
    sizes = small(
        train_steps="8", train_save_every="8", train_gradient_accumulation_steps="4", train_learning_rate="0.01"
    )
    return [
        "train",
        inputs / "dense",
        "--data",
        inputs / "text.txt",
        "--attention",
        "per_token",
        "-o",
        out,
        *sizes,
        *more,
    ]


def assert_same_run(actual: Path, expected: Path) -> None:
    """Sums of gradients are taken in another order, so the last bits differ, and AdamW's division makes more of them."""
    for mine, theirs in zip(metrics(actual), metrics(expected), strict=True):
        assert mine["tokens"] == theirs["tokens"]
        for name in ("loss", "distill", "budget", "coverage", "balance", "gradient_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), (name, mine["step"])
    before, ours, whole = masks(expected, 0), masks(actual, 8), masks(expected, 8)
    moved = sum(float((whole[n] - before[n]).norm()) for n in whole)
    apart = sum(float((ours[n] - whole[n]).norm()) for n in whole)
    assert moved > 1
    assert apart < 1e-3 * moved
