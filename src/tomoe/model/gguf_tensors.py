"""The tensors of a .gguf file, each dequantized on demand, in pieces, into the requested dtype.

Names and layouts are transformers': its own map of names and its own processors decide what becomes of a tensor.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import gguf
import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, ReaderField, ReaderTensor
from jaxtyping import Shaped
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

_PIECE = 2**18  # numbers that are dequantized together: a few MB of memory with what numpy makes on the way
_LENGTH = struct.Struct("=Q")


class FastReader(GGUFReader):
    """gguf's reader, with the hundreds of thousands of vocabulary strings read in one loop: gguf takes seconds for them."""

    vocabulary: ClassVar[bool] = True  # whether the entries of tokenizer.* that are lists are kept

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        if self.byte_order == "S":
            raise ValueError(f"its bytes are not in the order of this machine ({sys.byteorder}-endian)")
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        parts: list[Any] = [kind, count]
        types = [GGUFValueType.ARRAY, GGUFValueType(kind[0])]
        end = orig_offs + kind.nbytes + count.nbytes
        if types[1] == GGUFValueType.STRING:
            plain: Any = np.asarray(self.data)
            view = memoryview(plain)  # three times as fast to unpack from
            for _ in range(int(count[0])):
                (length,) = _LENGTH.unpack_from(view, end)
                if self.vocabulary:
                    parts += [plain[end : end + 8], plain[end + 8 : end + 8 + length]]
                end += 8 + length
            return end - orig_offs, parts, [*range(3, len(parts), 2)], types
        if (scalar := self.gguf_scalar_to_np.get(types[1])) is None:
            return super()._get_field_parts(orig_offs, raw_type)
        values = np.asarray(self._get(end, scalar, count[0]))
        parts += [*values.reshape(-1, 1)]
        return end + values.nbytes - orig_offs, parts, [*range(2, len(parts))], types


class HeaderReader(FastReader):
    """Skips the vocabulary, and reports its size as a key of the architecture."""

    vocabulary = False

    def _build_fields(self, offs: int, count: int) -> int:
        end = super()._build_fields(offs, count)
        for name, field in self.fields.items():
            if name.startswith("tokenizer.") and GGUFValueType.ARRAY in field.types:
                self.fields[name] = field._replace(data=[])
        tokens, architecture = (self.fields.get(key) for key in ("tokenizer.ggml.tokens", "general.architecture"))
        key = f"{architecture and architecture.contents()}.vocab_size"
        if key not in self.fields and tokens is not None:
            # behind the name and the type of the entry, and the type of its elements
            size = tokens.parts[4].astype(np.uint32)
            self._push_field(ReaderField(end, key, [size], [0], [GGUFValueType.UINT32]))
        return end


@contextmanager
def reading_by(reader: type[FastReader]) -> Iterator[None]:
    """Inside the block, transformers reads .gguf files with this reader."""
    module = cast(Any, gguf)
    plain, module.GGUFReader = module.GGUFReader, reader
    try:
        yield
    finally:
        module.GGUFReader = plain


def processor_of(architecture: str, config: Mapping[str, Any]) -> TensorProcessor:
    """Return transformers' processor of an architecture's tensors; config: the file's keys by their names in a config."""
    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=dict(config))


def names_of(model: PreTrainedModel, processor: TensorProcessor) -> dict[str, str]:
    """Map tensor names in a file to those in a model.

    transformers looks at every module by itself, in case a file was made from a part of the model; the model's direct parts
    are all that could be one.
    """

    def bare(module: Any, parts: tuple[Any, ...]) -> Any:
        names = [*module.state_dict()]
        return SimpleNamespace(config=model.config, state_dict=lambda: names, named_children=lambda: parts)

    children = tuple((name, bare(child, ())) for name, child in model.named_children())
    return cast(Any, get_gguf_hf_weights_map)(bare(model, children), processor)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a file, which `[...]` reads: what transformers would make of it, in `dtype`."""

    path: Path
    stored: ReaderTensor
    processor: TensorProcessor
    names: Mapping[str, str]
    dtype: torch.dtype

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(reversed(self.stored.shape.tolist()))

    def __getitem__(self, index: Any) -> Tensor:
        return self._read()[index]

    def get_shape(self) -> tuple[int, ...]:
        """The shape that it is read in; the name is that of slices of safetensors files."""
        return self._processed(self._untouched).shape

    def without_numbers(self) -> Tensor:
        """Its shape and dtype, on the meta device."""
        return torch.empty(self.get_shape(), dtype=self.dtype, device="meta")

    @property
    def _untouched(self) -> Shaped[np.ndarray, ...]:
        """Numbers without memory to try the processor with: if it returns them, it leaves such a tensor unchanged."""
        return np.broadcast_to(np.float32(0), self.stored_shape)

    def _read(self) -> Tensor:
        untouched = self._untouched
        alone = self._processed(untouched) is untouched
        dtype = self.dtype if alone else torch.float32
        out = torch.empty(self.stored_shape, dtype=dtype)
        rows = out.view(-1, self.stored_shape[-1])
        step = max(1, _PIECE // rows.shape[1])
        for first in range(0, len(rows), step):
            piece = rows[first : first + step]
            piece.copy_(torch.from_numpy(self._numbers(first, len(piece))))
        return out if alone else torch.from_numpy(np.ascontiguousarray(self._processed(out.numpy()))).to(self.dtype)

    def _processed(self, weights: Shaped[np.ndarray, ...]) -> Shaped[np.ndarray, ...]:
        parsed: dict[str, Any] = {"tensors": {}}
        # logarithms of the numbers without memory
        with np.errstate(all="ignore"):
            done = self.processor.process(
                weights=weights, name=self.stored.name, tensor_key_mapping=self.names, parsed_parameters=parsed
            )
        # a processor that stores a tensor itself returns no name
        return done.weights if done.name is not None else parsed["tensors"].popitem()[1].numpy()

    def _numbers(self, first: int, count: int) -> Shaped[np.ndarray, "rows n"]:
        """Rows as float32; read, not mapped, because mapped file pages count as memory."""
        bytes_of_row = self.stored.n_bytes * self.stored_shape[-1] // math.prod(self.stored_shape)
        kind = self.stored.data.dtype
        raw = np.fromfile(
            self.path,
            kind,
            count * bytes_of_row // kind.itemsize,
            offset=self.stored.data_offset + first * bytes_of_row,
        )
        # as one row, because the package takes 16 of them at a time
        return gguf.dequantize(raw[None], self.stored.tensor_type).reshape(count, self.stored_shape[-1])


def _keep_freed_memory() -> None:
    """Make glibc's malloc reuse freed arrays of up to 32 MB: it returns their pages until one of that size was freed once, and
    new pages for each piece took half of the time of reading a file."""
    np.empty(2**25 - 2**16, np.uint8)


def lazy_tensors(
    path: Path, stored: Mapping[str, ReaderTensor], architecture: str, model: PreTrainedModel, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """Return the tensors of a file by their names in a model without weights: in `dtype`, or float32 where the model keeps that.
    Those that the model does not have are left out."""
    _keep_freed_memory()
    with reading_by(HeaderReader):
        config = load_gguf_checkpoint(str(path))["config"]
    processor = processor_of(architecture, config)
    names = names_of(model, processor)
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}

    def lazy(name: str, tensor: ReaderTensor) -> LazyTensor:
        exact = any(f".{module}." in f".{names[name]}." for module in kept)
        return LazyTensor(path, tensor, processor, names, torch.float32 if exact else dtype)

    return {names[name]: lazy(name, tensor) for name, tensor in stored.items() if name in names}
