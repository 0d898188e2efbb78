"""The frozen base in 8 or 4 bits, for learning: bitsandbytes and torchao, through transformers' own configs.

Only the projections within the layers are packed; embeddings and output matrix stay as they are. What comes out of
learning is about the original weights: they alone are carved from, planned for, hashed and folded.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from tomoe.errors import UserError

KEPT = ["lm_head"]
BITS = {"bnb8": 8, "bnb4": 4, "torchao8": 8}
_LIBRARY = {
    "bnb8": ("bitsandbytes", "quantized"),
    "bnb4": ("bitsandbytes", "quantized"),
    "torchao8": ("torchao", "torchao"),
}


def available(base: str) -> bool:
    """Whether the library behind a quantised base is installed."""
    return find_spec(_LIBRARY[base][0]) is not None


def quantization_config(base: str, dtype: torch.dtype) -> Any:
    """transformers' config for a base of that name, computing in `dtype`. Raises UserError where its library is missing.

    bnb8: LLM.int8 (arXiv 2208.07339), whose activations are rounded too; bnb4: NF4 with double quantisation (arXiv
    2305.14314); torchao8: weights alone, one scale a row.
    """
    library, extra = _LIBRARY[base]
    if not available(base):
        raise UserError(f"train.base = {base} needs {library}; install it with: pip install 'tomoe-llm[{extra}]'")
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if base == "torchao8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=KEPT)
    # it says at every product that activations are rounded, which is what was asked for
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if base == "bnb8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=KEPT)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=KEPT,
    )  # fmt: skip


def keep_differentiable_(model: nn.Module) -> None:
    """No repacking on the way: gradients have to come through.

    On CPUs with bfloat16 units, bitsandbytes (0.50) repacks 4-bit weights for good at the first pass without gradients, and
    its product of what comes out has no backward pass: all later gradients through it would be zero, in silence.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
