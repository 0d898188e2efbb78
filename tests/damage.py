"""Damage to the files of a folder, drawn from a seed: values, keys, numbers, nesting, encodings, headers, links.

Every damage has a name, for tables.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# stands for JSON that Python would not write: replaced in the text afterwards
RAW = "\ue000raw\ue000"
RAW_VALUES = [
    "NaN", "-Infinity", "1e400", "9" * 5000, "-" + "9" * 400, "[" * 90_000 + "]" * 90_000, '{"a":' * 3000 + "1" + "}" * 3000,
    "[" * 400 + "]" * 400, '"\\ud800"', '"\\u0000"', '"\\u001b[31m\\u001b]0;title\\u0007"', "0x10", "01", "tru", "", "'a'",
]  # fmt: skip
NUMBERS = [0, -1, 1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**40, 2**53 + 1, 2**63, -(2**63) - 1, 10**30, 10**400, 0.5, -0.0,
           1e-320, 1e308, -1e308, 0.1 + 0.2]  # fmt: skip
STRINGS = [
    "", " ", "x", "0", "-1", "3", "true", "null", "nan", "float64", "auto", "../../secret", "/etc/passwd", "..\\x", "~", ".",
    "a\x00b", "\x1b[2J\x1b[31mred", "<script>alert(1)</script>", "$(touch x)", "`x`; rm -rf /", "a|b\n| c |", "́​日本", "🏝" * 9,
    "\u202egnp.exe", "owner/name", "self", "wikitext", "." * 300, "x" * 200_000, "a.b.c", "layers.0.", "%s%n{0}{x}",
    "[red]x[/red]",
]  # fmt: skip
OTHER: list[Any] = [None, True, False, [], {}, [[]], {"": {}}, [None] * 3, {"a": [1, {"b": "c"}]}, [[[[[1]]]]],
                    list(range(1000))]  # fmt: skip
ODD: list[Any] = [None, True, "x", "", -1, 0, 1.5, -0.5, 10**400, 1e308, [], {}, [[]], [1], {"a": 1}, {"a": "b"}, "\x1b[31m<b>",
                  [["a", {}]], [[0.5, "x"]]]  # fmt: skip
DTYPES = ["F32", "BOOL", "I32", "I64", "F16", "BF16", "F64", "U8", "F8_E4M3", "Q7", "", 3, None]
MISPLACED = ["gone", "a folder", "a link to itself", "a link to nowhere", "a link to /dev/zero", "a pipe", "unreadable"]
ROWS = [b"null", b"3", b"[]", b'"x"', b"{", b"", b"[" * 90_000, b"\xff\xfe", b'{"step": ' + b"9" * 5000 + b"}"]
INSERTED = [b"\xff", b"\x00", b"\xed\xa0\x80", b"{", b'"', b",", b"\n"]
METADATA: list[Any] = [{"format": "tf"}, {}, {"format": 3}, "x", {"tomoe_corpus": "[" * 9999}, {"a": "x" * 99_999}]
SIZES = [0, 1, 2, 4, 48, 2**31, 2**60, 2**64, -1, 0.5, "8"]


def damage(folder: Path, file: Path, draw: random.Random) -> str:
    """Damage `file` of `folder` in place; returns the name of what was done."""
    kind = draw.random()
    if kind < 0.03:
        return _misplace(file, draw)
    data = file.read_bytes()
    if file.suffix == ".safetensors":
        name, changed = _raw(data, draw) if kind < 0.2 else _safetensors(data, draw)
    elif file.suffix == ".json" and kind < 0.85:
        name, changed = _json(data, draw)
    elif file.suffix == ".jsonl" and kind < 0.85:
        name, changed = _rows(data, draw)
    elif file.name == "SHA256SUMS" and kind < 0.7:
        name, changed = _sums(data, draw)
    else:
        name, changed = _raw(data, draw)
    _replace(file, changed)
    _follow(folder, file, draw)
    return name


def _replace(file: Path, content: bytes) -> None:
    """A new file of that name: the old one may have other names, see `copy_folder`."""
    file.unlink()
    file.write_bytes(content)


def _follow(folder: Path, file: Path, draw: random.Random) -> None:
    """Write the hashes that follow from a file, most of the time: else every other check would hide behind them."""
    if draw.random() < 0.1:
        return
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    named = {"plan.safetensors": ("plan.json", "tensors_sha256"), "masks.safetensors": ("state.json", "sha256"),
             "weights.safetensors": ("state.json", "sha256"), "optimizer.safetensors": ("state.json", "sha256")}  # fmt: skip
    if file.name in named:
        name, key = named[file.name]
        head = json.loads((file.parent / name).read_text("utf-8"))
        head[key] = head[key] | {file.name: digest} if isinstance(head[key], dict) else digest
        _replace(file.parent / name, json.dumps(head).encode())
    sums = folder / "SHA256SUMS"
    if sums.is_file() and file != sums and draw.random() < 0.6:
        lines = [line.partition("  ")[2] for line in sums.read_text("utf-8", "replace").splitlines()]
        digests = [
            hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in lines if (folder / name).is_file()
        ]
        _replace(sums, "".join(f"{d}  {n}\n" for d, n in zip(digests, lines, strict=False)).encode())


def _misplace(file: Path, draw: random.Random) -> str:
    name = draw.choice(MISPLACED)
    content = file.read_bytes()
    file.unlink()
    if name == "a folder":
        file.mkdir()
    elif name == "a pipe":
        os.mkfifo(file)
    elif name == "unreadable":
        file.write_bytes(content)
        file.chmod(0)
    elif name != "gone":
        target = {"a link to itself": file.name, "a link to nowhere": "none", "a link to /dev/zero": "/dev/zero"}[name]
        file.symlink_to(target)
    return name


def _raw(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Bytes: cut, overwritten, inserted, encoded otherwise, or something else altogether."""
    at, name = draw.randrange(len(data) + 1), draw.choice(list(_RAW))
    return f"bytes: {name}", _RAW[name](data, at, draw)


