"""Ctrl-C and SIGTERM end a command with one sentence that says how to resume."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Stopped(BaseException):
    """The user or the machine stops the command. A BaseException, so that no error handler catches it."""

    def __init__(self, signum: int):
        self.signum, self.advice = signum, ""

    def __str__(self) -> str:
        return f"stopped{self.advice}"


_received: list[int] = []  # signals that arrived inside the `stoppable` block


def _raise(signum: int, _frame: FrameType | None) -> None:
    """Raise Stopped at the first signal, and at every further Ctrl-C: a scheduler and torchrun both signal a process, and the
    second signal must not interrupt the writing of a checkpoint."""
    _received.append(signum)
    if len(_received) == 1 or signum == signal.SIGINT:
        raise Stopped(signum)


def check() -> None:
    """Raise again: Python drops an exception that a signal raises while a destructor or a callback in C is running."""
    if _received:
        raise Stopped(_received[0])


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise Stopped for both signals within the block, at the next `check` at the latest, or where something fails. A signal that
    was ignored when this process started stays ignored: a shell does so for background jobs."""
    heeded = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, _raise) for signum in heeded}
    hook = sys.unraisablehook
    # Python prints what it drops, with a traceback
    sys.unraisablehook = lambda dropped: None if isinstance(dropped.exc_value, Stopped) else hook(dropped)
    try:
        yield
    except Exception:
        # what a library makes of a Stopped that it caught
        check()
        raise
    finally:
        sys.unraisablehook = hook
        _received.clear()
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def resumable(run: Path) -> Iterator[None]:
    """Add how to resume to a Stopped that leaves the block, if the run has begun."""
    try:
        yield
    except Stopped as stopped:
        if (run / "recipe.json").is_file():
            stopped.advice = (
                "; nothing before the last checkpoint is lost, run the same command with --resume to continue"
            )
        raise
