"""One writer per folder: races, killed holders, other machines, nesting, forks, and what is left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tomoe import locks
from tomoe.errors import UserError
from tomoe.locks import LOCK_FILE, SILENCE, folder_lock

pytestmark = pytest.mark.slow

GONE = 2**22 + 1  # no process of Linux has this id


@pytest.fixture(params=[True, False], ids=["flock", "no flock"])
def flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system knows flock: on some network disks it does not."""
    if not request.param:

        def unknown(fd: int, operation: int) -> None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        monkeypatch.setattr(locks.fcntl, "flock", unknown)
    return request.param


def forked(work: Callable[[], object]) -> int:
    """A process that does the work and ends with 0, with 3 if it is refused, and with 1 if anything else goes wrong."""
    with warnings.catch_warnings():  # newer Pythons warn of forks beside threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except UserError:
        code = 3
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def holder(folder: Path, said: Path) -> int:
    """A process that holds the folder until it is killed; it has it as soon as the file `said` exists."""

    def hold() -> None:
        with folder_lock(folder, "train"):
            said.touch()
            time.sleep(60)

    pid = forked(hold)
    until(said.exists)
    return pid


def write_record(folder: Path, age: float = 0, **changes: Any) -> Path:
    """A lock file that some other process left, `age` seconds after it was last touched."""
    folder.mkdir(exist_ok=True)
    path = folder / LOCK_FILE
    path.write_text(json.dumps(locks._own_record("convert") | {"token": "another"} | changes))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_second_process_is_told_who_writes(tmp_path: Path, flock: bool) -> None:
    out = tmp_path / "out"
    pid = holder(out, tmp_path / "held")
    try:
        with pytest.raises(UserError) as refused, folder_lock(out, "convert"):
            pass
        sentence = str(refused.value)
        for word in ("tomoe train", f"process {pid}", socket.gethostname(), "since 20", str(out), f"kill {pid}"):
            assert word in sentence
        assert "\n" not in sentence
    finally:
        os.kill(pid, signal.SIGKILL)
        ended(pid)


def test_kill_9_leaves_no_lock_that_blocks(tmp_path: Path, flock: bool) -> None:
    out = tmp_path / "out"
    pid = holder(out, tmp_path / "held")
    os.kill(pid, signal.SIGKILL)
    if flock:  # gone without a parent that has seen it
        ended(pid)
    else:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with folder_lock(out, "convert"):
        assert json.loads((out / LOCK_FILE).read_text())["verb"] == "convert"
    assert list(out.iterdir()) == []
    if not flock:
        ended(pid)


@pytest.mark.parametrize("before", ["nothing", "empty", "stale"])
def test_of_many_at_once_one_has_it(tmp_path: Path, flock: bool, before: str) -> None:
    """Every process writes down when it has the folder and when it gives it back: no two at once, and somebody has it."""
    if before == "stale" and not flock:
        pytest.skip("there the last writer is waited for, and a processor that is shared may let it wait for longer")
    out, journal = tmp_path / "out", tmp_path / "journal"
    if before != "nothing":
        out.mkdir()
    if before == "stale":
        write_record(out, pid=GONE)
    begin = time.monotonic() + 0.1

    def work() -> None:
        time.sleep(max(0, begin - time.monotonic()))
        with folder_lock(out, "convert"), journal.open("a") as file:
            file.write("in\n")
            file.flush()
            time.sleep(0.05)
            file.write("out\n")

    codes = [ended(pid) for pid in [forked(work) for _ in range(6)]]
    assert set(codes) <= {0, 3}
    lines = journal.read_text().split()
    assert lines == ["in", "out"] * codes.count(0)
    assert codes.count(0) > 0
    assert not (out / LOCK_FILE).exists()


def test_a_process_that_is_gone_holds_nothing(tmp_path: Path, flock: bool) -> None:
    write_record(tmp_path / "out", pid=GONE)
    with folder_lock(tmp_path / "out", "convert"):
        pass


