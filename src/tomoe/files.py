"""Whole files or none: everything is written under a temporary name, then renamed; and JSON from strangers."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, NoReturn

from tomoe.errors import UserError

_LARGEST_JSON = 2**26  # bytes; parsed it takes several times that


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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file that anyone may have written.

    Raises UserError for a file that is too large, nested too deeply, no JSON (NaN is none) or no object.
    """
    try:
        size = path.stat().st_size
        if size > _LARGEST_JSON:
            raise UserError(f"{path} has {size:,} bytes, which no such file needs; it is damaged or a trap")
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not JSON ({str(error)[:200]}); it is damaged, get it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, where an object is expected; it is damaged")
    return values


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
