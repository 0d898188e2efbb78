"""One writer per folder.

`folder_lock` is held from the first look at a run or output folder until its command ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from tomoe.errors import UserError, shortened

LOCK_FILE = ".tomoe.lock"
_PATIENCE_SECONDS = 0.3  # whoever gives the lock back at this moment is waited for


@contextlib.contextmanager
def folder_lock(folder: Path, command: str) -> Iterator[None]:
    """Keep other processes from writing to `folder`; a missing folder is created, and removed again if it stays empty. The kernel
    holds the lock (flock), so it ends with the process; it nests within one process. Under torchrun only process 0 may take it.
    Raises UserError, naming the holder, if another process holds it, or if the folder is not writable."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    path = folder.resolve() / LOCK_FILE
    lock = FileLock(path, timeout=_PATIENCE_SECONDS, is_singleton=True, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{_holder(path)} is writing to {folder}; wait for it, stop it, or choose another folder"
        ) from None
    except OSError as error:
        _remove_if_empty(made)
        no_folder = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "it is not a folder" if no_folder else error.strerror or error
        raise UserError(f"cannot write to {folder}: {reason}") from error
    # On file systems without flock the content of the file is the lock, which filelock writes, reads and removes.
    plain = getattr(lock, "pid", None) is None
    try:
        if plain and lock.lock_counter == 1:
            since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
            path.write_text(f"tomoe {command} (process {os.getpid()} on {socket.gethostname()}, since {since})")
        yield
    finally:
        if plain and lock.lock_counter == 1:
            path.unlink(missing_ok=True)
        lock.release()
        _remove_if_empty(made)


def _holder(path: Path) -> str:
    """Describe the holder of the lock from a file that anyone may have written."""
    with contextlib.suppress(OSError):
        record = path.read_text(encoding="utf-8", errors="replace")
        if record.startswith("tomoe ") and record.isprintable():
            return shortened(record)
    return "another process"


def _remove_if_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