def test_the_process_id_of_a_killed_holder_may_be_given_to_another(tmp_path: Path, flock: bool) -> None:
    write_record(tmp_path / "out", pid=os.getppid(), started="1")
    with folder_lock(tmp_path / "out", "convert"):
        pass


def test_a_living_process_is_respected_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    parent = os.getppid()
    write_record(tmp_path / "out", 2 * SILENCE, pid=parent, started=locks._start_time(parent))
    with pytest.raises(UserError, match=f"kill {parent}"), folder_lock(tmp_path / "out", "convert"):
        pass


def test_a_lock_from_before_a_reboot_counts_for_nothing(tmp_path: Path, flock: bool) -> None:
    write_record(tmp_path / "out", pid=os.getpid(), boot="before")
    with folder_lock(tmp_path / "out", "convert"):
        pass


def test_another_machine_is_respected_while_it_is_heard_of(tmp_path: Path, flock: bool) -> None:
    path = write_record(tmp_path / "out", SILENCE - 60, host="elsewhere", boot="theirs", pid=GONE)
    before = path.read_bytes()
    with (
        pytest.raises(UserError, match=r"elsewhere.* delete .*\.tomoe\.lock"),
        folder_lock(tmp_path / "out", "convert"),
    ):
        pass
    assert path.read_bytes() == before


def test_another_machine_that_fell_silent_is_not(tmp_path: Path, flock: bool) -> None:
    path = write_record(tmp_path / "out", SILENCE + 60, host="elsewhere", boot="theirs")
    with folder_lock(tmp_path / "out", "convert"):
        assert json.loads(path.read_text())["host"] == socket.gethostname()


def test_the_file_is_touched_while_the_lock_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "HEARTBEAT", 0.01)
    with folder_lock(tmp_path / "out", "train"):
        path = tmp_path / "out" / LOCK_FILE
        os.utime(path, (0, 0))
        until(lambda: path.stat().st_mtime > 0)


