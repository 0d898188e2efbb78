"""Engines on the CPU: exports beside the dense model, in one run and in turns.

One line of Markdown a cell, and one of RESULTS (JSON lines). vLLM runs eagerly, every sequence writes NEW_TOKENS. Prompts are
pieces of `--text`, without it random tokens: text is what routers were made for. Prefill is the time until all rows have
their first token; decoding is the median step after that. All models take turns; what is told is the median of the repeats
and, in brackets, the lowest and the highest ratio of an export to the dense model in the same repeat. With `--clock cpu`
seconds of this process's processor time count, for one thread on a machine that does other work too. Memory is what the
process grew by when a model was opened. In llama.cpp the rows come from as many clients at once, and decoding is what
NEW_TOKENS take longer than one; its dense model is the same file with shared part and experts merged into plain MLPs. Run it
in the environment of `./run.sh engines`.

    python benchmarks/engines.py RESULTS vllm DENSE EXPORT           # two folders
    python benchmarks/engines.py RESULTS vllm-random FOLDER          # a shape of random weights, made in FOLDER
    python benchmarks/engines.py RESULTS llama.cpp CONVERTED FOLDER  # files made in FOLDER from a converted model
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

# The engine in this process: two models take turns.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
NEW_TOKENS = 16
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

# Half of an MLP of 8,192 neurons: experts, width of one, experts of a token, shared neurons.
DEFAULT_LAYOUT = [48, 128, 16, 2048]
# Random prompts take the first tokens of a vocabulary.
FEWEST_TOKENS = 2_000
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}

Run = Callable[[int, int], tuple[float, float]]
"""Seconds until all rows of a batch of prompts of a length have their first token, and of a step after that."""
Prompts = Callable[[int, int], list[list[int]]]
"""So many prompts of so many tokens."""


def make_prompts(text: Path | None, tokenizer_folder: Path) -> Prompts:
    """Prompts of pieces of a text that lie evenly over it, or of random tokens."""
    if text is None:
        return lambda batch, length: torch.randint(
            100, FEWEST_TOKENS, (batch, length), generator=torch.Generator().manual_seed(length)
        ).tolist()
    from tomoe.model.loading import load_tokenizer

    ids = load_tokenizer(str(tokenizer_folder))(text.read_text(encoding="utf-8"), verbose=False)["input_ids"]

    def pieces(batch: int, length: int) -> list[list[int]]:
        step = (len(ids) - length) // batch
        return [list(ids[i * step : i * step + length]) for i in range(batch)]

    return pieces


def open_vllm(folder: Path, dtype: str, longest: int, prompts: Prompts, clock: Callable[[], float]) -> Run:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(
        str(folder), dtype=dtype, max_model_len=longest, enforce_eager=True, skip_tokenizer_init=True,
        enable_prefix_caching=False, max_num_seqs=32,
    ).llm_engine  # fmt: skip
    numbers = itertools.count()
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)

    def run(batch: int, length: int) -> tuple[float, float]:
        for ids in prompts(batch, length):
            engine.add_request(f"{folder}-{next(numbers)}", {"prompt_token_ids": ids}, greedy)
        began, steps, first = clock(), [], 0.0
        started: set[str] = set()
        while engine.has_unfinished_requests():
            step_began = clock()
            started.update(output.request_id for output in engine.step())
            if first:
                steps.append(clock() - step_began)
            elif len(started) == batch:
                first = clock() - began
        return first, statistics.median(steps)

    return run


def open_llama_cpp(
    file: Path, vocab_size: int, longest: int, rows: int, prompts: Prompts, clock: Callable[[], float]
) -> Run:
    from tomoe.exporting.gguf.llama_cpp import LlamaCpp

    engine = LlamaCpp(file, vocab_size, rows * longest, letter=100, rows=rows, exact=False)

    def write(batch: int, length: int, tokens: int) -> float:
        began = clock()
        with ThreadPoolExecutor(batch) as clients:
            list(clients.map(lambda prompt: engine.run(prompt, tokens), prompts(batch, length)))
        return clock() - began

    def run(batch: int, length: int) -> tuple[float, float]:
        first = write(batch, length, 1)
        return first, max(write(batch, length, NEW_TOKENS) - first, 1e-9) / (NEW_TOKENS - 1)

    return run


def measure(models: dict[str, Run], batch: int, length: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of prefill and of a step, of each model and repeat; the models take turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for repeat in range(repeats + 1):
        for name, run in models.items():
            measured = run(batch, length)
            # the first round warms up
            if repeat:
                times[name].append(measured)
    return times


def table(args: argparse.Namespace, models: dict[str, Run], memory: dict[str, int]) -> None:
    """Measure every cell; the dense model is the first."""
    dense, *exports = models
    print(
        "| prompts | export | first token, dense (s) | export (s) | prefill of dense | decoding, dense (tokens/s) | "
        "export | of dense |\n|---|---|---|---|---|---|---|---|"
    )
    for length, batch in itertools.product(args.lengths, args.batches):
        if batch * length > args.most:
            continue
        times = measure(models, batch, length, args.repeats)
        for name in exports:
            line: dict[str, Any] = {
                "model": name, "engine": args.engine, "prompt": length, "batch": batch, "new_tokens": NEW_TOKENS,
                "dense": times[dense], "export": times[name], "dense_memory": memory[dense], "memory": memory[name],
                "clock": args.clock, "dtype": args.dtype, "text": bool(args.text), "threads": torch.get_num_threads(),
                "load": os.getloadavg()[0],
            }  # fmt: skip
            with args.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(cell(f"{batch} x {length:,} | {name}", batch, times[dense], times[name]), flush=True)


def cell(label: str, batch: int, dense: list[tuple[float, float]], export: list[tuple[float, float]]) -> str:
    """A line of the table: medians, and how far the ratios of single repeats are from each other."""
    words = []
    for part in (0, 1):
        ratios = sorted(d[part] / e[part] for d, e in zip(dense, export, strict=True))
        medians = [statistics.median(t[part] for t in times) for times in (dense, export)]
        shown = [f"{m:.2f}" if part == 0 else f"{batch / m:,.1f}" for m in medians]
        words += [*shown, f"**{statistics.median(ratios):.2f}** ({ratios[0]:.2f}-{ratios[-1]:.2f})"]
    return f"| {label} | {' | '.join(words)} |"


def shortened(sizes: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """The sizes with so many layers, and a vocabulary as much smaller: the output matrix keeps its share of the time."""
    whole = sizes["num_hidden_layers"]
    layers = layers or whole
    return sizes | {"num_hidden_layers": layers, "vocab_size": sizes["vocab_size"] * layers // whole}


def write_random(folder: Path, make: Callable[[], Any]) -> Path:
    """A model of random weights in bfloat16, unless the folder is there."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        make().save_pretrained(folder)
        torch.set_default_dtype(torch.float32)
    return folder


