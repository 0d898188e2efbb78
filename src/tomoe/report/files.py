"""Writes a report so that no half file is ever seen under its name."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tomoe.errors import UserError


def write_whole(path: Path, text: str) -> Path:
    """Write under a temporary name, then rename. Raises UserError where the place cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # where the folder cannot be reached, neither can the file
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return path