def test_two_that_take_over_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel decides, whoever wrote last has it, and the other one sees that."""
    path = write_record(tmp_path / "out", SILENCE + 60, host="elsewhere", boot="theirs")

    def settle(seconds: float) -> None:
        if seconds == locks._SETTLE:
            write_record(tmp_path / "out", host="third", boot="another")

    monkeypatch.setattr(locks.time, "sleep", settle)
    with pytest.raises(UserError, match="on third"), folder_lock(tmp_path / "out", "convert"):
        pass
    assert json.loads(path.read_text())["host"] == "third"


def test_it_nests_within_one_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with folder_lock(out, "sweep"):
        with folder_lock(tmp_path / "x" / ".." / "out", "convert"), folder_lock(out / "cell", "convert"):
            assert (out / "cell" / LOCK_FILE).exists()
        assert not (out / "cell").exists()
        assert ended(forked(lambda: folder_lock(out, "report").__enter__())) == 3
    assert not out.exists()


def test_a_forked_child_does_not_release_the_lock(tmp_path: Path) -> None:
    """It may end as any process does, through the blocks that it was forked in."""
    out = tmp_path / "out"
    with folder_lock(out, "train"):
        block = folder_lock(out, "convert")
        block.__enter__()
        assert ended(forked(lambda: block.__exit__(None, None, None))) == 0
        assert (out / LOCK_FILE).exists()
        assert ended(forked(lambda: folder_lock(out, "report").__enter__())) == 3
        block.__exit__(None, None, None)
    assert not out.exists()


def test_a_forked_child_that_outlives_its_parent_does_not_hold_the_lock(tmp_path: Path) -> None:
    out, said = tmp_path / "out", tmp_path / "said"

    def parent() -> None:
        with folder_lock(out, "train"):
            said.write_text(str(forked(lambda: time.sleep(60))))
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(forked(parent)) == -signal.SIGKILL
    try:
        with folder_lock(out, "convert"):
            pass
    finally:
        os.kill(int(said.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError, SystemExit])
def test_any_exception_releases_it(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), folder_lock(tmp_path / "a" / "out", "convert"):
        raise error
    assert list(tmp_path.iterdir()) == []
    assert not locks._held


def test_an_interruption_while_it_is_taken_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(fd: int, path: Path, own: object, last: bool) -> bool:
        raise KeyboardInterrupt

    open_before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(locks, "_take", interrupted)
        with pytest.raises(KeyboardInterrupt), folder_lock(tmp_path / "out", "convert"):
            pass
    assert len(os.listdir("/proc/self/fd")) == open_before
    with folder_lock(tmp_path / "out", "convert"):
        pass


def test_only_what_was_made_for_the_lock_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with folder_lock(tmp_path / "mine" / "a" / "b", "convert"):
        (tmp_path / "mine" / "a" / "file").touch()
    assert [p.name for p in (tmp_path / "mine" / "a").iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    with folder_lock(tmp_path / "empty", "convert"):
        pass
    assert (tmp_path / "empty").exists()


def test_a_folder_that_is_removed_or_taken_meanwhile(tmp_path: Path) -> None:
    with folder_lock(tmp_path / "out", "convert"):
        (tmp_path / "out" / LOCK_FILE).unlink()
        (tmp_path / "out").rmdir()
    with folder_lock(tmp_path / "out", "convert"):
        (tmp_path / "out" / LOCK_FILE).unlink()
        theirs = write_record(tmp_path / "out", host="elsewhere")
    assert theirs.exists()


def test_a_lock_that_is_given_back_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has lost its name must not be taken for the lock: the next one would make another."""
    path, real = write_record(tmp_path, pid=GONE), locks._flock

    def given_back(fd: int) -> bool | None:
        monkeypatch.setattr(locks, "_flock", real)
        path.unlink()
        return real(fd)

    monkeypatch.setattr(locks, "_flock", given_back)
    with folder_lock(tmp_path, "convert"):
        assert json.loads(path.read_text())["verb"] == "convert"


def test_the_kernel_knows_of_a_holder_whose_record_is_damaged(tmp_path: Path) -> None:
    pid = holder(tmp_path / "out", tmp_path / "held")
    try:
        path = tmp_path / "out" / LOCK_FILE
        path.write_text("damaged")
        os.utime(path, (0, 0))
        with pytest.raises(UserError, match="does not say which"), folder_lock(tmp_path / "out", "convert"):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        ended(pid)


@pytest.mark.parametrize(
    "content", ["", "{", "[" * 1000, "[]", '{"pid": 1}', '{"pid": ' + "9" * 900 + "}", "\xff", "esc"]
)
def test_a_damaged_lock_is_taken_over(tmp_path: Path, flock: bool, content: str) -> None:
    path = write_record(tmp_path, pid=GONE, host="\x1b[31melsewhere", boot="theirs")
    if content != "esc":
        path.write_bytes(content.encode("latin-1"))
    if not flock:  # it may be about to be written
        with pytest.raises(UserError, match="does not say which"), folder_lock(tmp_path, "convert"):
            pass
        os.utime(path, (0, 0))
    with folder_lock(tmp_path, "convert"):
        pass
    assert not path.exists()


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"^cannot write to .*file: it is not a folder$"),
        folder_lock(tmp_path / "file", "plan"),
    ):
        pass
    with pytest.raises(UserError, match="it is not a folder"), folder_lock(tmp_path / "file" / "out", "plan"):
        pass
    # the tests may run as root, whom no permission stops
    real = os.open

    def read_only(path: Any, flags: int, *mode: int, **more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", read_only)
    with (
        pytest.raises(UserError, match=r"^cannot write to .*out: Read-only file system$"),
        folder_lock(tmp_path / "out", "plan"),
    ):
        pass
    assert not (tmp_path / "out").exists()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot write to"), folder_lock(tmp_path / "out", "convert"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"