def write_dense(folder: Path, sizes: dict[str, Any]) -> Path:
    """A Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dense = folder / f"dense-{sizes['hidden_size']}-{sizes['num_hidden_layers']}"
    return write_random(dense, lambda: LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=ROPE)))


def write_export(folder: Path, sizes: dict[str, Any], layout: list[int]) -> Path:
    """A Glm4Moe of the same sizes; `layout` is experts, width of one, experts of a token, shared neurons."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    experts, width, top_k, shared = layout
    # the dense MLP, divided: nothing else would be beside it
    assert shared + experts * width == sizes["intermediate_size"], "the neurons of the layout are not those of the MLP"
    # the shared part is stored as a multiple of the expert width, as an export stores it
    chosen = {
        "n_routed_experts": experts,
        "moe_intermediate_size": width,
        "num_experts_per_tok": top_k,
        "n_shared_experts": -(-shared // width),
        "head_dim": sizes["hidden_size"] // 32,
        "rope_parameters": ROPE | {"partial_rotary_factor": 1.0},
    }
    export = folder / f"{experts}x{width}-{top_k}-{shared}-{sizes['hidden_size']}-{sizes['num_hidden_layers']}"
    return write_random(export, lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**sizes | RANDOM_EXPERTS | chosen)))


def write_files(converted: Path, folder: Path, precision: Any) -> tuple[dict[str, Path], int]:
    """The GGUF file of a converted model with fine-grained experts, and the same with plain MLPs: the dense model.

    What an earlier run has written is used again.
    """
    from tomoe.exporting.gguf.experts import merge_experts
    from tomoe.exporting.gguf.target import write_gguf
    from tomoe.model.loading import load_config, load_tokenizer
    from tomoe.moe.checkpoint import load_moe

    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}-{precision}.gguf" for name in ("dense", "export")}
    if not files["dense"].exists():
        moe, tokenizer = load_moe(converted, None, "cpu"), load_tokenizer(str(converted))
        write_gguf(moe, tokenizer, files["export"], precision, 1)
        merge_experts(files["export"], files["dense"])
    return files, load_config(str(converted)).vocab_size


def open_models(args: argparse.Namespace, clock: Callable[[], float]) -> tuple[dict[str, Run], dict[str, int]]:
    """The dense model and the exports, opened, and by how many bytes the process grew for each."""
    longest = max(args.lengths) + NEW_TOKENS
    opens: dict[str, Callable[[], Run]]
    if args.engine == "llama.cpp":
        converted, folder = args.paths
        files, vocab_size = write_files(converted, folder, args.precision)
        prompts, rows = make_prompts(args.text, converted), max(args.batches)
        opens = {
            name: partial(open_llama_cpp, file, vocab_size, longest, rows, prompts, clock)
            for name, file in files.items()
        }
    else:
        if args.engine == "vllm-random":
            sizes = shortened(RANDOM[args.shape], args.layers)
            dense = write_dense(args.paths[0], sizes)
            exports = [write_export(args.paths[0], sizes, layout) for layout in args.layout or [DEFAULT_LAYOUT]]
        else:
            dense, *exports = args.paths
        prompts = make_prompts(args.text, dense)
        # an export is the first: it sets up what experts need
        opens = {path.name: partial(open_vllm, path, args.dtype, longest, prompts, clock) for path in (*exports, dense)}
    opened, memory = {}, {}
    process = psutil.Process()
    for name, open_model in opens.items():
        before = process.memory_info().rss
        opened[name] = open_model()
        memory[name] = process.memory_info().rss - before
    first = "dense" if args.engine == "llama.cpp" else dense.name
    return {name: opened[name] for name in sorted(opened, key=lambda name: name != first)}, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("engine", choices=["vllm", "vllm-random", "llama.cpp"])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--most", type=int, default=8192, help="Most tokens of all prompts together.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", help="Of the models in vLLM.")
    parser.add_argument("--precision", default="q8_0", help="Of the files for llama.cpp.")
    parser.add_argument("--text", type=Path, help="Text for prompts; without it they are random tokens.")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--shape", choices=sorted(RANDOM), default="1b", help="Of random weights.")
    parser.add_argument("--layers", type=int, help="Of random weights, instead of the shape's.")
    parser.add_argument(
        "--layout", type=int, nargs=4, action="append", metavar=("E", "WIDTH", "K", "SHARED"), help="May be repeated."
    )
    args = parser.parse_args()
    models, memory = open_models(args, time.process_time if args.clock == "cpu" else time.perf_counter)
    table(args, models, memory)


if __name__ == "__main__":
    main()
