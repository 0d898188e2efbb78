"""What a user would take instead: milliseconds a token, and bytes read for it, of one sequence in all of them.

The dense model as transformers loads it, in bfloat16 and in float32; each converted folder as it is and, where tokens choose,
with everything in the same kernel, which tells what the kernel gives from what the choice gives; and GGUF files in llama.cpp.
All are opened at once and take turns: a prompt of so many tokens of the text, then TOKENS more. Processor seconds on one
thread, of a token and of the prompt, are told as the median of the rounds and, in brackets, the lowest and the highest. One
line of Markdown a row and prompt, and RESULTS in JSON, where rows of other names stay. With --problems the GGUF files also
solve HumanEval, as `tomoe evaluate` lets models in PyTorch do, and RESULTS keep how many they solve: in a call of their own,
without TEXT, so that nothing is timed meanwhile.

    python benchmarks/rivals.py RESULTS DENSE --text TEXT [--folder NAME=FOLDER[@ACTIVE]] [--gguf NAME=FILE] [--rounds 9]
        [--prompts 128,1024]
    python benchmarks/rivals.py RESULTS DENSE --problems FOLDER [--solve 41] --gguf NAME=FILE
    python benchmarks/rivals.py RESULTS --draw FOLDER --headline HEADLINE    # HumanEval over milliseconds a token
    python benchmarks/rivals.py --write Q8_0 FILE OUT    # the weights of a GGUF file in 8 bits, or BF16, F16

The figure takes problems that models in PyTorch solve from the results of headline.py, where a row is called "MODEL NAME".
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants
from torch import Tensor
from transformers import AutoModelForCausalLM

import tomoe
from tomoe.evaluation.speed import throughput
from tomoe.evaluation.speed.same_kernel import backends_of, run_everything, set_to
from tomoe.evaluation.speed.throughput import in_own_memory, prefill
from tomoe.evaluation.writing import humaneval
from tomoe.evaluation.writing.run import ProgramTask, load_task
from tomoe.exporting.gguf.llama_cpp import LlamaCpp
from tomoe.files import format_bytes
from tomoe.model.generation import asked
from tomoe.model.loading import load_tokenizer
from tomoe.report.style import COLORS, MARKERS, CaptionedFigure, canvas, save, styled

TOKENS = 8
SAME_KERNEL = ": everything, same kernel"


@dataclass(frozen=True)
class Rival:
    """What is timed of one row: processor seconds after, and for, so many tokens."""

    token: Callable[[int], float]
    prompt: Callable[[int], float]
    bytes: int  # of the weights that a token reads


def seconds(run: Callable[[], object]) -> float:
    """Of the processor on one thread, of the wall on several, which wait for each other."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    run()
    return clock() - began


def in_torch(model: Any, ids: Tensor, prompts: Sequence[int]) -> Rival:
    """Decoding token after token in PyTorch."""
    kept = {length: prefill(model, ids[:, :length]) for length in prompts}

    def token(length: int) -> float:
        tail = ids[:, length : length + TOKENS]
        return seconds(lambda: throughput.decode(model, kept[length], tail)) / TOKENS

    length = prompts[0]
    return Rival(
        token,
        lambda length: seconds(lambda: prefill(model, ids[:, :length])),
        throughput.touched_bytes(model, ids[:, length : length + 1], kept[length]),
    )


