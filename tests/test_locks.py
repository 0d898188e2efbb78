"""One writer per folder: races, killed holders, nesting, and what is left behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from pico_files import ended, forked
from tomoe.errors import UserError
from tomoe.locks import LOCK_FILE, folder_lock


def holder(folder: Path) -> int:
    """A process that holds the folder until it is killed; it has it when this returns."""
    says, said = os.pipe()

    def hold() -> None:
        with folder_lock(folder, "train"):
            os.write(said, b".")
            signal.pause()

    pid = forked(hold)
    os.close(said)
    # nothing, if it ended without the folder
    assert os.read(says, 1) == b"."
    os.close(says)
    return pid


def refused(folder: Path) -> str:
    """The sentence that a second process gets."""
    with pytest.raises(UserError) as caught, folder_lock(folder, "convert"):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_second_process_is_told_who_writes_and_kill_9_leaves_no_lock_that_blocks(tmp_path: Path) -> None:
    out = tmp_path / "out"
    pid = holder(out)
    try:
        said = refused(out)
        for word in ("tomoe train", f"process {pid}", socket.gethostname(), "since 20", f"writing to {out};"):
            assert word in said
        for damaged in ("", "tomoe \x1b[31m", "\ufffd"):
            (out / LOCK_FILE).write_text(damaged)
            assert refused(out).startswith("another process is writing to")
    finally:
        os.kill(pid, signal.SIGKILL)
        ended(pid)
    with folder_lock(out, "convert"):
        assert (out / LOCK_FILE).read_text().startswith("tomoe convert")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("before", ["nothing", "empty", "stale"])
def test_of_many_at_once_one_has_it(tmp_path: Path, before: str) -> None:
    """Every process writes down when it has the folder and when it gives it back: no two at once, and somebody has it."""
    out, journal = tmp_path / "out", tmp_path / "journal"
    if before != "nothing":
        out.mkdir()
    if before == "stale":
        (out / LOCK_FILE).write_text("tomoe train (process 1 on elsewhere)")
    waits, begin = os.pipe()

    def work() -> None:
        os.close(begin)
        os.read(waits, 1)
        with folder_lock(out, "convert"), journal.open("a") as file:
            file.write("in\n")
            file.flush()
            # a while for the others to come in, if they can
            time.sleep(0.05)
            file.write("out\n")

    pids = [forked(work) for _ in range(6)]
    # its end is the sign for all
    os.close(begin)
    codes = [ended(pid) for pid in pids]
    os.close(waits)
    assert set(codes) <= {0, 3}
    assert journal.read_text().split() == ["in", "out"] * codes.count(0)
    assert codes.count(0) > 0
    assert not (out / LOCK_FILE).exists()


def test_it_nests_within_one_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with folder_lock(out, "convert"):
        with folder_lock(tmp_path / "x" / ".." / "out", "convert"), folder_lock(out / "cell", "convert"):
            assert (out / "cell" / LOCK_FILE).exists()
        assert not (out / "cell").exists()
        assert (out / LOCK_FILE).read_text().startswith("tomoe convert")
        assert ended(forked(lambda: folder_lock(out, "report").__enter__())) == 3
    assert not out.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_any_exception_releases_it(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), folder_lock(tmp_path / "a" / "out", "convert"):
        raise error
    assert list(tmp_path.iterdir()) == []
    assert ended(forked(lambda: folder_lock(tmp_path / "a" / "out", "report").__enter__())) == 0


def test_only_what_was_made_for_the_lock_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with folder_lock(tmp_path / "mine" / "a" / "b", "convert"):
        (tmp_path / "mine" / "a" / "file").touch()
    assert [p.name for p in (tmp_path / "mine" / "a").iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    with folder_lock(tmp_path / "empty", "convert"):
        pass
    assert (tmp_path / "empty").exists()
    with folder_lock(tmp_path / "out", "convert"):
        (tmp_path / "out" / LOCK_FILE).unlink()
        (tmp_path / "out").rmdir()


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_disks_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some clusters have them: the file itself is the lock there, and a killed holder's counts for nothing."""
    import fcntl

    def unknown(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unknown)
    out = tmp_path / "out"
    pid = holder(out)
    assert refused(out).startswith("another process is writing to")
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    with folder_lock(out, "convert"):
        assert ended(forked(lambda: folder_lock(out, "report").__enter__())) == 3
    assert list(out.iterdir()) == []


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "out"):
        with (
            pytest.raises(UserError, match=rf"^cannot write to {place}: it is not a folder$"),
            folder_lock(place, "plan"),
        ):
            pass
    # the tests may run as root, whom no permission stops
    real = os.open

    def read_only(path: Any, flags: int, *mode: int, **more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(UserError, match=r"out: Read-only file system$"), folder_lock(tmp_path / "out", "plan"):
        pass
    assert not (tmp_path / "out").exists()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot write to"), folder_lock(tmp_path / "out", "convert"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"
