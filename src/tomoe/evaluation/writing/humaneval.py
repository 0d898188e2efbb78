"""HumanEval: prompts for its problems, and whether generated functions pass their tests."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tomoe.data.sources import hub_rows, jsonl
from tomoe.errors import UserError

Problem = Mapping[str, Any]
NAME, HUB = "humaneval", "openai/openai_humaneval"
COLUMNS = ("prompt", "test", "entry_point")
MOST = 320  # tokens of an answer
AT_MARGIN = re.compile(r"\n(?=[^\s#)\]}])")
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


@dataclass(frozen=True)
class Prompt:
    """A problem as a prompt."""

    question: str  # what a chat model is asked
    begun: str  # what its answer begins with
    opening: str  # what a model without a chat template continues


def problems(folder: Path | None) -> list[Problem]:
    """Read all problems: from the .jsonl file in FOLDER/humaneval, else from the hub. Raises UserError if not found."""
    files = sorted((folder / NAME).glob("*.jsonl")) if folder is not None else []
    rows: list[Problem] = list(jsonl(files[0]) if files else hub_rows(HUB, "test"))
    for row in rows:
        if any(not isinstance(row.get(column), str) for column in COLUMNS):
            raise UserError(
                f"a problem of {files[0] if files else HUB} has the columns {', '.join(row) or 'none'}, but the task {NAME} "
                f"needs text in {', '.join(COLUMNS)}"
            )
    return rows


def prompt_of(row: Problem) -> Prompt:
    """Turn a problem into a prompt."""
    question = f"Complete this Python function. Answer with the whole function.\n\n```python\n{row['prompt']}```"
    return Prompt(question, f"```python\n{row['prompt']}", row["prompt"])


def function_ended(text: str) -> bool:
    """Whether the body of a function is over, at the first unindented line: code or the closing fence."""
    return AT_MARGIN.search("\n" + text) is not None


def body(text: str) -> str:
    """Return the lines that belong to the function."""
    return AT_MARGIN.split("\n" + text)[0].removeprefix("\n")


def runs(program: str) -> bool:
    """Whether a program runs to its end without an error: it has to reach a last line that is added here.

    It runs in a process and an empty folder of its own, with limits that keep mistakes from harm: endless loops, memory without
    end, files that fill the disk. They are not a sandbox: the process can read what its user can read, and reach the network.
    """
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
    """Kill the process and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def passes(row: Problem, text: str) -> bool:
    """Whether the generated function passes the tests of its problem."""
    return runs(f"{row['prompt']}{body(text)}\n\n{row['test']}\n\ncheck({row['entry_point']})\n")
