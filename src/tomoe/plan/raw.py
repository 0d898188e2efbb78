"""The bytes of single tensors in a safetensors file, for those who only count.

The library gives arrays of torch or numpy, whose import takes longer than everything that `inspect` does.
"""

from __future__ import annotations

import math
import struct
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Self

from tomoe.files import parse_json
from tomoe.plan.layout import StoredTensor

# bytes of a header; that of the library is 100 MB
_MAX_HEADER = 2**26
# their sizes are multiplied, which takes forever if there are millions
_MAX_DIMS = 8
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8,
    "F64": 8,
}  # fmt: skip


class RawTensors:
    """An open file. Raises ValueError if it is no safetensors file, OSError if it cannot be read."""

    def __init__(self, path: Path):
        self._file: BinaryIO = path.open("rb")
        try:
            size = path.stat().st_size
            length = int.from_bytes(self._file.read(8), "little")
            if not 0 < length <= min(_MAX_HEADER, size - 8):
                raise ValueError("its header is not that of a safetensors file")
            header = parse_json(self._file.read(length).decode("utf-8"))
            self._start = 8 + length
            self._entries = _entries(header, size - self._start)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def stored(self) -> dict[str, StoredTensor]:
        """Shape and dtype of every tensor."""
        return {name: (shape, dtype) for name, (shape, dtype, _) in self._entries.items()}

    def data(self, name: str) -> bytes:
        """The bytes of a tensor."""
        _, _, (start, end) = self._entries[name]
        self._file.seek(self._start + start)
        data = self._file.read(end - start)
        if len(data) < end - start:
            raise ValueError(f"{name} ends too early")
        return data

    def mask(self, name: str) -> bytes:
        """The bytes of a tensor of bools, each 0 or 1. Raises ValueError for any other."""
        data = self.data(name)
        if data.count(0) + data.count(1) != len(data):
            raise ValueError(f"{name} holds something other than true and false")
        return data

    def floats(self, name: str) -> list[float]:
        """The numbers of a tensor of F32, F16 or BF16."""
        data, (_, dtype, _) = self.data(name), self._entries[name]
        if dtype == "F16":
            return [*struct.unpack(f"<{len(data) // 2}e", data)]
        if dtype == "BF16":
            # the upper halves of float32
            wide = bytearray(2 * len(data))
            wide[2::4], wide[3::4] = data[::2], data[1::2]
            data = bytes(wide)
        return array("f", data).tolist()


def _entries(header: Any, size: int) -> dict[str, tuple[tuple[int, ...], str, tuple[int, int]]]:
    """Shape, dtype and place of every tensor. Raises ValueError unless they fill the `size` bytes one after another."""
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    entries = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            sound = len(shape) <= _MAX_DIMS and all(type(n) is int and n >= 0 for n in (*shape, start, end))
            sound = sound and end - start == math.prod(shape) * _ITEM_BYTES[dtype]
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise ValueError(f"its header says of {name[:40]!r} what cannot be")
        entries[name] = (shape, dtype, (start, end))
    places = sorted(place for _, _, place in entries.values())
    if any(end != start for (_, end), (start, _) in pairwise([(0, 0), *places, (size, size)])):
        raise ValueError("its tensors do not fill the file")
    return entries
