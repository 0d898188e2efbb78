"""Perplexity of a model, converted or dense, in bfloat16 and under quantizers that transformers applies on loading.

LLM.int8 of bitsandbytes rounds activations, too; "int8 weights" has the same rounded weights, multiplied in bfloat16.
torchao and quanto run if they are installed: pip install torchao optimum-quanto

python benchmarks/quantizers.py MODEL --text FILE [--only NAME ...] [--tokens 1024] [--context 512]
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    QuantoConfig,
    TorchAoConfig,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

import tomoe.moe.registration  # noqa: F401  (the architecture, without trust_remote_code)
from tomoe.data.evaluation_text import read_text
from tomoe.evaluation.perplexity import measure
from tomoe.files import format_bytes
from tomoe.model.loading import load_tokenizer


def torchao_config(kind: str) -> TorchAoConfig:
    from torchao import quantization

    return TorchAoConfig(getattr(quantization, kind)())


CONFIGS: dict[str, Callable[[], QuantizationConfigMixin | None]] = {
    "bfloat16": lambda: None,
    "LLM.int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "int8 weights": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao int8 weights": lambda: torchao_config("Int8WeightOnlyConfig"),
    "torchao int8 weights and activations": lambda: torchao_config("Int8DynamicActivationInt8WeightConfig"),
    "quanto int8": lambda: QuantoConfig(weights="int8"),
    "quanto int4": lambda: QuantoConfig(weights="int4"),
    "nf4": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    ),
}


def load(model: str, name: str) -> PreTrainedModel:
    config = CONFIGS[name]()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, quantization_config=config).eval()
    return loaded.dequantize() if name == "int8 weights" else loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--only", nargs="+", choices=list(CONFIGS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tokenizer = load_tokenizer(given.model)
    text = read_text(given.text, tokenizer, given.context, given.tokens).sequences
    for name in given.only or CONFIGS:
        try:
            model = load(given.model, name)
        except ImportError as error:
            print(f"{name}: not installed ({str(error).splitlines()[0]})", flush=True)
            continue
        dtypes = Counter(str(p.dtype) for n, p in model.named_parameters() if "router." in n)
        found = measure(model, text.input_ids, text.mask)
        size = format_bytes(model.get_memory_footprint())
        print(
            f"{name}: {size}, perplexity {found.perplexity:.3f} on {found.tokens} tokens; routers {dict(dtypes)}",
            flush=True,
        )
        ids = tokenizer("Once upon a time", return_tensors="pt")
        out = cast(Any, model).generate(**ids, max_new_tokens=20, do_sample=False)
        print(f"{name} writes: {tokenizer.decode(out[0])!r}", flush=True)


if __name__ == "__main__":
    main()
