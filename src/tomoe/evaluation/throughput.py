"""How fast two causal LMs are beside each other: prefill and decoding, in one process, run after run.

Times of shared machines drift, so only neighbours are compared: dense, MoE, dense, MoE; a ratio is of one such pair.
Beside the times stands what can be counted: operations, bytes of weights that a pass reads, bytes of the cache.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from jaxtyping import Int
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from tomoe.evaluation.usage import ExpertCounter

FORMAT = "tomoe-benchmark-1"
STEPS = 4  # tokens that one timed run decodes
FEWEST = 3  # pairs of runs below which a median says nothing
Describe = Callable[[Any, int], str]
Progress = Callable[[int, int], None]
Kept = Sequence[tuple[Tensor, Tensor]]  # keys and values of every layer


@dataclass(frozen=True)
class Cell:
    """One phase at one size. Seconds are of one pass: of the whole prompt, or of one token of every row."""

    phase: str  # prefill or decode
    batch: int
    prompt: int  # tokens of a row that are prefilled, or that the cache holds when decoding starts
    dtype: str
    device: str
    threads: int
    backend: str  # how the MoE ran its experts
    runs: int
    dense_s: float  # median
    moe_s: float
    ratio: float  # median over pairs of runs of dense / MoE: above 1 the MoE is faster
    ratio_low: float  # the middle half of the pairs lies between these
    ratio_high: float
    dense_flops: int  # multiplications and additions of matrix products, those of the MoE without what it masks away
    moe_flops: int
    dense_bytes: int  # of weights that the pass reads, per token
    moe_bytes: int
    bound: float  # the ratio if the pass cost its operations (prefill) or its bytes of weights (decode) alone

    @property
    def verdict(self) -> str:
        return "faster" if self.ratio_low > 1 else "SLOWER" if self.ratio_high < 1 else "even"


@dataclass(frozen=True)
class Memory:
    """Bytes of one model."""

    weights: int
    resident: int | None  # growth of the process by loading and running it; None where the system does not tell
    cache_per_token: int  # K and V of one token in all layers


@dataclass(frozen=True)
class Benchmark:
    dense: str
    moe: str
    text: str
    active_share: float | None
    dense_memory: Memory
    moe_memory: Memory
    cells: tuple[Cell, ...]
    left_out: tuple[str, ...]
    versions: dict[str, str] = field(
        default_factory=lambda: {m.__name__: str(m.__version__) for m in (torch, transformers)}
    )


def resident_bytes(device: torch.device) -> int | None:
    """Memory that this process, or on a GPU its tensors, takes now."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text("utf-8").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def weight_bytes(model: nn.Module) -> int:
    """Of all parameters and of the buffers that are saved, tied ones once."""
    tensors = {id(t): t for t in model.state_dict(keep_vars=True).values()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def cache_bytes_per_token(model: Any, ids: Int[Tensor, "1 S"]) -> int:
    """K and V that the cache keeps for one token, over all layers."""
    return sum(t.numel() * t.element_size() for pair in prefill(model, ids) for t in pair) // ids.shape[1]


@torch.no_grad()
def prefill(model: Any, ids: Int[Tensor, "B S"]) -> Kept:
    """Keys and values of every layer after the rows `ids`, with the logits of the last token made as in generation. Its row
    is made a tensor of its own: of a slice PyTorch copies, on a CPU, the whole output matrix, as in transformers' models."""
    cache, output = DynamicCache(), model.get_output_embeddings()
    with output.register_forward_pre_hook(lambda _, x: (x[0].clone(memory_format=torch.contiguous_format), *x[1:])):
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cast(Any, cache).layers]


def _cache(kept: Kept) -> DynamicCache:
    """A cache of its own, so that no run sees what another one added."""
    cache = DynamicCache()
    for i, (keys, values) in enumerate(kept):
        cache.update(keys, values, i)
    return cache


@torch.no_grad()
def decode(model: Any, kept: Kept, ids: Int[Tensor, "B K"]) -> float:
    """Seconds of one step when the tokens `ids` come one by one after what is kept."""
    cache = _cache(kept)
    return seconds(lambda: _steps(model, cache, ids), ids.device) / ids.shape[1]


def _steps(model: Any, cache: DynamicCache, ids: Int[Tensor, "B K"]) -> None:
    for column in ids.split(1, 1):
        model(column, past_key_values=cache, use_cache=True, logits_to_keep=1)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Wall time, a GPU's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@contextmanager
