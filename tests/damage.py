"""Damage to a file, drawn from a seed: to the values in it, to its bytes, or to what lies at its place."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# as JSON, which is shorter
ODD: list[Any] = json.loads(
    f"""[null, true, -1, 0, 1, 1.5, -0.5, 1e308, {2**31}, {2**64}, {10**400}, "", "x", "\\u001b[31m<b>",
    [], {{}}, [[]], [1], {{"a": 1}}, {{"a": "b"}}, {{"": {{}}}}, [["a", {{}}]], [[0.5, "x"]], [null, null, null]]"""
)
"""Values for a place where others belong."""
STRINGS = [
    *"-1 true float64 F8_E4M3 ../../secret /etc/passwd $(x) 日本🏝 owner/name self layers.0. [red]x".split(),
    "a\x00b",
]
"""Names for a place where others belong."""
MARK = "\ue000"
"""Stands for JSON that Python would not write."""
RAW = [
    "NaN",
    "-Infinity",
    "1e400",
    "9" * 5000,
    "[" * 90_000 + "]" * 90_000,
    '{"a":' * 3000 + "1" + "}" * 3000,
    '"\\ud800"',
    "01",
    "tru",
    "",
    "'a'",
    '1, "a": 2',
]
BYTES = [
    b"",
    b"\xff",
    b"\x00" * 8,
    b"\xed\xa0\x80",
    b"{",
    b'"',
    b"null",
    b"[]",
    b"3",
    b"[" * 100_000,
    b"9" * 6000,
    b"\xef\xbb\xbf",
    "é{}".encode("utf-16"),
    b'{"a": "' + b"x" * 2**23 + b'"}',
]
PLACES = ["gone", "a folder", "none", "/dev/zero", "a link to itself", "a pipe", "unreadable"]
# files whose hash another file holds: else every other check would hide behind it
HASHED = {
    "plan.safetensors": ("plan.json", "tensors_sha256"),
    "masks.safetensors": ("state.json", "sha256"),
    "optimizer.safetensors": ("state.json", "sha256"),
}


def damage(folder: Path, file: Path, draw: random.Random) -> None:
    """Damage `file` of `folder` in place."""
    kind, data = draw.random(), file.read_bytes()
    # a new file of that name: the old one may have other names, see `copy_folder`
    file.unlink()
    if kind < 0.04:
        return _misplace(file, data, draw.choice(PLACES))
    if kind < 0.2 or file.suffix not in (".json", ".jsonl", ".safetensors"):
        data = _bytes(data, draw)
    elif file.suffix == ".safetensors":
        data = _safetensors(data, draw)
    elif file.suffix == ".jsonl":
        lines = data.splitlines() or [b"{}"]
        at = draw.randrange(len(lines))
        lines[at : at + 1] = [_json(lines[at], draw)] * draw.choice([1, 1, 3000])
        data = b"\n".join(lines) + b"\n"
    else:
        data = _json(data, draw)
    file.write_bytes(data)
    if draw.random() < 0.9:
        _follow(folder, file, data)
    return None


def change(values: Any, draw: random.Random) -> str:
    """Change one of the nested values, in place; returns what is to stand for MARK in their JSON."""
    place, key = values, None
    while isinstance(place, dict | list) and place and (key is None or draw.random() < 0.75):
        # walks down, so that long lists do not hide the rest
        parent, key = place, draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
        place = parent[key]
    if key is None:
        return ""
    kind = draw.randrange(8)
    if kind == 0:
        parent.pop(key)
    elif kind == 1:
        parent[key] = draw.choice([[place], str(place), MARK])
    elif kind == 2 and isinstance(parent, dict):
        parent[draw.choice(STRINGS)] = parent.pop(key)
    elif kind == 3 and isinstance(parent, list):
        parent.extend([copy.deepcopy(place)] * draw.choice([1, 1000]))
    elif kind == 4 and isinstance(place, list):
        parent[key] = draw.sample(place, len(place))[draw.randrange(2) :]
    elif kind in (5, 6) and isinstance(place, int | float) and abs(place) < 1e300:
        parent[key] = draw.choice([place + 1, place - 1, place * 2, -place, place / 3, float(place)])
    else:
        parent[key] = copy.deepcopy(draw.choice([*ODD, *STRINGS, "x" * 200_000]))
    # the second of two equal keys counts
    again = f"{json.dumps(place)}, {json.dumps(key)}: {json.dumps(draw.choice(ODD))}"
    return draw.choice([*RAW, again])


def odd_copies(values: Any) -> Iterator[Any]:
    """Each value of a JSON structure replaced by each odd one, or left out, one at a time."""
    yield from (odd for odd in ODD if odd != values)
    if isinstance(values, dict):
        for key, value in values.items():
            yield {k: v for k, v in values.items() if k != key}
            yield from (values | {key: odd} for odd in odd_copies(value))
    if isinstance(values, list):
        for i, value in enumerate(values):
            yield values[:i] + values[i + 1 :]
            yield from ([*values[:i], odd, *values[i + 1 :]] for odd in odd_copies(value))


def copy_folder(source: Path, target: Path) -> Path:
    """The folder again, with further names of the same files: whoever changes one has to replace it."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=os.link)
    return target


