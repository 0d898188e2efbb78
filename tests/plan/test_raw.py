"""Single tensors as bytes: the same as the library reads, and a ValueError for every file that it would refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from tomoe.plan.raw import RawTensors

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    floats = {name: torch.randn(3, 5, generator=generator).to(dtype) for name, dtype in FLOATS.items()}
    masks = {"mask": torch.rand(4, 7, generator=generator) < 0.5, "one": torch.tensor(True), "none": torch.zeros(0, 3)}
    return floats | masks | {"counts": torch.arange(5)}


def test_bytes_are_those_that_the_library_reads(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_file(tensors, tmp_path / "file", metadata={"format": "pt"})
    with RawTensors(tmp_path / "file") as raw:
        assert {name: shape for name, (shape, _) in raw.stored().items()} == {
            n: tuple(t.shape) for n, t in tensors.items()
        }
        for name in FLOATS:
            assert raw.stored()[name][1] == name
            assert raw.floats(name) == tensors[name].flatten().tolist()
        assert list(raw.mask("mask")) == tensors["mask"].flatten().int().tolist()
        assert raw.mask("one") == b"\x01"
        assert raw.data("none") == b""
        with pytest.raises(ValueError, match="true and false"):
            raw.mask("counts")


def rewritten(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def entry(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["mask"].update(changes)


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda header: [header],
    "an entry that is a number": lambda header: header.update(mask=3),
    "an entry without a dtype": lambda header: header["mask"].pop("dtype"),
    "no place": lambda header: header["mask"].pop("data_offsets"),
    "an unknown dtype": entry(dtype="F12"),
    "a dtype that is a list": entry(dtype=["BOOL"]),
    "another dtype": entry(dtype="F32"),
    "another shape": entry(shape=[4, 8]),
    "a negative shape": entry(shape=[-4, -7]),
    "a shape of fractions": entry(shape=[4.0, 7.0]),
    "a shape of bools": entry(shape=[True, 28]),
    "a shape of words": entry(shape="47"),
    "a shape of too many sizes": entry(shape=[1] * 9 + [28]),
    "three offsets": entry(data_offsets=[0, 1, 28]),
    "a place beyond the end": entry(data_offsets=[10**6, 10**6 + 28]),
    "a place before the start": entry(data_offsets=[-28, 0]),
    "a place twice": lambda header: header.update(copy=header["mask"]),
    "a gap": lambda header: header.pop("mask"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_headers_that_lie(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(rewritten(save(some_tensors()), DAMAGES[name]))
    with pytest.raises(ValueError, match=r"header|fill the file"):
        RawTensors(tmp_path / "file")


@pytest.mark.parametrize(
    "data",
    [b"", b"\x01", b"\xff" * 64, bytes(8), (2**40).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"\xff\xff"],
)
def test_what_is_no_safetensors_file(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError):  # noqa: PT011 (of several kinds)
        RawTensors(tmp_path / "file")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_any_byte_changed_is_read_or_refused(tmp_path: Path, place: int, byte: int) -> None:
    data = bytearray(save(some_tensors()))
    data[place % len(data)] = byte
    (tmp_path / "file").write_bytes(data)
    try:
        with RawTensors(tmp_path / "file") as raw:
            for name, (shape, dtype) in raw.stored().items():
                if dtype in FLOATS:
                    assert len(raw.floats(name)) == torch.Size(shape).numel()
    except ValueError:
        pass