def _expert_by_expert(model: Any) -> Iterator[None]:
    """Experts run so that what is counted is what a token needs: not masked, and with products that PyTorch sees."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "expert_backend", None)
    if before is None:
        yield
        return
    config.expert_backend = "runs"
    try:
        yield
    finally:
        config.expert_backend = before


@torch.no_grad()
def count_flops(model: Any, ids: Int[Tensor, "1 S"]) -> tuple[int, int]:
    """Operations (multiplications and additions) of matrix products: of prefilling one row, and of one step after it."""
    cache = DynamicCache()
    with _expert_by_expert(model), FlopCounterMode(display=False) as whole:
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    with _expert_by_expert(model), FlopCounterMode(display=False) as step:
        model(ids[:, -1:], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return whole.get_total_flops(), step.get_total_flops()


@torch.no_grad()
def touched_bytes(model: Any, ids: Int[Tensor, "B S"], kept: Kept = ()) -> int:
    """Bytes of weights that one pass over these tokens reads after what is kept, if each is read once: of the input
    embedding the rows of these tokens, of the experts the neurons that some token needs, of everything else all."""
    table = model.get_input_embeddings().weight
    tied = table is model.get_output_embeddings().weight
    rows = 0 if tied else len(ids.unique())
    total = weight_bytes(model) - (0 if tied else (len(table) - rows) * table[0].numel() * table.element_size())
    with ExpertCounter(model) as counter:
        if not counter.routers:
            return total
        model(ids, past_key_values=_cache(kept), use_cache=True, logits_to_keep=1)
        for layer in model.model.layers:
            used = counter.chosen[layer.mlp.router].any(0).cpu()
            union = layer.mlp.up_proj.shape[0]
            working = len(layer.mlp.expert_neurons.cpu()[used].unique())
            neurons = [t for t in layer.mlp.parameters() if t.dim() and t.shape[0] == union]
            total -= sum((union - working) * t[0].numel() * t.element_size() for t in neurons)
    return total


@dataclass
class Pair:
    """Both models, and the text that they are timed on."""

    dense: Any
    moe: Any
    ids: Int[Tensor, " T"]
    describe: Describe
    max_seconds: float  # of one cell
    pairs: int

    def rows(self, batch: int, length: int) -> Int[Tensor, "B S"]:
        """Different stretches of the text, from its beginning again where it ends."""
        wanted = batch * length
        return self.ids.repeat(-(-wanted // len(self.ids)))[:wanted].view(batch, length).to(self.dense.device)

    def measure(self, phase: str, batch: int, prompt: int) -> Cell | str:
        """A cell, or why there is none."""
        ids = self.rows(batch, prompt + STEPS)
        head, tail = ids[:, :prompt], ids[:, prompt:]
        device, both = head.device, (self.dense, self.moe)
        kept: dict[int, Kept] = {id(model): () for model in both}
        if phase == "prefill":

            def run(model: Any) -> float:
                return seconds(lambda: prefill(model, head), device)
        else:
            kept = {id(model): prefill(model, head) for model in both}

            def run(model: Any) -> float:
                return decode(model, kept[id(model)], tail)

        first = run(self.dense) + run(self.moe)  # warm-up
        spent = first * (STEPS if phase == "decode" else 1)
        pairs = min(self.pairs, int(self.max_seconds / spent)) if spent else self.pairs
        if pairs < FEWEST:
            return f"{phase} of {batch} x {prompt} tokens: {FEWEST} pairs of runs would take {FEWEST * spent:.0f} s"
        timed = [(run(self.dense), run(self.moe)) for _ in range(pairs)]
        ids = head if phase == "prefill" else tail[:, :1]
        touched = [touched_bytes(model, ids, kept[id(model)]) for model in both]
        return self._cell(phase, ids, prompt, timed, touched)

    def _cell(
        self,
        phase: str,
        ids: Int[Tensor, "B S"],
        prompt: int,
        timed: Sequence[tuple[float, float]],
        touched: Sequence[int],
    ) -> Cell:
        ratios = sorted(dense / moe for dense, moe in timed)
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        batch, step = len(ids), phase == "decode"
        flops = [count_flops(model, self.rows(1, prompt))[step] * batch for model in (self.dense, self.moe)]
        return Cell(
            phase=phase,
            batch=batch,
            prompt=prompt,
            dtype=str(self.dense.dtype).removeprefix("torch."),
            device=ids.device.type,
            threads=torch.get_num_threads(),
            backend=self.describe(self.moe, ids.numel()),
            runs=len(timed),
            dense_s=statistics.median(dense for dense, _ in timed),
            moe_s=statistics.median(moe for _, moe in timed),
            ratio=statistics.median(ratios),
            ratio_low=low,
            ratio_high=high,
            dense_flops=flops[0],
            moe_flops=flops[1],
            dense_bytes=touched[0] // ids.numel(),
            moe_bytes=touched[1] // ids.numel(),
            bound=touched[0] / touched[1] if step else flops[0] / flops[1],
        )


def run_cells(
    pair: Pair, batches: Sequence[int], prompts: Sequence[int], progress: Progress = lambda *_: None
) -> tuple[list[Cell], list[str]]:
    """All cells, small ones first, and a line for each that would take too long. What is larger than a prefill that took
    too long is not tried."""
    cells: list[Cell] = []
    left_out: list[str] = []
    sizes = sorted(((b, p) for b in batches for p in prompts), key=lambda size: size[0] * size[1])
    per_token = 0.0  # seconds of prefilling with both models, as last seen
    for done, (batch, prompt) in enumerate(sizes):
        foreseen = per_token * batch * prompt
        for phase in ("prefill", "decode"):
            name = f"{phase} of {batch} x {prompt} tokens"
            progress(2 * done + (phase == "decode"), 2 * len(sizes))
            # A decoding cell needs its cache filled by one prefill, a prefill cell a warm-up and the fewest pairs.
            if foreseen * (1 if phase == "decode" else 1 + FEWEST) > pair.max_seconds:
                left_out.append(f"{name}: would take longer than {pair.max_seconds:.0f} s")
                continue
            found = pair.measure(phase, batch, prompt)
            if isinstance(found, str):
                left_out.append(found)
                continue
            cells.append(found)
            if phase == "prefill":
                per_token = (found.dense_s + found.moe_s) / (batch * prompt)
    progress(2 * len(sizes), 2 * len(sizes))
    return cells, left_out


def to_json(benchmark: Benchmark) -> str:
    """Everything, with the verdict of every cell; for figures and for whoever measures again."""
    values = asdict(benchmark) | {"cells": [asdict(c) | {"verdict": c.verdict} for c in benchmark.cells]}
    return json.dumps({"format": FORMAT} | values, indent=2, allow_nan=False) + "\n"


def to_rich(benchmark: Benchmark) -> Table:
    """One line a cell, in milliseconds; what the numbers mean stands below."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=footnote(benchmark), caption_justify="left")
    titles = ["", "batch", "prompt", "dense\nms", "MoE\nms", "faster\nby", "bound"]
    for title in [*titles, "GFLOP\ndense/MoE", "MB/token\ndense/MoE", "experts"]:
        table.add_column(title, justify="left" if title in ("", "experts") else "right")
    for c in benchmark.cells:
        slower = f" {c.verdict}" if c.verdict == "SLOWER" else ""
        table.add_row(
            c.phase, str(c.batch), f"{c.prompt:,}", f"{1e3 * c.dense_s:.1f}", f"{1e3 * c.moe_s:.1f}",
            f"{c.ratio:.2f} ({c.ratio_low:.2f}-{c.ratio_high:.2f}){slower}", f"{c.bound:.2f}",
            f"{c.dense_flops / 1e9:.3g}/{c.moe_flops / 1e9:.3g}", f"{c.dense_bytes / 1e6:.3g}/{c.moe_bytes / 1e6:.3g}",
            c.backend,
        )  # fmt: skip
    return table


def footnote(benchmark: Benchmark) -> str:
    """Memory, what the columns mean, what was left out, and what one needs to measure again."""

    def memory(name: str, m: Memory) -> str:
        resident = "" if m.resident is None else f", resident {m.resident / 1e6:,.0f} MB"
        return f"{name}: weights {m.weights / 1e6:,.0f} MB{resident}, cache {m.cache_per_token / 1e3:.1f} kB a token"

    parts = [
        memory(benchmark.dense, benchmark.dense_memory),
        memory(benchmark.moe, benchmark.moe_memory),
        ""
        if benchmark.active_share is None
        else f"{benchmark.active_share:.1%} of the block weights are active: no ratio of the blocks can pass "
        f"{1 / benchmark.active_share:.2f}",
        "A ratio is the median over pairs of neighbouring runs, with the middle half of them; the bound is the ratio of "
        "operations (prefill) or of bytes of weights (decode)",
        f"Text: {benchmark.text}",
        *benchmark.left_out,
        ", ".join(f"{name} {version}" for name, version in benchmark.versions.items()),
    ]
    return ". ".join(part for part in parts if part) + "."
