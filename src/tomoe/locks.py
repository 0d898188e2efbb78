"""One writer per folder: `folder_lock` is held from the first look at a run or output folder until its command ends.

The lock is FOLDER/.tomoe.lock, a JSON record of its holder. It stands inside the folder, which may be a volume of its own
with a parent that nobody may write to. Three things decide who holds it:

- Creation is exclusive (O_EXCL), on shared disks too.
- On one machine the kernel decides (flock): a process that was killed holds nothing, whoever has its process id now. On
  file systems without flock, process id and start time decide.
- The lock of another machine counts as long as its holder touches the file, every minute; ten minutes of silence end it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tomoe.errors import UserError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".tomoe.lock"
HEARTBEAT, SILENCE = 60.0, 600.0  # seconds between two touches; seconds without one that end another machine's lock
_RECORD_BYTES = 1024  # every record is padded to this size, so that one write replaces all of another
_TRIES, _PAUSE = 8, 0.04  # a lock that is being taken or given back at this moment is looked at again
_SETTLE = 0.1  # seconds after which the last of several writers has written
_UNWRITTEN = 10.0  # seconds that a holder may take to write its record
_WORDS = ("host", "boot", "started", "verb", "since", "token")

Record = dict[str, Any]


@dataclass
class _Lock:
    """A lock that this process holds."""

    path: Path
    fd: int
    made: list[Path]  # folders that did not exist before, the innermost first
    depth: int = 0  # `with` blocks that hold it
    released: threading.Event = field(default_factory=threading.Event)


_held: dict[Path, _Lock] = {}


@contextlib.contextmanager
def folder_lock(folder: Path, verb: str) -> Iterator[None]:
    """Keep other processes from writing to `folder`; a missing folder is made, and removed again if it stays empty.

    It nests within one process. A forked child holds nothing and releases nothing. Of several processes that work on one
    folder together (torchrun), only process 0 may take the lock. Raises UserError if another process holds the folder,
    naming it, or if the folder cannot be written.
    """
    place = folder.resolve()
    if place not in _held:
        _held[place] = _acquire(folder, verb)
    lock = _held[place]
    lock.depth += 1
    try:
        yield
    finally:
        # a forked child has forgotten the lock, and must not release its parent's
        if _held.get(place) is lock:
            lock.depth -= 1
            if not lock.depth:
                del _held[place]
                _release(lock)


def _acquire(folder: Path, verb: str) -> _Lock:
    path, own, made, fd, record = folder / LOCK_FILE, _own_record(verb), list[Path](), -1, None
    try:
        for tries_left in reversed(range(_TRIES)):
            made = made or [p for p in (folder, *folder.parents) if not p.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            # its holder, who had made the folder, may remove both at this moment
            with contextlib.suppress(FileNotFoundError):
                fd = _open(path, own)
                if _take(fd, path, own, not tries_left):
                    lock = _Lock(path.absolute(), fd, made)
                    threading.Thread(target=_beat, args=(lock,), name=f"lock of {folder}", daemon=True).start()
                    return lock
                record = _read(fd)
                os.close(fd)
                fd = -1
            if tries_left:
                time.sleep(_PAUSE)
        raise UserError(_refusal(folder, record, own))
    except BaseException as error:
        if fd >= 0:
            os.close(fd)
        _remove_if_empty(made)
        if isinstance(error, OSError):
            no_folder = isinstance(error, FileExistsError | NotADirectoryError)
            reason = "it is not a folder" if no_folder else error.strerror or error
            raise UserError(f"cannot write to {folder}: {reason}") from error
        raise


def _open(path: Path, own: Record) -> int:
    # a link could lead to any file of the user's
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.open(path, flags)
    _write(fd, own)
    return fd


def _take(fd: int, path: Path, own: Record, last: bool) -> bool:
    """Whether the open lock file is ours now; `last` says that a record which cannot be read will not be looked at again."""
    kernel = _flock(fd)
    record = _read(fd)
    if kernel is False or not _is_at(path, fd):
        return False
    if record is None:
        # made a moment ago by somebody who is about to write, else damaged
        abandoned = last and (kernel is True or time.time() - os.fstat(fd).st_mtime > _UNWRITTEN)
    elif record["token"] == own["token"]:
        return True
    else:
        abandoned = _is_abandoned(record, os.fstat(fd).st_mtime, own, kernel is True)
    if not abandoned:
        return False
    _write(fd, own)
    # without flock, or on another machine, somebody else may take it over at the same moment: the last one has it
    time.sleep(_SETTLE)
    record = _read(fd)
    return record is not None and record["token"] == own["token"]


def _is_abandoned(record: Record, touched: float, own: Record, kernel_gave_it: bool) -> bool:
    same_kernel = record["boot"] == own["boot"] != ""
    if record["host"] == own["host"] or same_kernel:
        if kernel_gave_it:
            return True
        if record["host"] == own["host"] and own["started"]:
            return not same_kernel or _start_time(record["pid"]) != record["started"]
    return time.time() - touched > SILENCE


def _flock(fd: int) -> bool | None:
    """Whether the kernel gave us the file; None if it cannot say, as on some network file systems."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if isinstance(error, BlockingIOError | PermissionError) else None
    return True


def _release(lock: _Lock) -> None:
    lock.released.set()
    try:
        with contextlib.suppress(OSError):
            if _is_at(lock.path, lock.fd):
                lock.path.unlink()
    finally:
        os.close(lock.fd)
    _remove_if_empty(lock.made)


def _remove_if_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _forget() -> None:
    """Leave the locks to the parent: its file descriptors, shared by a fork, would outlive it in the child."""
    for lock in _held.values():
        os.close(lock.fd)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _beat(lock: _Lock) -> None:
    while not lock.released.wait(HEARTBEAT):
        with contextlib.suppress(OSError):
            os.utime(lock.path)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _own_record(verb: str) -> Record:
    since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": boot, "pid": pid, "started": _start_time(pid), "verb": verb,
            "since": since, "token": secrets.token_hex(8)}  # fmt: skip


def _start_time(pid: int) -> str:
    """When a process of this machine started, in ticks since boot; empty if it ended, or if there is no /proc."""
    try:
        # the name comes second, in parentheses, and may hold any of them
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


def _write(fd: int, record: Record) -> None:
    os.lseek(fd, 0, os.SEEK_SET)
    os.write(fd, json.dumps(record).encode("ascii").ljust(_RECORD_BYTES))
    os.fsync(fd)


def _read(fd: int) -> Record | None:
    """The record of an open lock file, which anyone may have written; None if it is no such record."""
    os.lseek(fd, 0, os.SEEK_SET)
    try:
        record = json.loads(os.read(fd, _RECORD_BYTES))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("pid")) is not int:
        return None
    texts = [record.get(key) for key in _WORDS]
    return record if all(isinstance(text, str) and text.isprintable() for text in texts) else None


def _refusal(folder: Path, record: Record | None, own: Record) -> str:
    if record is None:
        return f"another process writes to {folder}, whose {LOCK_FILE} does not say which; wait for it or choose another folder"
    who = f"tomoe {record['verb']} (process {record['pid']} on {record['host']}, since {record['since']})"
    if record["host"] == own["host"]:
        return f"{who} is writing to {folder}; wait for it, stop it (kill {record['pid']}), or choose another folder"
    return (
        f"{who} is writing to {folder}; wait for it or choose another folder, and if it was killed, delete "
        f"{folder / LOCK_FILE} or wait until it was silent for {SILENCE / 60:.0f} minutes"
    )
