"""A GGUF file: its tensors, made as they are written, in types that their row lengths allow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, quants
from jaxtyping import Shaped
from torch import Tensor

from tomoe.exporting.gguf.llama_cpp import quantize
from tomoe.exporting.target import PRECISIONS, Precision
from tomoe.progress import StageCallback

TYPES = {name: GGMLQuantizationType[name.upper().removesuffix("_M")] for name in PRECISIONS}
FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q6_k": LlamaFileType.MOSTLY_Q6_K,
    "q4_k": LlamaFileType.MOSTLY_Q4_K_S,
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
}
# What takes the place of a type if a row is no multiple of the numbers that it quantizes together.
COARSER_ROWS = {
    GGMLQuantizationType.Q4_K: GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q5_K: GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q6_K: GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q5_0: GGMLQuantizationType.F16,
    GGMLQuantizationType.Q5_1: GGMLQuantizationType.F16,
    GGMLQuantizationType.Q8_0: GGMLQuantizationType.F16,
}
# The types whose quantizers take an importance matrix, of those that a file may have.
WEIGHTED = {GGMLQuantizationType[name] for name in ("Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1")}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file; importance: makes a tensor of its shape that holds in each column its importance."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    make: Callable[[], Tensor]
    importance: Callable[[], Tensor] | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(quants.quant_shape_to_byte_shape(self.shape, self.type))

    @property
    def nbytes(self) -> int:
        return math.prod(self.stored_shape)


@dataclass(frozen=True)
class Weights:
    """What determines the type of a tensor. layers: decoder layers; experts: per layer; tied: whether the output matrix is the
    embedding."""

    precision: Precision
    layers: int
    experts: int = 0
    tied: bool = False

    def wanted(self, name: str, shape: tuple[int, ...]) -> GGMLQuantizationType:
        """Return the type for a tensor: small ones stay float32; with q4_k, embeddings and output matrix are Q6_K at least."""
        if len(shape) == 1 or any(part in name for part in ("ffn_gate_inp", "conv1d", "shortconv.conv")):
            return GGMLQuantizationType.F32
        if self.precision == "q4_k_m":
            return GGMLQuantizationType[self._mixed(name)]
        large = self.precision == "q4_k" and name in ("token_embd.weight", "output.weight")
        return TYPES["q6_k" if large else self.precision]

    def _mixed(self, name: str) -> str:
        """llama.cpp's Q4_K_M (`llama_tensor_get_type`), for which xllamacpp has no function."""
        part = name.removesuffix(".weight").rpartition(".")[2]
        if part == "output" or (part == "token_embd" and self.tied):
            return "Q6_K"
        if self.experts == 8 and part in ("attn_k", "attn_v", "attn_output"):
            return "Q5_K" if part == "attn_output" else "Q8_0"
        if part == "attn_v" or part.startswith("ffn_down"):
            eighth, i = self.layers // 8, int(name.split(".")[1])
            return "Q6_K" if i < eighth or i >= 7 * self.layers // 8 or (i - eighth) % 3 == 2 else "Q4_K"
        return "Q5_K" if part == "attn_qkv" else "Q4_K"

    def fitting(self, name: str, shape: tuple[int, ...]) -> GGMLQuantizationType:
        """Return the wanted type, or the next that divides its rows."""
        kind = self.wanted(name, shape)
        while shape[-1] % GGML_QUANT_SIZES[kind][0]:
            short = self.precision == "q4_k_m" and kind == GGMLQuantizationType.Q4_K
            kind = GGMLQuantizationType.Q5_0 if short else COARSER_ROWS[kind]
        return kind

    def larger_rows(self, entries: Iterable[TensorEntry]) -> str:
        """Say how many of the values need a larger type; empty if none do."""
        numbers: Counter[str] = Counter()
        total = 0
        for entry in entries:
            total += math.prod(entry.shape)
            if entry.type != self.wanted(entry.name, entry.shape):
                numbers[entry.type.name.lower()] += math.prod(entry.shape)
        if not numbers:
            return ""
        shares = " and ".join(f"{count / total:.0%} of the numbers {kind}" for kind, count in numbers.most_common())
        return f" ({shares}: rows whose length is not a multiple of {GGML_QUANT_SIZES[TYPES[self.precision]][0]})"


def make_entry(
    name: str,
    weights: Weights,
    make: Callable[[], Tensor],
    shape: tuple[int, ...] | None,
    importance: Callable[[], Tensor] | None = None,
) -> TensorEntry:
    """Make a tensor of the file, in the type for its name and rows."""
    shape = tuple(make().shape) if shape is None else shape
    kind = weights.fitting(name, shape)
    return TensorEntry(name, shape, kind, make, importance if kind in WEIGHTED and "token_embd" not in name else None)


def quantized(entry: TensorEntry) -> Shaped[np.ndarray, ...]:
    """Return the tensor of an entry as stored."""
    numbers = entry.make().detach().float().cpu().contiguous().numpy()
    if entry.importance is None:
        return quantize(numbers, entry.type)
    # rows of zeros, which pad heads, have none
    columns = entry.importance().float().amax(-2).cpu()
    # llama.cpp divides by sums of it; an expert that no token chose gets the same for all columns
    floor = columns.mean(-1, keepdim=True).clamp_min(1e-30) * 1e-6
    return quantize(numbers, entry.type, (columns + floor).numpy())


def write_tensors(
    writer: GGUFWriter,
    path: Path,
    entries: Sequence[TensorEntry],
    on_progress: StageCallback,
    stored: Callable[[TensorEntry], Shaped[np.ndarray, ...]] = quantized,
) -> None:
    """Write the file, tensor by tensor, and close the writer. `stored` makes the data of an entry."""
    for entry in entries:
        # the writer takes the shape in bytes of types that numpy does not have
        plain = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}.get(entry.type)
        kind = np.dtype(plain or "uint8")
        shape = entry.shape if plain else entry.stored_shape
        writer.add_tensor_info(entry.name, shape, kind, entry.nbytes, raw_dtype=entry.type)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total = sum(entry.nbytes for entry in entries)
    written = 0
    for entry in entries:
        data = stored(entry)
        writer.write_tensor_data(data)
        written += data.nbytes
        on_progress(written, total)
    writer.close()
