"""The dtype in which weights and activations are multiplied, which may differ from the stored one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tomoe.errors import UserError

# names of `torch.cpu.get_capabilities`: x86 and ARM
_BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
DTYPES = ("float32", "bfloat16", "float16")


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """Return the dtype of this name, or the dtype itself. Raises UserError for any that weights cannot have."""
    plain = str(name).removeprefix("torch.")
    if plain not in DTYPES:
        raise UserError(f"dtype is {plain!r}, but it should be one of {', '.join(DTYPES)}")
    return getattr(torch, plain)


def compute_dtype(setting: str, stored: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype to compute in: `setting` is stored, float32, or auto, which is float32 for bfloat16 weights on a processor
    without bfloat16 instructions: matrix products of hundreds of tokens take a quarter of the time there."""
    if setting == "float32":
        return torch.float32
    processor = torch.cpu.get_capabilities()
    multiplies = any(processor.get(name, False) for name in _BFLOAT16_INSTRUCTIONS)
    emulated = stored == torch.bfloat16 and torch.device(device).type == "cpu" and not multiplies
    return torch.float32 if setting == "auto" and emulated else stored


def reads_slowly(model: PreTrainedModel) -> bool:
    """Whether this processor emulates the dtype, so that linear layers are slow on long prompts. Converted ones are not."""
    emulates = compute_dtype("auto", model.dtype, str(model.device)) != model.dtype
    output = model.get_output_embeddings()
    return emulates and any(type(module) in (nn.Linear, Conv1D) for module in model.modules() if module is not output)


@contextmanager
def rounded_products(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block float32 matrix products may round their factors, not their sums, if `dtype` is bfloat16.

    That is what activations were computed in: rounding them once more changes little, and a Gram matrix of rounded
    activations is one all the same. Matrix units take a tenth of the time. If `dtype` is another one, a GPU rounds nothing
    either, whatever the process allows it elsewhere.
    """
    cpu, gpu = cast(Any, torch.backends.mkldnn).matmul, cast(Any, torch.backends.cuda).matmul
    before = cpu.fp32_precision, gpu.fp32_precision
    try:
        if dtype == torch.bfloat16:
            cpu.fp32_precision = "bf16"
        gpu.fp32_precision = "tf32" if dtype == torch.bfloat16 else "ieee"
        yield
    finally:
        cpu.fp32_precision, gpu.fp32_precision = before
