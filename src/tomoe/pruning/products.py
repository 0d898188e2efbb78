"""Matrix products of activations that were rounded to bfloat16 before: the processor's units for it may take them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def rounded_products(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block float32 products on the CPU may round their factors, not their sums, if `dtype` is bfloat16.

    That is what activations were computed in: rounding them once more changes little, and a Gram matrix of rounded
    activations is one all the same. Matrix units take a tenth of the time.
    """
    backend: Any = torch.backends.mkldnn
    settings = backend.matmul
    before = settings.fp32_precision
    try:
        if dtype == torch.bfloat16:
            settings.fp32_precision = "bf16"
        yield
    finally:
        settings.fp32_precision = before
