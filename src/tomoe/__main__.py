"""The command `tomoe`, which is `python -m tomoe`, too."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn


def _leave(signum: int, _frame: FrameType | None) -> NoReturn:
    """End at once: what is being imported may catch an exception, or print it with a traceback."""
    os.write(2, b"tomoe: stopped\n")
    os._exit(128 + signum)


def main() -> NoReturn:
    """`tomoe.cli.main`, which Ctrl-C ends in one sentence while it is being imported, too."""
    # nothing has begun that would be left half done; a command has a handler of its own
    signal.signal(signal.SIGINT, _leave)
    from tomoe.cli import main as command

    command()


if __name__ == "__main__":
    main()
