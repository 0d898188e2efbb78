"""Progress with and without a terminal, and signals that come at a bad moment."""

from __future__ import annotations

import importlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from tomoe.cli import main
from tomoe.cli.console import Screen, duration
from tomoe.cli.signals import Stopped, check, stoppable

TERMS = {"distill": 1.25, "budget": 0.5, "coverage": 0.25, "balance": 0.125}
ROW = TERMS | {"active_fraction": 0.7, "tokens_per_second": 50}


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def a_screen(terminal: bool) -> tuple[Screen, io.StringIO]:
    shown = io.StringIO()
    return Screen(Console(file=shown, force_terminal=terminal, width=120, highlight=False)), shown


def test_without_a_terminal_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (screen, shown) = Clock(monkeypatch), a_screen(terminal=False)
    with screen:
        for step in range(11, 111):  # a resumed run: ten steps were done before
            screen.on_progress("train", step, 110, ROW)
            clock.now += 1
    lines = shown.getvalue().splitlines()
    # 99 steps take 99 seconds; what is left counts the steps of this process alone
    assert len(lines) == 10
    assert lines[0].startswith("learning 21/110  1:29 left")
    assert lines[-1].startswith("learning 110/110  took 1:39")
    for word in ("distill 1.250", "budget 0.500", "coverage 0.250", "balance 0.125", "active 0.700", "50 tokens/s"):
        assert word in lines[0]


def test_a_stage_ends_once_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes are rounded, so a file may be whole several times; and a model may be measured at several shares."""
    clock, (screen, shown) = Clock(monkeypatch), a_screen(terminal=False)
    with screen:
        for done in (1, 2, 2, 2):
            clock.now += 3
            screen.on_progress("writing (MB)", done, 2, {})
        for done in (1, 2):
            clock.now += 100
            screen.on_progress("writing (MB)", done, 2, {})
    assert shown.getvalue().splitlines() == ["writing (MB) 2/2  took 0:03", "writing (MB) 2/2  took 1:40"]


def test_a_log_tells_of_a_long_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the first stage reports there is nothing to count, and the log of a large model stood empty for minutes."""
    monkeypatch.setattr(importlib.import_module("tomoe.cli.console"), "PLAIN_SECONDS", 0.001)
    screen, shown = a_screen(terminal=False)
    with screen:
        waiting = screen.waiting
        assert waiting
        while waiting.is_alive() and "so far\n" not in shown.getvalue():
            time.sleep(0.001)
        screen.on_progress("train", 1, 2, ROW)
        assert not waiting.is_alive()
        before = shown.getvalue()
    lines = before.splitlines()
    assert lines
    assert all(line.startswith("loading  ") for line in lines), lines
    assert shown.getvalue() == before
    with a_screen(terminal=True)[0] as bars:
        assert not bars.waiting


def test_on_a_terminal_there_are_bars() -> None:
    screen, shown = a_screen(terminal=True)
    with screen:
        screen.on_progress("text", 5, 10, {})
        screen.on_progress("train", 1, 2, ROW)
        screen.on_progress("train", 2, 2, ROW)
        assert screen.live
        screen.live.refresh()
    for word in ("preparing text", "5/10", "learning", "2/2", "distill 1.250"):
        assert word in shown.getvalue()


def test_a_skipped_step_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, shown = a_screen(terminal=False)
    screen.on_progress("train", 7, 100, {**ROW, "skipped": True})
    assert shown.getvalue() == "step 7: the loss was not finite, the step was skipped\n"


@pytest.mark.parametrize(("seconds", "words"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3723, "1:02:03")])
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_signal_that_python_dropped_is_raised_at_the_next_step() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stoppable():
        with pytest.raises(Stopped):  # this one gets lost, as it does inside a destructor
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped):
            Screen().on_progress("train", 1, 2, {})
    assert signal.getsignal(signal.SIGTERM) is before
    with stoppable():
        check()


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (OSError(28, "No space left", "out/file"), 2, "cannot read or write out/file: No space left"),
        (Stopped(signal.SIGINT), 130, "stopped"),
        (Stopped(signal.SIGTERM), 143, "stopped"),
    ],
)
def test_what_main_says(
    error: BaseException, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("tomoe.cli.app", fail)
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == code
    assert capsys.readouterr().err == f"tomoe: {sentence}\n"


def test_a_terminal_that_takes_ascii_only(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in many containers, or behind a pipe on Windows."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    with pytest.raises(SystemExit) as left:
        main(["evaluate", f"{converted}/dense", f"--text={converted}/text.txt", "--tokens=256", "--context=16"])
    sys.stdout.flush()
    assert left.value.code == 0
    assert "perplexity" in written.getvalue().decode("ascii")


def test_a_signal_that_a_job_ignores_stays_ignored() -> None:
    """A shell starts what runs in the background so, and Ctrl-C is then meant for the script in front."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGINT)
            check()
            with pytest.raises(Stopped):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("closed", "name"), [("0<&-", "stdin"), ("1>&-", "stdout"), ("2>&-", "stderr")])
def test_a_stream_that_was_closed_leads_nowhere(closed: str, name: str, tmp_path: Path) -> None:
    """As cron and daemons may start a process: else the next file that is opened gets what is printed."""
    script = f"""
import sys, tomoe.__main__ as door
door._open_streams()
with open({str(tmp_path / "weights")!r}, "w"):
    for stream in (sys.stdout, sys.stderr):
        print("words", file=stream, flush=True)
assert sys.{name}.fileno() == {("stdin", "stdout", "stderr").index(name)}
assert sys.stdin.read() == ""
"""
    command = f'exec "$0" -c "$1" <&0 {closed}'
    done = subprocess.run(["sh", "-c", command, sys.executable, script], stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "weights").read_text() == ""
