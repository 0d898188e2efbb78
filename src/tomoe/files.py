"""Atomic writes, checksums, untrusted JSON.

A file is written under a temporary name, then renamed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from tomoe.errors import UserError, shortened

T = TypeVar("T")
SUMS = "SHA256SUMS"  # in the format that `sha256sum -c` reads
_MAX_TEXT = 2**26  # bytes of a file of text; parsed it takes several times that
# the card of a folder, the one generated file that people edit; beside an edited one the new card goes here
CARD, CARD_BESIDE = "README.md", "README.tomoe.md"
_FIRST = ("plan.json", "export.json")  # what `folders.is_ours` knows a folder by


def atomic_write(path: Path, content: str | bytes) -> Path:
    """Write `content` atomically: no partial file ever has this name. Raises UserError if it cannot be written."""
    with atomic_file(path) as part:
        part.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file that is renamed to `path` afterwards; the process id keeps concurrent writers apart where there is
    no lock. Raises UserError if that fails."""
    part = path.with_name(f".{path.name}.{os.getpid()}.tomoe.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        # if the folder cannot be reached, neither can the file
        with contextlib.suppress(OSError):
            part.unlink()


def remove_leftovers(out: Path) -> None:
    """Delete partial files that killed processes left in an output folder. The caller holds the folder's lock."""
    for folder in (out, out / "run", out / "figures"):
        # the temporary names of `atomic_file`
        for part in folder.glob(".*.[0-9]*.tomoe.tmp"):
            # it may be on a disk that has become read-only; the next write says so
            with contextlib.suppress(OSError):
                part.unlink()


@contextlib.contextmanager
def atomic_folder(out: Path, marker: str, replaced: Iterable[str]) -> Iterator[Path]:
    """Yield a folder whose files move into `out` once all are complete; otherwise `out` is unchanged.

    Files of `out` that match `replaced` go before, but for a card that was edited. `marker` makes a folder a model: its old
    version goes first and the new one comes last, so that a kill leaves no model of two halves. The files wait in `out`
    itself: the folder around it may be on another disk. Raises OSError.
    """
    new = not out.exists()
    part = out / ".tomoe.part"
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        (out / marker).unlink(missing_ok=True)
        for old in {old for pattern in replaced for old in out.glob(pattern)}:
            if old == out / CARD and is_edited(old):
                continue
            shutil.rmtree(old) if old.is_dir() else old.unlink()
            if old.parent != out:
                with contextlib.suppress(OSError):
                    old.parent.rmdir()
        for file in sorted(part.iterdir(), key=lambda file: (file.name == marker, file.name not in _FIRST)):
            place = out / file.name
            if place.is_dir():
                shutil.rmtree(place)
            file.replace(place)
        part.rmdir()
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise


def write_card_file(folder: Path, text: str) -> Path:
    """Write a card as README.md, or beside it if that was edited; return which. Raises UserError if it cannot be written."""
    card = folder / CARD
    if is_edited(card):
        return atomic_write(folder / CARD_BESIDE, text)
    atomic_write(_record(card), f"{hashlib.sha256(text.encode()).hexdigest()}\n")
    return atomic_write(card, text)


def is_edited(card: Path) -> bool:
    """Whether the card was edited since tomoe wrote it."""
    with contextlib.suppress(OSError, UserError):
        return card.exists() and read_text(_record(card)).strip() != sha256(card)
    return True


def _record(card: Path) -> Path:
    """Path of the card's hash, a hidden file: it does not travel, and stays when the rest of the folder is replaced."""
    return card.with_name(f".{card.name}.sha256")


def read_text(path: Path) -> str:
    """Read untrusted text. Raises UserError if it cannot be read, is not a regular file (a pipe never ends), is too large, or is
    not UTF-8."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file; it is damaged or malicious")
        if status.st_size > _MAX_TEXT:
            raise UserError(
                f"{path} has {status.st_size:,} bytes, more than any such file needs; it is damaged or malicious"
            )
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not text in UTF-8 ({error.reason} at byte {error.start:,}); it is damaged"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def is_whole(text: str) -> bool:
    """Whether a text has no lone surrogates, which no tokenizer or file accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_json(text: str) -> Any:
    """Parse JSON from an untrusted source to values that can be written, printed and computed with.

    Raises ValueError, in a few words, for what is not JSON (NaN is not), for numbers that no 64 bits hold, for half characters
    and for deep nesting.
    """
    values = from_json(text, allow_inf_nan=False)
    _check_numbers(values)
    return values


def _check_numbers(values: Any) -> None:
    if isinstance(values, dict | list):
        for inner in values.values() if isinstance(values, dict) else values:
            _check_numbers(inner)
    elif isinstance(values, int | float) and not (
        math.isfinite(values) if isinstance(values, float) else -(2**63) <= values < 2**63
    ):
        raise ValueError("a number does not fit 64 bits")


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in an untrusted JSON file. Raises UserError as `read_text` and `parse_json`, and if it is not an object."""
    text = read_text(path)
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({shortened(error)}); it is damaged, download or write it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__} instead of an object; it is damaged")
    return values


_adapter = cache(TypeAdapter)  # making one takes longer than using it


def validated(kind: type[T], values: object) -> T:
    """Validate `values`, read from JSON, as a `kind`. Raises ValueError with the first error, in a few words."""
    try:
        return cast(T, _adapter(cast(Any, kind)).validate_python(values))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:100]
        found = first["ctx"]["error"] if first["type"] == "value_error" else first["msg"]
        reason = found.wrong if isinstance(found, UserError) else str(found)
        raise ValueError(f"at {place!r}: {reason}" if place else reason) from None


def basename(path: Path | str) -> str:
    """The last part of the absolute path, so that "." and ".." give a folder's name; "" stays empty."""
    return Path(os.path.abspath(path)).name if path else ""


def is_plain_filename(name: Any) -> bool:
    """Whether a name is a file name without a path."""
    return isinstance(name, str) and name == Path(name).name and name not in ("", ".", "..") and "\\" not in name


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers would read. Raises UserError if the index points outside the folder."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        return [whole]
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(is_plain_filename(name) for name in places.values()):
        raise UserError(f"{index} names files outside of its folder, or none; it is damaged or malicious")
    return [folder / name for name in sorted(set(places.values()))]


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex. Raises OSError, also if it is not a regular file: a pipe never ends."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS of every file that is in the folder now."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    with ThreadPoolExecutor() as pool:
        digests = pool.map(sha256, [folder / name for name in names])
        atomic_write(folder / SUMS, "".join(f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True)))


