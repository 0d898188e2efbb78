"""Engines on the CPU: an export beside the dense model, in one run and in turns.

One line of Markdown a cell, and one of RESULTS (JSON lines). vLLM runs eagerly in bfloat16, every sequence writes
NEW_TOKENS. Prompts are pieces of `--text`, without it random tokens: text is what routers were made for. Prefill is the time
to the first token of all rows, decoding what the other tokens take on top; of the repeats the best counts. With
`--clock cpu` seconds of this process's processor time count, for one thread on a machine that does other work too. Memory is
what the process grew by when a model was opened. llama.cpp runs one sequence; its dense model is the same file with shared
part and experts merged into plain MLPs. Run it in the environment of `./run.sh engines`.

    python benchmarks/engines.py RESULTS vllm DENSE EXPORT           # two folders
    python benchmarks/engines.py RESULTS vllm-random FOLDER          # a shape of random weights, made in FOLDER
    python benchmarks/engines.py RESULTS llama.cpp CONVERTED FOLDER  # files made in FOLDER from a converted model
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

# The engine in this process: two models take turns.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
NEW_TOKENS = 32
COMMON: dict[str, Any] = {"vocab_size": 32_000, "max_position_embeddings": 4096, "num_attention_heads": 32}
# Random weights: of a 1B, and four layers of LLaMA-2-7B's width.
RANDOM: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8} | COMMON,
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4, "num_key_value_heads": 32} | COMMON,
}
# What their experts have in common; sizes come from --layout.
RANDOM_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 2.0,
    "norm_topk_prob": False,
}

Run = Callable[[int, int, int], float]
"""Seconds for a batch of prompts of a length that write so many tokens each."""
Prompts = Callable[[int, int], list[list[int]]]
"""So many prompts of so many tokens."""


def make_prompts(text: Path | None, tokenizer_folder: Path) -> Prompts:
    """Prompts of pieces of a text that lie evenly over it, or of random tokens."""
    if text is None:
        return lambda batch, length: torch.randint(
            100, 30_000, (batch, length), generator=torch.Generator().manual_seed(length)
        ).tolist()
    from tomoe.model.loading import load_tokenizer

    ids = load_tokenizer(str(tokenizer_folder))(text.read_text(encoding="utf-8"), verbose=False)["input_ids"]

    def pieces(batch: int, length: int) -> list[list[int]]:
        step = (len(ids) - length) // batch
        return [list(ids[i * step : i * step + length]) for i in range(batch)]

    return pieces


def open_vllm(folder: Path, longest: int, prompts: Prompts, clock: Callable[[], float]) -> Run:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(
        str(folder), dtype="bfloat16", max_model_len=longest, enforce_eager=True, skip_tokenizer_init=True,
        enable_prefix_caching=False, max_num_seqs=32,
    )  # fmt: skip

    def run(batch: int, length: int, new_tokens: int) -> float:
        greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": ids} for ids in prompts(batch, length)]
        began = clock()
        engine.generate(requests, greedy, use_tqdm=False)
        return clock() - began

    return run


def open_llama_cpp(file: Path, vocab_size: int, longest: int, prompts: Prompts, clock: Callable[[], float]) -> Run:
    from tomoe.exporting.engines import LlamaCpp

    engine = LlamaCpp(file, vocab_size, longest, letter=100)

    def run(batch: int, length: int, new_tokens: int) -> float:
        (prompt,) = prompts(batch, length)
        began = clock()
        engine.run(prompt, new_tokens)
        return clock() - began

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


def measured_open(open_model: Callable[[], Run], grown: list[int]) -> Run:
    """Open a model, and note by how many bytes the process grew."""
    import psutil  # type: ignore[import-untyped]

    before = psutil.Process().memory_info().rss
    run = open_model()
    grown.append(psutil.Process().memory_info().rss - before)
    return run


def table(args: argparse.Namespace, label: str, models: dict[str, Run], batches: list[int], memory: list[int]) -> None:
    """Measure every cell; `memory` is that of the dense model and of the export."""
    print(
        "| model | prompt | batch | first token, dense (s) | export (s) | prefill of dense | decoding, dense (tokens/s) | "
        "export | of dense |\n|---|---|---|---|---|---|---|---|---|"
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
                "dense_memory": memory[0], "memory": memory[1], "clock": args.clock, "text": bool(args.text),
                "threads": torch.get_num_threads(), "load": os.getloadavg()[0],
            }  # fmt: skip
            with args.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(
                f"| {label} | {length:,} | {batch} | {batch * length / dense_prefill:.2f} | {batch * length / prefill:.2f} | "
                f"{prefill / dense_prefill:.2f} | {dense_decode:,.1f} | {decode:,.1f} | {decode / dense_decode:.2f} |",
                flush=True,
            )


def write_random(folder: Path, shape: str, layout: list[int]) -> tuple[Path, Path]:
    """A Llama and a Glm4Moe of the same sizes; `layout` is experts, width of one, experts of a token, shared neurons."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM

    rope, sizes = {"rope_type": "default", "rope_theta": 10_000.0}, RANDOM[shape]
    experts, width, top_k, shared = layout
    # the dense MLP, divided: nothing else would be beside it
    assert shared % width == 0, "the shared part is a multiple of the expert width"
    assert shared + experts * width == sizes["intermediate_size"], "the neurons of the layout are not those of the MLP"
    chosen = {"n_routed_experts": experts, "moe_intermediate_size": width, "num_experts_per_tok": top_k,
              "n_shared_experts": shared // width, "head_dim": sizes["hidden_size"] // 32,
              "rope_parameters": rope | {"partial_rotary_factor": 1.0}}  # fmt: skip
    dense, export = folder / f"dense-{shape}", folder / f"export-{shape}-{experts}x{width}-{top_k}-{shared}"
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    if not (dense / "config.json").exists():
        LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope)).save_pretrained(dense)
    if not (export / "config.json").exists():
        Glm4MoeForCausalLM(Glm4MoeConfig(**sizes | RANDOM_EXPERTS | chosen)).save_pretrained(export)
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
    parser.add_argument("--text", type=Path, help="Text for prompts; without it they are random tokens.")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--shape", choices=sorted(RANDOM), default="1b", help="Of random weights.")
    parser.add_argument(
        "--layout", type=int, nargs=4, default=[48, 128, 16, 2048], metavar=("E", "WIDTH", "K", "SHARED")
    )
    args = parser.parse_args()
    longest = max(args.lengths) + NEW_TOKENS
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    memory: list[int] = []
    models: dict[str, Run] = {}
    if args.engine == "llama.cpp":
        converted, folder = args.paths
        files, vocab_size = write_files(converted, folder, args.precision)
        prompts = make_prompts(args.text, converted)
        for name, file in files.items():
            opened = partial(open_llama_cpp, file, vocab_size, longest, prompts, clock)
            models[name] = measured_open(opened, memory)
        args.batches = [1]
    else:
        if args.engine == "vllm-random":
            dense, export = write_random(args.paths[0], args.shape, args.layout)
        else:
            dense, export = args.paths
        prompts = make_prompts(args.text, export)
        # the export is the first: it sets up what experts need
        opened_models = [
            measured_open(partial(open_vllm, folder, longest, prompts, clock), memory) for folder in (export, dense)
        ]
        models = {"dense": opened_models[1], "export": opened_models[0]}
        memory.reverse()
        args.label = args.label or export.name
    table(args, args.label or args.paths[-1].name, models, args.batches, memory)


if __name__ == "__main__":
    main()
