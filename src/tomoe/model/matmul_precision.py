"""Matrix products of activations that were rounded to bfloat16 before: matrix units may take them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch


@contextmanager
def rounded_products(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block float32 products may round their factors, not their sums, if `dtype` is bfloat16.

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
