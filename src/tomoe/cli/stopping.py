"""Ctrl-C and SIGTERM end a command with one sentence that says how to go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Stopped(BaseException):
    """The user, or the machine, asked us to stop. No Exception, so that nothing on the way takes it for an error."""

    def __init__(self, signum: int):
        self.signum, self.advice = signum, ""

    def __str__(self) -> str:
        return f"stopped{self.advice}"


_heard: list[int] = []  # signals that came inside the `stoppable` block


def _raise(signum: int, _frame: FrameType | None) -> None:
    """A scheduler warns every process, and torchrun warns its own once more: that must not break the writing of a checkpoint.

    Ctrl-C pressed again does.
    """
    _heard.append(signum)
    if len(_heard) == 1 or signum == signal.SIGINT:
        raise Stopped(signum)


def check() -> None:
    """Raise again: Python drops an exception that a signal raises while a destructor or a callback in C is running."""
    if _heard:
        raise Stopped(_heard[0])


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside the block both signals raise Stopped, at the latest at the next `check`."""
    before = {signum: signal.signal(signum, _raise) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        _heard.clear()
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def resumable(run: Path) -> Iterator[None]:
    """A Stopped that leaves the block says how to go on, where the run has begun."""
    try:
        yield
    except Stopped as stopped:
        if (run / "recipe.json").is_file():
            stopped.advice = (
                "; nothing before the last checkpoint is lost, give the same command with --resume to go on"
            )
        raise