_RAW: dict[str, Callable[[bytes, int, random.Random], bytes]] = {
    "cut": lambda data, at, draw: data[:at],
    "beginning lost": lambda data, at, draw: data[at:],
    "overwritten": lambda data, at, draw: data[:at] + draw.randbytes(4) + data[at + 4 :],
    "a bit": lambda data, at, draw: data[: at - 1] + bytes([data[at - 1] ^ 1 << draw.randrange(8)]) + data[at:] if at else data,
    "zeros": lambda data, at, draw: data[:at] + bytes(len(data) - at),
    "inserted": lambda data, at, draw: data[:at] + draw.choice(INSERTED) + data[at:],
    "twice": lambda data, at, draw: data + data,
    "empty": lambda data, at, draw: b"",
    "UTF-16": lambda data, at, draw: data.decode("utf-8", "replace").encode("utf-16"),
    "byte order mark": lambda data, at, draw: b"\xef\xbb\xbf" + data,
    "Latin-1": lambda data, at, draw: data.decode("latin-1").replace("e", "é").encode("latin-1"),
    "deep": lambda data, at, draw: draw.choice([b"[", b'{"a":', b'[{"":']) * 100_000,
    "digits": lambda data, at, draw: b"9" * 6000,
    "noise": lambda data, at, draw: draw.randbytes(300),
    "null": lambda data, at, draw: draw.choice([b"null", b"[]", b"{}", b"3", b'"x"', b"NaN", b"\n"]),
    "large": lambda data, at, draw: b'{"a": "' + b"x" * 2**23 + b'"}',
}  # fmt: skip


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


def change(values: Any, draw: random.Random) -> str:
    """One change of nested values, in place; returns the name of what was done."""
    return _change(values, draw, [])