def failed_checksums(folder: Path) -> tuple[int, list[str]]:
    """Return the number of files in SHA256SUMS, and the names of those that are missing or differ. Raises UserError if there is
    no SHA256SUMS, or if its names lead outside the folder."""
    if not (folder / SUMS).exists():
        raise UserError(f"{folder} holds no {SUMS}, so its files cannot be verified")
    lines = [line.partition("  ") for line in read_text(folder / SUMS).splitlines()]
    for _, _, name in lines:
        if not is_plain_filename(name):
            raise UserError(f"{folder / SUMS} names {name[:100]!r}, which is not a file in that folder")
    failed = [name for digest, _, name in lines if not (folder / name).is_file() or sha256(folder / name) != digest]
    return len(lines), failed


def free_on_disk(path: Path) -> int:
    """Return the free bytes of the disk on which `path` is, or would be created."""
    place = path.resolve()
    return shutil.disk_usage(next(p for p in (place, *place.parents) if p.exists())).free


def format_bytes(size: float) -> str:
    """Format as `1.38 GB`, `269 MB` or `12 kB`, in powers of ten."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}" if unit == "GB" else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} bytes"


def cache_folder() -> Path:
    """Return $TOMOE_CACHE, else ~/.cache/tomoe."""
    return Path(os.environ.get("TOMOE_CACHE") or Path.home() / ".cache" / "tomoe").expanduser()
