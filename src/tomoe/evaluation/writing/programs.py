"""Runs a program that a model wrote: in a process of its own, with limits on time, memory and files.

The limits keep mistakes from harm: endless loops, memory without end, files that fill the disk. They are no prison: the
process can read what its user can read, and reach the network, so it runs only where the user asked for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile

SECONDS = 10
_BYTES = 2**30
_FILE_BYTES = 2**20
# The limits are set by the process itself, before it reads the program; nothing can raise them again.
_LIMITED = f"""
import resource, sys
for name, most in (("CPU", {SECONDS}), ("AS", {_BYTES}), ("FSIZE", {_FILE_BYTES}), ("NOFILE", 16), ("NPROC", 0), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
exec(compile(sys.stdin.read(), "program", "exec"), {{"__name__": "__main__"}})
"""


def runs(program: str) -> bool:
    """Whether a program comes to its end without an error, in an empty folder: it has to reach a last line that is added
    here."""
    word = secrets.token_hex(16)
    command = [sys.executable, "-I", "-S", "-B", "-c", _LIMITED]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(f"{program}\nprint({word!r})\n", timeout=SECONDS)
        except subprocess.TimeoutExpired:
            out = ""
        finally:
            _end(process)
    return out.rstrip().endswith(word)


def _end(process: subprocess.Popen[str]) -> None:
    """End the process and whatever it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
