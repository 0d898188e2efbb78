"""Engines on the CPU: an export beside the dense model, in one run and in turns.

One line of Markdown a cell, and one of RESULTS (JSON lines). vLLM runs eagerly in bfloat16, prompts are random tokens,
every sequence writes NEW_TOKENS. Prefill is the time to the first token of all rows, decoding what the other tokens take on
top; of the repeats the best counts. llama.cpp runs one sequence; its dense model is the same file with shared part and
experts merged into plain MLPs. Run it in the environment of `./run.sh engines`.

    python benchmarks/engines.py RESULTS vllm DENSE EXPORT           # two folders
    python benchmarks/engines.py RESULTS vllm-random FOLDER          # 1B of random weights, made in FOLDER
    python benchmarks/engines.py RESULTS llama.cpp CONVERTED FOLDER  # files made in FOLDER from a converted model
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# The engine in this process: two models take turns.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
NEW_TOKENS = 32
# 1B of random weights: half of the MLP for a token.
RANDOM: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
          "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": 4096}  # fmt: skip
RANDOM_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 48,
    "moe_intermediate_size": 128,
    "n_shared_experts": 16,
    "num_experts_per_tok": 16,
    "head_dim": 64,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 2.0,
    "norm_topk_prob": False,
}

Run = Callable[[int, int, int], float]
"""Seconds for a batch of prompts of a length that write so many tokens each."""


def open_vllm(folder: Path, longest: int) -> Run:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(
        str(folder), dtype="bfloat16", max_model_len=longest, enforce_eager=True, skip_tokenizer_init=True,
        enable_prefix_caching=False, max_num_seqs=32,
    )  # fmt: skip

    def run(batch: int, length: int, new_tokens: int) -> float:
        generator = torch.Generator().manual_seed(length)
        prompts = torch.randint(100, 30_000, (batch, length), generator=generator).tolist()
        greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        engine.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
        return time.perf_counter() - began

    return run


def open_llama_cpp(file: Path, vocab_size: int, longest: int) -> Run:
    from tomoe.exporting.engines import LlamaCpp

    engine = LlamaCpp(file, vocab_size, longest, letter=100)

    def run(batch: int, length: int, new_tokens: int) -> float:
        generator = torch.Generator().manual_seed(length)
        (prompt,) = torch.randint(100, 30_000, (batch, length), generator=generator).tolist()
        began = time.perf_counter()
        engine.run(prompt, new_tokens)
        return time.perf_counter() - began

    return run


def speeds(models: dict[str, Run], batch: int, length: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Tokens a second of each model, in prefill and in decoding; the models take turns."""
    first, whole = ({name: float("inf") for name in models} for _ in range(2))
    for run in models.values():
        run(batch, length, 2)
    for _ in range(repeats):
        for name, run in models.items():
            first[name] = min(first[name], run(batch, length, 1))
        for name, run in models.items():
            whole[name] = min(whole[name], run(batch, length, NEW_TOKENS))
    rest = {name: max(whole[name] - first[name], 1e-9) for name in models}
    return {name: (batch * length / first[name], batch * (NEW_TOKENS - 1) / rest[name]) for name in models}


def table(args: argparse.Namespace, label: str, models: dict[str, Run], batches: list[int]) -> None:
    print(
        "| model | prompt | batch | prefill, dense | of dense | decoding, dense | of dense |\n|---|---|---|---|---|---|---|"
    )
    for length in args.lengths:
        for batch in batches:
            if batch * length > args.most:
                continue
            measured = speeds(models, batch, length, args.repeats)
            (dense_prefill, dense_decode), (prefill, decode) = measured["dense"], measured["export"]
            line: dict[str, Any] = {
                "model": label, "engine": args.engine, "prompt": length, "batch": batch, "new_tokens": NEW_TOKENS,
                "dense_prefill": dense_prefill, "dense_decode": dense_decode, "prefill": prefill, "decode": decode,
                "threads": torch.get_num_threads(), "load": os.getloadavg()[0],
            }  # fmt: skip
            with args.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(
                f"| {label} | {length:,} | {batch} | {dense_prefill:,.0f} | {prefill / dense_prefill:.2f} | "
                f"{dense_decode:,.1f} | {decode / dense_decode:.2f} |",
                flush=True,
            )


def write_random(folder: Path) -> tuple[Path, Path]:
    """A Llama and a Glm4Moe of the same sizes."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    dense, export = folder / "dense", folder / "export"
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    if not (dense / "config.json").exists():
        LlamaForCausalLM(LlamaConfig(**RANDOM, rope_parameters=rope)).save_pretrained(dense)
    if not (export / "config.json").exists():
        sizes = RANDOM | RANDOM_EXPERTS | {"rope_parameters": rope | {"partial_rotary_factor": 1.0}}
        Glm4MoeForCausalLM(Glm4MoeConfig(**sizes)).save_pretrained(export)
    torch.set_default_dtype(torch.float32)
    return dense, export


def write_files(converted: Path, folder: Path, precision: Any) -> tuple[dict[str, Path], int]:
    """The GGUF file of a converted model with fine-grained experts, and the same with plain MLPs: the dense model."""
    from tomoe.exporting.gguf import write_gguf
    from tomoe.exporting.gguf_experts import merge_experts
    from tomoe.model.loading import load_tokenizer
    from tomoe.moe.checkpoint import load_moe

    folder.mkdir(parents=True, exist_ok=True)
    moe, tokenizer = load_moe(converted, None, "cpu"), load_tokenizer(str(converted))
    files = {name: folder / f"{name}-{precision}.gguf" for name in ("dense", "export")}
    write_gguf(moe, tokenizer, files["export"], precision, 1)
    merge_experts(files["export"], files["dense"])
    return files, moe.config.vocab_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("engine", choices=["vllm", "vllm-random", "llama.cpp"])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--label")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--most", type=int, default=8192, help="Most tokens of all prompts together.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", default="q8_0")
    args = parser.parse_args()
    longest = max(args.lengths) + NEW_TOKENS
    if args.engine == "llama.cpp":
        converted, folder = args.paths
        files, vocab_size = write_files(converted, folder, args.precision)
        models = {name: open_llama_cpp(file, vocab_size, longest) for name, file in files.items()}
        args.batches = [1]
    else:
        dense, export = write_random(*args.paths) if args.engine == "vllm-random" else args.paths
        # the first one sets up what experts need
        opened = open_vllm(export, longest)
        models = {"dense": open_vllm(dense, longest), "export": opened}
    table(args, args.label or args.paths[-1].name, models, args.batches)


if __name__ == "__main__":
    main()
