"""Tasks whose answers are written: HumanEval, whose programs are run, and GSM8K, whose numbers are compared."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tomoe.data.sources import hub_rows, jsonl
from tomoe.errors import UserError

Row = Mapping[str, Any]
AT_MARGIN = re.compile(r"\n(?=[^\s#)\]}])")
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
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
    """A problem, as it is put to a model."""

    question: str  # what a chat model is asked
    begun: str  # what its answer begins with
    opening: str  # what a model without a chat template continues


@dataclass(frozen=True)
class WrittenTask:
    """Where the problems of a task are, how they are put, and what counts as solved."""

    name: str
    metric: str
    hub: tuple[str, str | None]  # data set on the hub and its config; the split is `test`
    columns: tuple[str, ...]
    most: int  # tokens of an answer
    prompt: Callable[[Row], Prompt]
    ended: Callable[[str], bool]  # whether what was written is a whole answer
    solved: Callable[[Row, str], bool]
    runs_code: bool = False

    def rows(self, folder: Path | None) -> list[Row]:
        """All problems: of the .jsonl file in FOLDER/name, else of the hub. Raises UserError if they are not found."""
        files = sorted((folder / self.name).glob("*.jsonl")) if folder is not None else []
        if files:
            rows: list[Row] = list(jsonl(files[0]))
        else:
            name, config = self.hub
            rows = list(hub_rows(name, "test", config=config))
        for row in rows:
            if any(not isinstance(row.get(column), str) for column in self.columns):
                raise UserError(
                    f"a problem of {files[0] if files else self.hub[0]} has the columns {', '.join(row) or 'none'}, but the "
                    f"task {self.name} needs text in {', '.join(self.columns)}"
                )
        return rows


def _function(row: Row) -> Prompt:
    question = f"Complete this Python function. Answer with the whole function.\n\n```python\n{row['prompt']}```"
    return Prompt(question, f"```python\n{row['prompt']}", row["prompt"])


def function_ended(text: str) -> bool:
    """Whether the body of a function is over: a line begins at the margin, be it code or the fence around all."""
    return AT_MARGIN.search("\n" + text) is not None


def body(text: str) -> str:
    """The lines that belong to the function."""
    return AT_MARGIN.split("\n" + text)[0].removeprefix("\n")


def runs(program: str) -> bool:
    """Whether a program comes to its end without an error: it has to reach a last line that is added here.

    It runs in a process and an empty folder of its own, with limits that keep mistakes from harm: endless loops, memory without
    end, files that fill the disk. They are no prison: the process can read what its user can read, and reach the network.
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
    """End the process and whatever it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _passes(row: Row, text: str) -> bool:
    return runs(f"{row['prompt']}{body(text)}\n\n{row['test']}\n\ncheck({row['entry_point']})\n")


def _word_problem(row: Row) -> Prompt:
    question = f"{row['question']}\nReason step by step. At the end write #### and the answer as a number."
    return Prompt(question, "", f"Question: {row['question']}\nAnswer:")


def _word_problem_ended(text: str) -> bool:
    return re.search(r"####\s*\S+\s|\nQuestion:", text) is not None


def answer_of(text: str) -> float | None:
    """The number after ####, or else the last one."""
    text = text.split("\nQuestion:")[0]
    _, marked, after = text.partition("####")
    found = NUMBER.findall(after)[:1] if marked and NUMBER.search(after) else NUMBER.findall(text)[-1:]
    return float(found[0].replace(",", "").replace("$", "")) if found else None


WRITTEN = {
    task.name: task
    for task in (
        WrittenTask(
            "humaneval",
            "pass@1",
            ("openai/openai_humaneval", None),
            ("prompt", "test", "entry_point"),
            320,
            _function,
            function_ended,
            _passes,
            runs_code=True,
        ),
        WrittenTask(
            "gsm8k",
            "exact match",
            ("openai/gsm8k", "main"),
            ("question", "answer"),
            320,
            _word_problem,
            _word_problem_ended,
            lambda row, text: answer_of(text) == answer_of(row["answer"]),
        ),
    )
}
