"""A GGUF file with fine-grained experts, read back: its routers, and the same file without them.

llama.cpp makes a few nodes of its graph for every expert of a token, more than there is room for if a token uses all of
dozens. So to run a file with all experts, their neurons are written as the plain MLPs that they are together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor, quants
from jaxtyping import Shaped
from torch import Tensor

from tomoe.exporting.stock.routers import RouterForm
from tomoe.exporting.verify import StockRouter
from tomoe.model.shape import ceil_div


@dataclass(frozen=True)
class Merged:
    """How a file is run without its experts: as this architecture; weighs: whether weights of a token's experts sum to 1, which a
    factor k in their down projections undoes; shared_factor: that of the shared expert's down projection."""

    arch: str
    weighs: bool = False
    shared_factor: float = 1.0


MERGED = {
    "glm4moe": Merged("glm4moe"),
    "lfm2moe": Merged("lfm2moe", weighs=True),
    "qwen35moe": Merged("qwen35", weighs=True, shared_factor=2.0),
}
_ROUTERS = ("ffn_gate_inp", "exp_probs_b")
_BLOCK = 256  # rows of all types are a multiple of so many numbers: a K-quant holds them together


def _arch(reader: GGUFReader) -> str:
    return str(reader.fields["general.architecture"].contents())


def _number(reader: GGUFReader, key: str) -> int:
    """Return a number of the architecture; 0 if it has none."""
    field = reader.fields.get(f"{_arch(reader)}.{key}")
    return 0 if field is None else int(field.contents())


def read_routers(file: Path, form: RouterForm) -> dict[int, StockRouter]:
    """Read the routers in a file, by layer number."""
    reader = GGUFReader(file)
    stored = {t.name: torch.from_numpy(t.data.copy()) for t in reader.tensors if any(r in t.name for r in _ROUTERS)}
    layers = range(_number(reader, "leading_dense_block_count"), _number(reader, "block_count"))
    top_k = _number(reader, "expert_used_count")

    def router(i: int) -> StockRouter:
        weight = stored[f"blk.{i}.ffn_gate_inp.weight"]
        corrections = stored.get(f"blk.{i}.exp_probs_b.bias", weight.new_zeros(len(weight)))

        def choose(x: Tensor) -> tuple[Tensor, Tensor]:
            return form.choose(x @ weight.t().to(x), corrections.to(x), top_k)

        return StockRouter(form, choose, float(weight.abs().amax()))

    return {i: router(i) for i in layers}


def merge_experts(file: Path, merged: Path) -> Path:
    """Write the file `merged`, in which the shared part and the experts of each layer are one MLP; return it. Stored rows are
    concatenated, times what undoes weights; llama.cpp needs MLPs of one size, so smaller ones are padded with neurons of
    zeros."""
    reader = GGUFReader(file)
    arch = _arch(reader)
    how = MERGED[arch]
    writer = GGUFWriter(merged, how.arch)
    layers = _number(reader, "block_count")
    factors = {
        "_exps": 1 / _number(reader, "expert_used_count") if how.weighs else 1.0,
        "_shexp": 1 / how.shared_factor,
    }
    parts: dict[str, list[ReaderTensor]] = {}
    for tensor in reader.tensors:
        if not any(router in tensor.name for router in _ROUTERS):
            parts.setdefault(tensor.name.replace("_exps", "").replace("_shexp", ""), []).append(tensor)
    sizes = {sum(_neurons(t) for t in parts[f"blk.{i}.ffn_up.weight"]) for i in range(layers)}
    size = max(sizes) if len(sizes) == 1 else ceil_div(max(sizes), _BLOCK) * _BLOCK
    changed: dict[str, Any] = {"leading_dense_block_count": layers, "feed_forward_length": size}
    for field in reader.fields.values():
        key = field.name.removeprefix(f"{arch}.")
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        name = field.name if key == field.name else f"{how.arch}.{key}"
        sub = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, changed.pop(key, field.contents()), field.types[0], sub)
    for key, value in changed.items():
        writer.add_uint32(f"{how.arch}.{key}", value)
    types = {name: _type(group, factors) for name, group in parts.items()}

    def stored(name: str) -> Shaped[np.ndarray, ...]:
        return _filled_up(name, _joined(name, parts[name], types[name], factors), size, types[name])

    for name in parts:
        data = stored(name)
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in parts:
        # made twice: one at a time is in memory
        writer.write_tensor_data(stored(name))
    writer.close()
    return merged


def _neurons(tensor: ReaderTensor) -> int:
    """Return rows of a tensor of gate or up projections, of all experts."""
    return int(np.prod(tensor.shape[1:]))


def _factor(name: str, factors: Mapping[str, float]) -> float:
    """Return the factor for the values of a tensor."""
    return next((factor for part, factor in factors.items() if f"ffn_down{part}" in name), 1.0)


def _type(group: list[ReaderTensor], factors: Mapping[str, float]) -> GGMLQuantizationType:
    kinds = {tensor.tensor_type for tensor in group}
    changes = any(_factor(tensor.name, factors) != 1 for tensor in group)
    return GGMLQuantizationType.F32 if changes or len(kinds) > 1 else kinds.pop()


def _joined(
    name: str, group: list[ReaderTensor], kind: GGMLQuantizationType, factors: Mapping[str, float]
) -> Shaped[np.ndarray, ...]:
    """Concatenate the rows, or for down projections the columns, of the shared part and of all experts, in the order of the
    converted model."""
    pieces = []
    for tensor in sorted(group, key=lambda t: "_exps" in t.name):
        data = tensor.data if tensor.tensor_type == kind else quants.dequantize(tensor.data, tensor.tensor_type)
        if (factor := _factor(tensor.name, factors)) != 1:
            data = data * np.float32(factor)
        if len(group) == 1 and data.ndim < 3:
            return data
        if "ffn_down" in name:
            data = np.moveaxis(data, 0, 1).reshape(data.shape[1], -1) if data.ndim == 3 else data
        else:
            data = data.reshape(-1, data.shape[-1])
        pieces.append(data)
    return np.concatenate(pieces, axis=1 if "ffn_down" in name else 0)


def _filled_up(
    name: str, data: Shaped[np.ndarray, ...], size: int, kind: GGMLQuantizationType
) -> Shaped[np.ndarray, ...]:
    """Pad a stored matrix of an MLP with zeros to `size` neurons; zero bytes are zeros in every type."""
    if ".ffn_" not in name or data.ndim < 2:
        return data
    axis = 1 if "ffn_down" in name else 0
    if axis and data.dtype == np.uint8:
        size = quants.quant_shape_to_byte_shape((size,), kind)[0]
    missing = [(0, 0), (0, 0)]
    missing[axis] = (0, size - data.shape[axis])
    return np.pad(data, missing)