def _json(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    values, names, raw = json.loads(data), list[str](), list[str]()
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        names.append(_change(values, draw, raw))
    text = json.dumps(values, ensure_ascii=draw.random() < 0.5)
    for value in raw:
        text = text.replace(json.dumps(RAW), value, 1).replace(f'"{RAW}"', value, 1)
    return names[0], text.encode("utf-8", "surrogatepass")


def _rows(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    lines = data.splitlines() or [b"{}"]
    at, kind = draw.randrange(len(lines)), draw.randrange(5)
    if kind == 0:
        lines[at] = draw.choice(ROWS)
        return "rows: another", b"\n".join(lines) + b"\n"
    if kind == 1:
        return "rows: many", b"\n".join([*lines, *[lines[at]] * 3000]) + b"\n"
    if kind == 2:
        draw.shuffle(lines)
        return "rows: order", b"\n".join(lines) + b"\n"
    name, lines[at] = _json(lines[at], draw)
    return f"rows: {name}", b"\n".join(lines) + b"\n"


def _change(values: Any, draw: random.Random, raw: list[str]) -> str:
    """One change of nested values, in place; `raw` gets the text to put in place of each RAW."""
    place, key = _place(values, draw)
    if key is None:
        return "nothing to change"
    kind = draw.randrange(12)
    if kind == 0:
        place.pop(key)
        return "dropped"
    if kind == 1 and isinstance(place, dict):
        place[draw.choice(STRINGS)] = _odd(draw, raw)
        return "added"
    if kind == 2 and isinstance(place, dict) and isinstance(key, str):
        # the second of two equal keys counts
        other = draw.choice([*NUMBERS, *STRINGS[:9], *OTHER])
        raw.append(f"{json.dumps(place[key])}, {json.dumps(key)}: {json.dumps(other)}")
        place[key] = RAW
        return "key twice"
    if kind == 3 and isinstance(place, list):
        place.extend([copy.deepcopy(place[key])] * draw.choice([1, 2, 1000]))
        return "longer"
    if kind == 4 and isinstance(place[key], dict | list):
        place[key] = place[key][:-1] if isinstance(place[key], list) else dict(list(place[key].items())[:-1])
        return "shorter"
    if kind == 5:
        place[key] = [place[key]] if draw.random() < 0.5 else str(place[key])
        return "wrapped"
    if kind in (6, 7) and isinstance(place[key], int | float):
        n = place[key]
        place[key] = draw.choice([n + 1, n - 1, n * 2, -n, n / 3, float(n)] if abs(n) < 1e300 else [n + 1, -n])
        return "another number"
    place[key] = _odd(draw, raw)
    return "replaced"


def _odd(draw: random.Random, raw: list[str]) -> Any:
    kind = draw.random()
    if kind < 0.2:
        raw.append(draw.choice(RAW_VALUES))
        return RAW
    if kind < 0.5:
        return draw.choice(NUMBERS)
    return draw.choice(STRINGS) if kind < 0.75 else copy.deepcopy(draw.choice(OTHER))


def _place(values: Any, draw: random.Random) -> tuple[Any, Any]:
    """A dict or list within `values`, and one of its keys; walks down, so that long lists do not hide the rest."""
    place, key = values, None
    while isinstance(place, dict | list) and place:
        parent, key = place, draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
        place = parent[key]
        if draw.random() < 0.25:
            break
    return (parent, key) if key is not None else (values, None)


def _safetensors(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """A file with parts of its header changed, sometimes with the bytes to match; or numbers that are not finite."""
    length = struct.unpack("<Q", data[:8])[0]
    head, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names, raw, done = [name for name in head if name != "__metadata__"], list[str](), list[str]()
    if not names:
        return _raw(data, draw)
    for _ in range(draw.choice([1, 1, 2])):
        tensor = draw.choice(names)
        if tensor not in head or not isinstance(head[tensor], dict):
            continue
        body, name = _tensor(head, tensor, names, body, draw, raw)
        done.append(name)
    text = json.dumps(head)
    for value in raw:
        text = text.replace(json.dumps(RAW), value, 1)
    encoded = text.encode("utf-8", "surrogatepass")
    size = draw.choice([len(encoded)] * 14 + [0, 2**60, len(encoded) + 1])
    name = done[0] if size == len(encoded) else "length"
    return f"header: {name}", struct.pack("<Q", size) + encoded + body


def _tensor(
    head: dict[str, Any], name: str, names: list[str], body: bytes, draw: random.Random, raw: list[str]
) -> tuple[bytes, str]:
    entry, kind = head[name], draw.randrange(10)
    offsets = entry.get("data_offsets")
    whole = isinstance(offsets, list) and [type(offset) for offset in offsets] == [int, int]
    start, end = offsets if whole else (0, 0)
    if kind == 0:
        entry["shape"] = [draw.choice(SIZES) for _ in range(draw.randrange(4))]
    elif kind == 1:
        entry["dtype"] = draw.choice(DTYPES)
    elif kind == 2:
        entry["data_offsets"] = [draw.choice([0, 1, start, end, 2**60, -5]) for _ in range(draw.randrange(4))]
    elif kind == 3:
        known = ["layers.0.more", "layers.9.router_weight", "model.norm.weight", *names]
        head[draw.choice([*STRINGS, *known])] = head.pop(name)
        return body, "renamed"
    elif kind == 4:
        del head[name]
        return body, "dropped"
    elif kind == 5:
        entry["shape"] = draw.sample(entry["shape"], len(entry["shape"])) + draw.choice([[], [1]])
        return body, "another shape"
    elif kind in (6, 7):
        # of the widths 1, 2 and 4: all ones is NaN as a float, 255 as a mask
        filled = draw.choice([b"\xff", b"\x00", b"\x01", b"\x7f"])
        first = draw.randrange(start, max(end, start + 1))
        last = draw.choice([end, min(end, first + 4)])
        return body[:first] + filled * max(last - first, 0) + body[max(first, last) :], "other bytes"
    elif kind == 8:
        head["__metadata__"] = draw.choice(METADATA)
        return body, "metadata"
    else:
        entry["unknown"] = _odd(draw, raw)
        return body, "unknown key"
    return body, "size, dtype or place"


def _sums(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    lines = data.decode().splitlines()
    at = draw.randrange(len(lines))
    digest, _, name = lines[at].partition("  ")
    lines[at] = draw.choice([
        f"{digest}  ../{name}", f"{digest}  /etc/passwd", f"{digest}  none", f"{digest} *{name}", name, digest, "",
        f"0{digest[1:]}  {name}",
        f"{digest}  {name}\x00", f"{digest}  .", f"{digest.upper()}  {name}", f"{digest}  \x1b[31m{name}", f"{digest}  run",
    ])  # fmt: skip
    return "sums", "\n".join(lines).encode()


def copy_folder(source: Path, target: Path) -> Path:
    """The folder again, with further names of the same files: whoever changes one has to replace it."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=os.link)
    return target
