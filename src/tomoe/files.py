"""Whole files or none: everything is written under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tomoe.errors import UserError


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write `content`, so that no half file is ever seen under the name. Raises UserError where it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # where the folder cannot be reached, neither can the file
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return path
