"""Whole files or none: everything is written under a temporary name, then renamed; checksums; and JSON from strangers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from tomoe.errors import UserError

SUMS = "SHA256SUMS"  # as `sha256sum -c` reads it
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


@contextlib.contextmanager
def staged(out: Path, marker: str, replaced: Iterable[str]) -> Iterator[Path]:
    """A folder to write to, whose files go into the folder `out` when all of them are there; else `out` is as it was.

    Files of `out` that match the patterns `replaced` go before. `marker` is the file that makes a folder a model: its old
    version goes first and the new one comes last, so that a kill in between leaves no model of two halves. The files
    wait in `out` itself, which may be another disk than the folder around it, and the only place that may be written to.
    Raises OSError.
    """
    new, part = not out.exists(), out / ".part"
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        (out / marker).unlink(missing_ok=True)
        for old in {old for pattern in replaced for old in out.glob(pattern)} - {part}:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        for file in sorted(part.iterdir(), key=lambda file: file.name == marker):
            place = out / file.name
            if place.is_dir():
                shutil.rmtree(place)
            file.replace(place)
        part.rmdir()
    except BaseException:
        shutil.rmtree(out if new else part, ignore_errors=True)
        raise


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


def own_name(path: Path | str) -> str:
    """The last part of a path; for "." and "..", whose own last part says nothing, that of the folder they mean.

    What has no name ("") stays without one.
    """
    return Path(os.path.abspath(path)).name if path else ""


def plain(name: Any) -> bool:
    """Whether a name is that of a file right in its folder."""
    return isinstance(name, str) and name == Path(name).name and name not in ("", ".", "..") and "\\" not in name


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would read. Raises UserError for an index that points out of the folder."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        return [whole]
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(plain(name) for name in places.values()):
        raise UserError(f"{index} sends to files outside of its folder, or to none; it is damaged or a trap")
    return [folder / name for name in sorted(set(places.values()))]


def sha256(path: Path) -> str:
    """In hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Write down the sha256 of every file that is in the folder now."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    write_whole(folder / SUMS, "".join(f"{sha256(folder / name)}  {name}\n" for name in names))


def damaged(folder: Path) -> tuple[int, list[str]]:
    """How many files were written down, and which of them are gone or other than they were.

    Raises UserError where nothing was written down, or names lead out of the folder.
    """
    try:
        lines = [line.partition("  ") for line in (folder / SUMS).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        raise UserError(f"{folder} holds no {SUMS}, so there is nothing to hold its files against") from None
    for _, _, name in lines:
        if not plain(name):
            raise UserError(f"{folder / SUMS} names {name[:100]!r}, which is no file of that folder")
    found = [name for meant, _, name in lines if not (folder / name).is_file() or sha256(folder / name) != meant]
    return len(lines), found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
