"""Output of the command line: progress on stderr, results on stdout."""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
import threading
import time
import warnings as python_warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from tomoe.cli.signals import check
from tomoe.errors import Note, shortened
from tomoe.files import basename

if TYPE_CHECKING:
    from tomoe.report import page, warnings

# seconds between two lines of progress if there is no terminal
PLAIN_SECONDS = 10.0
STAGES = {
    "text": "preparing text",
    "carve": "carving",
    "rotate": "rotating values",
    "train": "learning",
    "repair": "repairing",
    "finetune": "fine-tuning",
}
TERMS = ("distill", "budget", "coverage", "balance", "active_fraction")
# control characters but newline and tab, changes of the writing direction, and halves of surrogate pairs
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
LONGEST_WORD = 500  # characters: a path is one word
BEGINNING = 300  # characters of a text that are shown


def printable(text: str) -> str:
    """Escape control characters: text from foreign files must not move the cursor."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def one_line(sentence: str) -> str:
    """Shorten a sentence to one line of printable text; of an endless word, as in damaged files, only the beginning."""
    words = printable(" ".join(sentence.split())).split(" ")
    return " ".join(word if len(word) <= LONGEST_WORD else shortened(word) for word in words)


class SafeConsole(Console):
    """A console that escapes control characters in every string, including those in cells of tables."""

    def __init__(self, file: TextIO, quiet: bool = False) -> None:
        # without a terminal lines are not folded at 80 columns: a file has no width
        super().__init__(file=file, highlight=False, quiet=quiet, width=None if file.isatty() else 160)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def say(self, *sentences: str) -> None:
        """Print each on a line of its own, however long, without reading it as markup."""
        for sentence in sentences:
            self.print(sentence, soft_wrap=True, markup=False)


def quiet_libraries() -> None:
    """Silence transformers and its companions except for errors; downloads keep their bars."""
    # here, because it takes seconds: a typing mistake ends before
    import transformers

    check()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # of several processes the first speaks for all
    for name in ("torch", "bitsandbytes", *(("tomoe",) if os.environ.get("RANK", "0") != "0" else ())):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def only_notes() -> Iterator[None]:
    """Inside the block, no Python warning is shown, unless the user asked for some (`python -W`); notes are, once each."""
    noted: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        note = one_line(str(message))
        if note not in noted:
            noted.add(note)
            print("tomoe: note:", note, file=sys.stderr)

    with python_warnings.catch_warnings():
        if not sys.warnoptions:
            python_warnings.simplefilter("ignore")
            python_warnings.simplefilter("always", Note)
            python_warnings.showwarning = show
        yield


def output() -> SafeConsole:
    # what was imported until here may have swallowed a Ctrl-C
    check()
    return SafeConsole(sys.stdout)


def show_warnings(console: SafeConsole, findings: Sequence[warnings.Finding], name: str = "") -> None:
    """Print one line per warning, after an empty one."""
    if findings:
        console.print()
    for finding in findings:
        console.say(f"Warning: {name}: {finding.text}." if name else f"Warning: {finding.text}.")


def show_text(console: SafeConsole, texts: Sequence[page.Generation]) -> None:
    """Print the beginning of each model's first text, side by side (the report has more)."""
    for text in texts[:1]:
        console.say(f"\nPrompt: {' '.join(text.prompt.split())}")
        for name, answer in text.answers:
            console.say(f"\n{basename(name)} writes: {textwrap.shorten(answer, BEGINNING, placeholder=' ...')}")


def duration(seconds: float) -> str:
    """Format seconds as `1:02:03` or `2:03`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def describe_step(row: Mapping[str, Any]) -> str:
    """Format loss terms, active fraction and speed of a training step in one line; NaN and inf show as "-"."""
    parts = [f"{term.removesuffix('_fraction')} {_decimal(row[term])}" for term in TERMS if term in row]
    if "tokens_per_second" in row:
        parts.append(f"{_decimal(row['tokens_per_second'], 0)} tokens/s")
    return "  ".join(parts)


def _decimal(value: object, digits: int = 3) -> str:
    try:
        return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"
    except OverflowError:
        return "-"


class Screen:
    """Progress of one command: bars on a terminal, a line every ten seconds elsewhere. Silences the libraries."""

    def __init__(self, console: Console | None = None) -> None:
        from tomoe import distributed

        quiet_libraries()
        # this stderr, even if others are silenced
        self.console = console or SafeConsole(sys.stderr, quiet=distributed.rank() > 0)
        self.detail = Text("loading", no_wrap=True, overflow="ellipsis", style="dim")
        # without a terminal it only keeps count
        self.bars = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            get_time=time.monotonic,
            speed_estimate_period=120,
        )
        self.live: Live | None = None
        self.tasks: dict[str, TaskID] = {}
        self.loaded = threading.Event()
        self.waiting: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live = Live(Group(self.bars, self.detail), console=self.console, refresh_per_second=4)
            self.live.start()
        elif not self.console.quiet:
            self.waiting = threading.Thread(target=self._say_loading, daemon=True)
            self.waiting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_loading()
        if self.live:
            self.detail.plain = ""
            self.live.stop()
            self.live = None

    def say(self, sentence: str) -> None:
        self.console.print(sentence, soft_wrap=True, markup=False)

    def on_progress(self, stage: str, done: int, total: int, info: Mapping[str, Any]) -> None:
        check()
        self._end_loading()
        if info.get("skipped"):
            self.say(f"step {done}: the loss was not finite, the step was skipped")
        begun: dict[str, Any] = {"completed": done, "first": done, "printed": time.monotonic()}
        if stage not in self.tasks:
            self.tasks[stage] = self.bars.add_task(STAGES.get(stage, stage), total=total, **begun)
        task = self.bars.tasks[self.tasks[stage]]
        if task.finished and done < total:
            # the same again, of another share
            self.bars.reset(task.id, **begun)
        ended = task.finished
        self.bars.update(task.id, completed=min(done, total), total=total)
        self.detail.plain = describe_step(info)
        if not self.live and not ended:
            self._print(task)

    def _say_loading(self) -> None:
        """Print a line now and then until a stage reports: loading a large model may take minutes."""
        began = time.monotonic()
        seconds = PLAIN_SECONDS
        while not self.loaded.wait(seconds):
            self.say(f"loading  {duration(time.monotonic() - began)} so far")
            seconds *= 2

    def _end_loading(self) -> None:
        self.loaded.set()
        if self.waiting:
            self.waiting.join()
            self.waiting = None

    def _print(self, task: Task) -> None:
        """Print a line about the stage if it has ended or the last line is long ago."""
        done, total, now = int(task.completed), int(task.total or 0), time.monotonic()
        if task.finished_time is not None:
            clock = f"took {duration(task.finished_time)}"
        elif now - task.fields["printed"] >= PLAIN_SECONDS:
            clock = f"{duration((task.elapsed or 0) / max(done - task.fields['first'], 1) * (total - done))} left"
        else:
            return
        self.bars.update(task.id, printed=now)
        self.say("  ".join(filter(None, [f"{task.description} {done}/{total}", clock, self.detail.plain])))