def _json(data: bytes, draw: random.Random) -> bytes:
    values = json.loads(data)
    for _ in range(draw.choice([1, 1, 2])):
        raw = change(values, draw)
    text = json.dumps(values, ensure_ascii=draw.random() < 0.5)
    return text.replace(json.dumps(MARK), raw).replace(f'"{MARK}"', raw).encode("utf-8", "surrogatepass")


def _safetensors(data: bytes, draw: random.Random) -> bytes:
    """A file with its header changed; or other bytes in it, of the widths 1, 2 and 4: all ones is NaN, or 255 in a mask."""
    length = struct.unpack("<Q", data[:8])[0]
    head, body = data[8 : 8 + length], data[8 + length :]
    if draw.random() < 0.25 and body:
        first = draw.randrange(len(body))
        count = draw.choice([4, len(body)])
        body = (body[:first] + draw.choice([b"\xff", b"\x00", b"\x01", b"\x7f"]) * count)[: len(body)] + body[
            first + count :
        ]
    else:
        head = _json(head, draw)
    size = draw.choice([len(head)] * 14 + [0, 2**60, len(head) + 1])
    return struct.pack("<Q", size) + head + body


def _bytes(data: bytes, draw: random.Random) -> bytes:
    """A piece cut out, put in place of another or put between: perhaps all of it, up to the end, or nothing."""
    first = draw.choice([0, draw.randrange(len(data) + 1)])
    last = draw.choice([first, first + 1, first + 4, len(data)])
    return data[:first] + draw.choice([*BYTES, draw.randbytes(4), data]) + data[last:]


def _misplace(file: Path, data: bytes, what: str) -> None:
    if what == "a folder":
        file.mkdir()
    elif what == "a pipe":
        os.mkfifo(file)
    elif what == "unreadable":
        file.write_bytes(data)
        file.chmod(0)
    elif what != "gone":
        file.symlink_to(file.name if what == "a link to itself" else what)


def _follow(folder: Path, file: Path, data: bytes) -> None:
    """Write the hashes that follow from a file."""

    def replace(path: Path, content: str) -> None:
        path.unlink()
        path.write_text(content)

    digest = hashlib.sha256(data).hexdigest()
    if file.name in HASHED:
        name, key = HASHED[file.name]
        head = json.loads((file.parent / name).read_text("utf-8"))
        head[key] = head[key] | {file.name: digest} if isinstance(head[key], dict) else digest
        replace(file.parent / name, json.dumps(head))
    sums = folder / "SHA256SUMS"
    if sums.is_file() and file != sums:
        lines = (line.partition("  ")[2] for line in sums.read_text("utf-8").splitlines())
        replace(sums, "".join(f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in lines))
