"""The command `tomoe`, which is `python -m tomoe`, too."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def _leave(signum: int, _frame: FrameType | None) -> NoReturn:
    """End at once: what is being imported may catch an exception, or print it with a traceback."""
    os.write(2, b"tomoe: stopped\n")
    os._exit(128 + signum)


def _open_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr, as by cron, one that leads nowhere: else the next file
    that is opened takes the number, and gets what libraries print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # which takes the lowest free number
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115


def main() -> NoReturn:
    """`tomoe.cli.main`, which Ctrl-C ends in one sentence while it is being imported, too."""
    _open_streams()
    # nothing has begun that would be left half done; a command has a handler of its own
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)
    from tomoe.cli import main as command

    command()


if __name__ == "__main__":
    main()
