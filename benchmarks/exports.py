"""Exports beside the dense model: difference of logits, size, load time, tokens/s of generation.

One line of Markdown an export, and one of RESULTS (JSON lines). Generation is greedy, one sequence, and taken in turns with
the dense model, so that the ratio holds where the clock is shared; the best of the repeats counts. llama.cpp is another
engine: its ratio compares engines as well as models.

    python benchmarks/exports.py RESULTS --real DENSE EXPORT...    # folders that `tomoe export` wrote
    python benchmarks/exports.py RESULTS --pico FOLDER             # every family, a few thousand random weights
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tomoe.conversion import convert
from tomoe.exporting.gguf.llama_cpp import LlamaCpp
from tomoe.exporting.run import export
from tomoe.exporting.target import Options, Precision
from tomoe.exporting.targets import TARGETS
from tomoe.model.loading import load_dense, load_tokenizer
from tomoe.moe.checkpoint import load_moe
from tomoe.recipe.conversion import Recipe

FORMS: list[tuple[str, Precision]] = [("hf", "f16"), ("mixtral", "f16"), ("qwen2_moe", "f16"), ("qwen3_moe", "f16"),
         ("gguf", "f32"), ("gguf", "f16"), ("gguf", "q8_0")]  # fmt: skip
PROMPT = "The old boat went over the sea, and"


def generated(model: Any, ids: torch.Tensor, tokens: int) -> float:
    """Tokens a second."""
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    return tokens / (time.perf_counter() - began)


def opened(folder: Path, dtype: torch.dtype, tokenizer: Any) -> tuple[Any, float]:
    """The export as its users load it, and the seconds that took."""
    began = time.perf_counter()
    files = list(folder.glob("*.gguf"))
    if files:
        letter = tokenizer("a", add_special_tokens=False).input_ids[-1]
        model: Any = LlamaCpp(files[0], len(tokenizer), 256, letter)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model, time.perf_counter() - began


def speeds(model: Any, dense: Any, ids: torch.Tensor, tokens: int, repeats: int) -> tuple[float, float]:
    """Best tokens a second of the export and of the dense model, in turns."""
    speeds_of_export, speeds_of_dense = [], []
    for _ in range(repeats):
        if isinstance(model, LlamaCpp):
            began = time.perf_counter()
            model.run(ids[0].tolist(), tokens)
            speeds_of_export.append(tokens / (time.perf_counter() - began))
        else:
            speeds_of_export.append(generated(model, ids, tokens))
        speeds_of_dense.append(generated(dense, ids, tokens))
    return max(speeds_of_export), max(speeds_of_dense)


def measure(args: argparse.Namespace, label: str, dense_name: str, folder: Path, dtype: torch.dtype) -> None:
    metadata = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    dense, tokenizer = load_dense(dense_name, dtype), load_tokenizer(dense_name)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    model, seconds = opened(folder, dtype, tokenizer)
    speed, dense_speed = speeds(model, dense, ids, args.new_tokens, args.repeats)
    proof = metadata["proof"]
    size = sum(f.stat().st_size for f in folder.iterdir() if f.suffix in (".safetensors", ".gguf"))
    form = metadata["target"] + (f" {metadata['options']['precision']}" if metadata["target"] == "gguf" else "")
    line = {
        "model": label, "form": form, "layout": metadata["layout"], **proof, "bytes": size, "load_seconds": seconds,
        "tokens_per_second": speed, "dense_tokens_per_second": dense_speed, "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    with args.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(
        f"| {label} | {form} | {proof['largest_difference']:.1e} of {proof['largest_logit']:.0f} | {proof['kl']:.1e} | "
        f"{proof['top1_agreement']:.1%} | {size / 1e6:,.3g} MB | {seconds:.2f} s | {speed:.1f} | {speed / dense_speed:.2f} |",
        flush=True,
    )


def pico(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from conftest import FAMILIES
    from pico_files import SMALL, write_pico, write_text
    from pico_tokenizer import make_tokenizer

    # llama.cpp wants a tokenizer with merges
    tokenizer = make_tokenizer(opens_with_bos=True, merges=[("t", "h"), ("th", "e"), ("Ġ", "the")])
    args.pico.mkdir(parents=True)
    text = write_text(args.pico / "text.txt")
    for family in FAMILIES:
        place = args.pico / family
        window = {"sliding_window": 128} if family == "mistral" else {}  # wide enough for the prompt in llama.cpp
        dense = write_pico(place / "dense", family, vocab_size=len(tokenizer), **window)
        tokenizer.save_pretrained(dense)
        changes = SMALL | {
            "train.steps": "0",
            "experts.num_experts": "4",
            "attention.pruning": "static",
            "repair.mode": "none",
        }
        overrides = [f"model={dense}", f"data.sources={text}", *(f"{k}={v}" for k, v in changes.items())]
        convert(Recipe.load(None, overrides), place / "moe")
        for name, precision in FORMS:
            out = place / f"{name}-{precision}"
            if TARGETS[name].supports(load_moe(place / "moe", None, "cpu")) is None:
                export(place / "moe", name, out, device="cpu", options=Options(precision=precision))
                measure(args, family, str(dense), out, torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--pico", type=Path, metavar="FOLDER")
    parser.add_argument("--real", nargs="+", metavar=("DENSE", "EXPORT"))
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print("| model | form | largest difference | KL | same top-1 | weights | load | tokens/s | of dense |")
    print("|---|---|---|---|---|---|---|---|---|")
    if args.pico:
        pico(args)
    for folder in args.real[1:] if args.real else ():
        measure(args, Path(folder).name, args.real[0], Path(folder), torch.bfloat16)


if __name__ == "__main__":
    main()
