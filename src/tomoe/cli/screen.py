"""What a user sees: progress on stderr, results on stdout."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from tomoe import distributed
from tomoe.cli.stopping import check
from tomoe.report.warnings import Finding

PLAIN_SECONDS = 10.0  # between two lines of progress where there is no terminal
STAGES = {"text": "preparing text", "carve": "carving", "train": "learning", "finetune": "fine-tuning"}
TERMS = {
    "fidelity": "fidelity",
    "budget": "budget",
    "coverage": "coverage",
    "balance": "balance",
    "active_fraction": "active",
}


def quiet_libraries() -> None:
    """Only our own words, and errors, reach the terminal; downloads keep their bars."""
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for talker in ("torch", "bitsandbytes"):  # peft imports the latter where it is installed
        logging.getLogger(talker).setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def results() -> Console:
    """Where tables go. Without a terminal lines are not folded at 80 columns: a file has no width."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=160)


def show_warnings(console: Console, warnings: Sequence[Finding], name: str = "") -> None:
    """One line for each, after an empty one; nothing where there are none."""
    if warnings:
        console.print()
    for warning in warnings:
        said = f"Warning: {name}: {warning.text}." if name else f"Warning: {warning.text}."
        console.print(said, soft_wrap=True, markup=False)


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def describe_step(known: dict[str, Any]) -> str:
    """Loss terms, sampled active fraction and speed of a training step, in one line."""
    parts = [f"{word} {known[key]:.3f}" for key, word in TERMS.items() if key in known]
    if "tokens_per_second" in known:
        parts.append(f"{known['tokens_per_second']:.0f} tokens/s")
    return "  ".join(parts)


class Screen:
    """Progress of one command: bars with the time left on a terminal, a line every ten seconds elsewhere.

    `listen` is the Listener of `tomoe.conversion`.
    """

    def __init__(self, console: Console | None = None) -> None:
        # this stderr, even where others are silenced
        self.console = console or Console(file=sys.stderr, highlight=False, quiet=distributed.rank() > 0)
        columns = (
            TextColumn("{task.description:<14}"), BarColumn(24), MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )  # fmt: skip
        self.bars = Progress(*columns, console=self.console, speed_estimate_period=120)
        self.detail = Text("loading", no_wrap=True, overflow="ellipsis", style="dim")
        self.live: Live | None = None
        self.tasks: dict[str, TaskID] = {}
        self.begun: dict[str, tuple[float, int]] = {}  # stage -> (seconds, done) when first heard of
        self.printed: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live = Live(Group(self.bars, self.detail), console=self.console, refresh_per_second=4)
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.detail.plain = ""
            self.live.stop()
            self.live = None

    def say(self, sentence: str) -> None:
        self.console.print(sentence, soft_wrap=True)

    def listen(self, stage: str, done: int, total: int, known: dict[str, Any]) -> None:
        check()
        if known.get("skipped"):
            self.say(f"step {done}: the loss was not finite, the step was skipped")
        self.begun.setdefault(stage, (time.monotonic(), done))
        if self.live:
            self._draw(stage, done, total, known)
        else:
            self._print(stage, done, total, known)

    def _draw(self, stage: str, done: int, total: int, known: dict[str, Any]) -> None:
        if stage not in self.tasks:
            self.tasks[stage] = self.bars.add_task(STAGES.get(stage, stage), total=total, completed=done)
        self.bars.update(self.tasks[stage], completed=min(done, total), total=total)
        self.detail.plain = describe_step(known)

    def _print(self, stage: str, done: int, total: int, known: dict[str, Any]) -> None:
        now, (began, first) = time.monotonic(), self.begun[stage]
        if done < total and now - self.printed.get(stage, began) < PLAIN_SECONDS:
            return
        self.printed[stage] = now
        if done >= total:
            clock = f"took {duration(now - began)}"
        else:
            clock = f"{duration((now - began) / max(done - first, 1) * (total - done))} left"
        self.say("  ".join(filter(None, [f"{STAGES.get(stage, stage)} {done}/{total}", clock, describe_step(known)])))
