"""The command `tomoe`; `python -m tomoe` is the same."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

# of GNU's OpenMP in rounds of a loop (300,000 by default, and 1,000 if there are more threads than processors), of LLVM's and
# Intel's in milliseconds (200 by default)
SPINS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


def _leave(signum: int, _frame: FrameType | None) -> NoReturn:
    """End the process at once: code that is being imported may catch an exception, or print a traceback."""
    os.write(2, b"tomoe: stopped\n")
    os._exit(128 + signum)


def _open_streams() -> None:
    """Connect missing stdin, stdout or stderr (as under cron) to the null device: otherwise the next file opened gets that
    number, and the output of libraries."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # which takes the lowest free number
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115


def _wait_briefly() -> None:
    """Let waiting OpenMP threads spin for microseconds, not milliseconds: next to other work, spinning threads take the core.
    Settings of the user are kept. Read when PyTorch is imported."""
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", *SPINS)):
        os.environ.update(SPINS)


def main() -> NoReturn:
    """Run `tomoe.cli.main`; Ctrl-C ends it in one sentence, also during the imports."""
    _open_streams()
    _wait_briefly()
    # nothing has begun that would be left half done; a command has a handler of its own
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)
    from tomoe.cli import main as command

    command()


if __name__ == "__main__":
    main()