def in_llama_cpp(path: Path, ids: list[int], prompts: Sequence[int]) -> Rival:
    """The same tokens in llama.cpp, compiled for this processor, as `pip install llama-cpp-python` does."""
    from llama_cpp import Llama

    reader = GGUFReader(path)
    tensors = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    if "output.weight" in tensors:
        del tensors["token_embd.weight"]
    counts = {name.rpartition(".")[2]: field for name, field in reader.fields.items() if ".expert_" in name}
    if "expert_count" in counts:
        used, number = (int(counts[name].contents()) for name in ("expert_used_count", "expert_count"))
        tensors |= {name: size * used // number for name, size in tensors.items() if "_exps." in name}
    threads = torch.get_num_threads()
    engine = Llama(str(path), n_ctx=max(prompts) + TOKENS, n_threads=threads, n_threads_batch=threads, verbose=False)

    def prompt(length: int) -> float:
        engine.reset()
        return seconds(lambda: engine.eval(ids[:length]))

    def token(length: int) -> float:
        prompt(length)
        return seconds(lambda: [engine.eval([token]) for token in ids[length : length + TOKENS]]) / TOKENS

    return Rival(token, prompt, sum(tensors.values()))


def stock(dense: str, dtype: torch.dtype) -> Any:
    """The dense model as transformers loads it, without anything of tomoe."""
    return in_own_memory(AutoModelForCausalLM.from_pretrained(dense, dtype=dtype).eval())


def rows_of(args: argparse.Namespace) -> dict[str, Rival]:
    """What is timed, by name."""
    longest = max(args.prompts) + TOKENS
    ids = torch.tensor(load_tokenizer(args.dense)(args.text.read_text()[: 16 * longest])["input_ids"])[None]
    rows = {"dense, PyTorch": in_torch(stock(args.dense, torch.bfloat16), ids, args.prompts)}
    rows["dense, PyTorch, float32"] = in_torch(stock(args.dense, torch.float32), ids, args.prompts)
    for name, folder, active in args.folder:
        model = in_own_memory(tomoe.load(folder, active=active)[0])
        own = rows[name] = in_torch(model, ids, args.prompts)
        changes = run_everything(model, backends_of(model, 1))
        if changes is not None:

            def whole(run: Callable[[int], float], length: int, changes: Any = changes) -> float:
                with set_to(changes):
                    return run(length)

            rows[f"{name}{SAME_KERNEL}"] = Rival(
                partial(whole, own.token), partial(whole, own.prompt), rows["dense, PyTorch"].bytes
            )
    return rows | {name: in_llama_cpp(Path(file), ids[0].tolist(), args.prompts) for name, file in args.gguf}


def solved(path: Path, dense: str, problems: Path, limit: int | None) -> tuple[int, int]:
    """How many problems of HumanEval a GGUF file solves, greedily and through the chat template of the dense model; of how
    many."""
    loaded = load_task("humaneval", problems, limit, run_code=True)
    assert isinstance(loaded, ProgramTask)
    tokenizer, rows = load_tokenizer(dense), loaded.problems
    prompts = [humaneval.prompt_of(row) for row in rows]
    ids = [asked(tokenizer, prompt.question, prompt.begun) for prompt in prompts]
    engine = LlamaCpp(path, 1, max(map(len, ids)) + humaneval.MOST, letter=0, threads=1)
    # llama.cpp stops at texts, not at expressions: where a line that begins so ends the function
    stop = [f"\n{character}" for character in string.printable if humaneval.function_ended(f"\n{character}")]
    hits = [
        humaneval.passes(row, engine.write(begun, humaneval.MOST, stop)) for row, begun in zip(rows, ids, strict=True)
    ]
    return sum(hits), len(hits)


def write_as(kind: GGMLQuantizationType, source: Path, out: Path) -> None:
    """Write the matrices of a GGUF file in another type, and its vectors in float32, as llama.cpp's own files have them."""
    reader = GGUFReader(source)
    writer = GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        stored = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def processor() -> str:
    """What `lscpu` calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def kept(results: Path) -> dict[str, Any]:
    """What a file of results holds; nothing if there is none."""
    return json.loads(results.read_text()) if results.exists() else {}


def write(args: argparse.Namespace, **more: Any) -> None:
    versions = {m.__name__: str(m.__version__) for m in (torch, transformers, tomoe)}
    out = kept(args.results) | {"dense": Path(args.dense).name, "processor": processor(), "versions": versions} | more
    args.results.write_text(json.dumps(out, indent=1) + "\n")


def solve(args: argparse.Namespace) -> None:
    """How many problems GGUF files solve, one after another."""
    answers = kept(args.results).get("solved", {})
    for name, file in args.gguf:
        answers[name] = solved(Path(file), args.dense, args.problems, args.solve)
        print(f"{name}: {answers[name][0]} of {answers[name][1]}", flush=True)
        write(args, solved=answers)


def measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    rows = rows_of(args)
    found: dict[str, Any] = {name: {"bytes": row.bytes} for name, row in rows.items()}
    for length in args.prompts:
        for cell in found.values():
            cell[f"after {length}"] = {"ms": [], "prompt ms": []}
    for round_ in range(args.rounds + 1):
        for name, row in rows.items():
            for length in args.prompts:
                token, prompt = row.token(length), row.prompt(length)
                # the first round warms up
                if round_:
                    cell = found[name][f"after {length}"]
                    cell["ms"].append(1e3 * token)
                    cell["prompt ms"].append(1e3 * prompt)
    write(args, rows=kept(args.results).get("rows", {}) | found)
    print("| | after | ms per token | ms per prompt | read for a token | x dense |\n|---|---|---|---|---|---|")
    for name, row in rows.items():
        for length in args.prompts:
            after = f"after {length}"
            cell, first = found[name][after], found["dense, PyTorch"][after]["ms"]
            ratio = statistics.median(a / b for a, b in zip(first, cell["ms"], strict=True))
            times = f"{length} | {middle(cell['ms'])} | {middle(cell['prompt ms'])}"
            print(f"| {name} | {times} | {format_bytes(row.bytes)} | {ratio:.2f} |")


def middle(times: list[float]) -> str:
    """The median, the lowest and the highest."""
    return f"{statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f})"


def points(results: dict[str, Any], headline: dict[str, Any]) -> Iterator[tuple[str, str, float, int]]:
    """Name, kind, milliseconds a token and solved problems of the rows for which all are known; what the kernel gives once."""
    rows = headline["rows"].values()
    known = {f"{row['way']} {row['active']:.0%}": row for row in rows if results["dense"].startswith(row["name"])}
    dense, whole = known["dense 100%"], "all inputs"
    for name, row in results["rows"].items():
        ms = statistics.median(next(cell for key, cell in row.items() if key.startswith("after"))["ms"])
        if name in results["solved"]:
            yield f"{named(name)}, llama.cpp", "llama.cpp", ms, results["solved"][name][0]
        elif name.startswith("dense"):
            yield name, "dense", ms, dense["humaneval"]["solved"]
        elif name.startswith("inputs") and name.endswith(SAME_KERNEL) and whole:
            yield whole, "dense", ms, dense["humaneval"]["solved"]
            whole = ""
        elif "humaneval" in known.get(name, {}):
            kind, share = name.replace("fine-grained", "experts").split()
            yield f"{kind} at {share}", "tomoe", ms, known[name]["humaneval"]["solved"]


def named(file: str) -> str:
    """A GGUF file as the table of results names it: "experts70-Q8_0" is "experts at 70%, Q8_0"."""
    experts = re.fullmatch(r"experts(\d+)-(\w+)", file)
    return f"experts at {experts[1]}%, {experts[2]}" if experts else f"dense, {file}"


@styled
def figure(results: dict[str, Any], headline: dict[str, Any]) -> CaptionedFigure:
    """Solved problems vs. milliseconds per token."""
    shown = list(points(results, headline))
    drawn, (axis,) = canvas(3.2)
    for kind, color, marker in zip(("tomoe", "dense", "llama.cpp"), COLORS, MARKERS, strict=False):
        own = [(ms, hits) for _, its, ms, hits in shown if its == kind]
        axis.plot(*zip(*own, strict=True), linestyle="none", marker=marker, color=color, markersize=6)
    for name, kind, ms, hits in shown:
        place, side = ((7, -3), "left") if kind == "tomoe" else ((0, 7), "center")
        if kind == "llama.cpp":
            # the dense files lie close together
            height = 8 if name.startswith("experts") else 21 if "Q4" in name else -15
            place, side = (-4, height), "left"
        axis.annotate(name, (ms, hits), place, textcoords="offset points", ha=side, fontsize=7)
    axis.set_xlim(0, 1.1 * max(ms for _, _, ms, _ in shown))
    axis.set_ylim(0, 1.2 * max(hits for *_, hits in shown))
    axis.set_xlabel("milliseconds per token, one thread")
    axis.set_ylabel("HumanEval problems solved")
    said = "; ".join(f"{name}: {ms:.0f} ms, {hits:.0f}" for name, _, ms, hits in shown)
    caption = "Upper left is better. Circles: tomoe; squares: the dense weights in PyTorch; triangles: llama.cpp."
    return CaptionedFigure("rivals", "HumanEval problems solved vs. time per token", said, caption, drawn)


def pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def folder_at(text: str) -> tuple[str, str, float | None]:
    name, value = pair(text)
    folder, _, active = value.partition("@")
    return name, folder, float(active) if active else None


def lengths(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("dense", nargs="?")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--folder", type=folder_at, action="append", default=[], metavar="NAME=FOLDER[@ACTIVE]")
    parser.add_argument("--gguf", type=pair, action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="wall time, if more than one")
    parser.add_argument("--prompts", type=lengths, default=[128], help="tokens, between commas")
    parser.add_argument("--problems", type=Path, help="folder with humaneval/*.jsonl")
    parser.add_argument("--solve", type=int, help="problems, evenly spread; all if none is given")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="draw the figure, and measure nothing")
    parser.add_argument("--headline", type=Path, help="with --draw: results of headline.py")
    parser.add_argument("--write", nargs=3, metavar=("TYPE", "FILE", "OUT"))
    args = parser.parse_args()
    if args.write:
        kind, source, out = args.write
        write_as(GGMLQuantizationType[kind], Path(source), Path(out))
    elif args.draw:
        save(figure(kept(args.results), kept(args.headline)), args.draw)
    elif args.problems:
        solve(args)
    else:
        measure(args)


if __name__ == "__main__":
    main()
