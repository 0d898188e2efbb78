"""Every form of a converted model beside the dense one: difference of logits, size, load time, tokens/s of generation.

One line of Markdown a form, and one of OUT/exports.jsonl. Generation is greedy, one sequence, and taken in turns with the
dense model, so that the ratio holds where the clock is shared; the best of the repeats counts. llama.cpp is another engine:
its ratio compares engines as well as models.

    python benchmarks/exports.py OUT --real DENSE CONVERTED     # a real conversion
    python benchmarks/exports.py OUT --pico                     # every family, a few thousand random weights
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tomoe.config import Recipe
from tomoe.convert import convert
from tomoe.errors import UserError
from tomoe.export import Exported, export, load_moe
from tomoe.loading import load_dense, load_tokenizer
from tomoe.moe.export import TARGETS, Options, gguf_file
from tomoe.report.llama_cpp import LlamaCpp

FORMS = [("hf", "f16"), ("mixtral", "f16"), ("qwen2_moe", "f16"), ("qwen3_moe", "f16"),
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


def opened(done: Exported, dtype: torch.dtype, tokenizer: Any) -> tuple[Any, float]:
    """The export as its users load it, and the seconds that took."""
    began = time.perf_counter()
    if done.choice.target.name == "gguf":
        letter = tokenizer("a", add_special_tokens=False).input_ids[-1]
        model: Any = LlamaCpp(gguf_file(done.folder, done.options), len(tokenizer), 256, letter)
    else:
        model = AutoModelForCausalLM.from_pretrained(done.folder, dtype=dtype).eval()
    return model, time.perf_counter() - began


def speeds(model: Any, dense: Any, ids: torch.Tensor, tokens: int, repeats: int) -> tuple[float, float]:
    """Best tokens a second of the export and of the dense model, in turns."""
    own, theirs = [], []
    for _ in range(repeats):
        if isinstance(model, LlamaCpp):
            began = time.perf_counter()
            model.run(ids[0].tolist(), tokens)
            own.append(tokens / (time.perf_counter() - began))
        else:
            own.append(generated(model, ids, tokens))
        theirs.append(generated(dense, ids, tokens))
    return max(own), max(theirs)


def measure(args: argparse.Namespace, label: str, dense_name: str, folder: Path) -> None:
    dtype = load_moe(folder, None, "cpu").dtype
    dense, tokenizer = load_dense(dense_name, dtype), load_tokenizer(dense_name)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    for name, precision in FORMS:
        wanted = args.forms is None or f"{name} {precision}" in args.forms or name in args.forms
        if not wanted or TARGETS[name].misfit(load_moe(folder, None, "cpu")):
            continue
        out = args.out / "form"
        shutil.rmtree(out, ignore_errors=True)
        try:
            done = export(folder, name, out, tokens=args.tokens, device="cpu", options=Options(precision=precision))
        except UserError as error:
            print(f"| {label} | {name} {precision} | {error} |", flush=True)
            continue
        model, seconds = opened(done, dtype, tokenizer)
        own, theirs = speeds(model, dense, ids, args.new_tokens, args.repeats)
        assert done.proof is not None
        a = done.proof.agreement
        size = sum(
            f.stat().st_size for f in out.iterdir() if f.suffix in (".safetensors", ".gguf") and f.stem != "plan"
        )
        form = f"{name} {precision}" if name == "gguf" else name
        line = {
            "model": label, "form": form, "layout": done.sizes.words, **a.to_dict(), "bytes": size,
            "load_seconds": seconds, "tokens_per_second": own, "dense_tokens_per_second": theirs,
            "threads": torch.get_num_threads(), "dtype": str(dtype).removeprefix("torch."),
        }  # fmt: skip
        with (args.out / "exports.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"| {label} | {form} | {a.largest_difference:.1e} of {a.largest_logit:.0f} | {a.kl:.1e} | {a.top1_agreement:.2%} | "
            f"{size / 1e6:,.3g} MB | {seconds:.2f} s | {own:.1f} | {own / theirs:.2f} |",
            flush=True,
        )
        del model
    shutil.rmtree(args.out / "form", ignore_errors=True)


def pico(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from conftest import FAMILIES
    from pico_files import SMALL, write_pico, write_text
    from test_gguf import TOKENIZER

    text = write_text(args.out / "text.txt")
    for family in FAMILIES:
        place = args.out / family
        window = {"sliding_window": 128} if family == "mistral" else {}  # wide enough for the prompt in llama.cpp
        dense = write_pico(place / "dense", family, vocab_size=len(TOKENIZER), **window)
        TOKENIZER.save_pretrained(dense)
        changes = SMALL | {"train.steps": "0", "experts.num_experts": "4", "experts.attention": "static"}
        overrides = [f"model={dense}", f"data.sources={text}", *(f"{k}={v}" for k, v in changes.items())]
        convert(Recipe.load(None, overrides), place / "moe", force=True)
        measure(args, family, str(dense), place / "moe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pico", action="store_true")
    parser.add_argument("--real", nargs=2, metavar=("DENSE", "CONVERTED"))
    parser.add_argument(
        "--forms", nargs="+", help='of hf, mixtral, qwen2_moe, qwen3_moe, gguf, or one such as "gguf f16"'
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of the proof")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    print("| model | form | largest logit difference | KL | same top-1 | weights | load | tokens/s | of dense |")
    print("|---|---|---|---|---|---|---|---|---|")
    if args.pico:
        pico(args)
    if args.real:
        measure(args, Path(args.real[1]).name, args.real[0], Path(args.real[1]))


if __name__ == "__main__":
    main()
