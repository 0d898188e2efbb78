"""Perplexity of a model, converted or dense, under bitsandbytes: bfloat16, 8 bits, 4 bits; and some text from 4 bits.

LLM.int8 rounds activations, too. A second row of 8 bits has the same weights, rounded, but multiplies in bfloat16.

python benchmarks/quantizers.py MODEL --text FILE [--tokens 1024] [--context 512]
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections import Counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import tomoe.moe.registration  # noqa: F401  (the architecture, without trust_remote_code)
from tomoe.data.evaluation_text import read_text
from tomoe.evaluation.perplexity import measure
from tomoe.model.loading import load_tokenizer

CONFIGS = {
    "bfloat16": None,
    "8 bits (LLM.int8)": BitsAndBytesConfig(load_in_8bit=True),
    "8 bits, weights alone": BitsAndBytesConfig(load_in_8bit=True),
    "4 bits (nf4)": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--context", type=int, default=512)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    text = read_text(given.text, load_tokenizer(given.model), given.context, given.tokens).sequences
    for name, config in CONFIGS.items():
        model = AutoModelForCausalLM.from_pretrained(
            given.model, dtype=torch.bfloat16, quantization_config=config
        ).eval()
        if name.endswith("alone"):
            model = model.dequantize()
        dtypes = Counter(str(p.dtype) for n, p in model.named_parameters() if "router." in n)
        found = measure(model, text.input_ids, text.mask)
        print(f"{name}: perplexity {found.perplexity:.3f} on {found.tokens} tokens; routers {dict(dtypes)}", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = tokenizer("Once upon a time", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=20, do_sample=False)
    print(f"{name} writes: {tokenizer.decode(out[0])!r}")


if __name__ == "__main__":
    main()
