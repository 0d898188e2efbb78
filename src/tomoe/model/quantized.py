"""Quantizes the frozen base to 8 or 4 bits for training, by bitsandbytes through transformers' own config.

Only the projections within the layers are quantized, not embeddings and output matrix. Carving, planning, hashing and
folding always use the original weights.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from tomoe.errors import UserError
from tomoe.version import install_extra

UNQUANTIZED = ["lm_head"]
BITS = {"int8": 8, "nf4": 4}


def available() -> bool:
    return find_spec("bitsandbytes") is not None


def quantization_config(quantization: str, dtype: torch.dtype) -> Any:
    """transformers' config for int8 or nf4, computing in `dtype`. Raises UserError if bitsandbytes is missing.

    int8: LLM.int8 (arXiv 2208.07339), which rounds activations too; nf4: NF4 with double quantization (arXiv 2305.14314).
    """
    if not available():
        raise UserError(f"train.quantization = {quantization} needs bitsandbytes; {install_extra('quantized')}")
    # it warns at every product that activations are rounded, which int8 is meant to do
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=UNQUANTIZED)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=UNQUANTIZED,
    )


def keep_differentiable_(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking weights: on CPUs with bfloat16 units it (0.50) does so for good at the first pass
    without gradients, and all later gradients through them would silently be zero."""
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
