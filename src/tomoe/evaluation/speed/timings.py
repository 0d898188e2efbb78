"""The result of a benchmark as plain data, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from tomoe.evaluation.results import Count, Name, NotNegative, Positive
from tomoe.files import format_bytes

FORMAT = "tomoe-benchmark-1"
MEANING = (
    'A ratio is the median over rounds of neighboring runs, with the middle half of them. "All, same kernel" is the MoE '
    "with all experts (or inputs), run like those that it chooses: what it is faster than dense, the kernel "
    "gives, and what the MoE is faster than it, the choice; it is empty where decoding is compiled, layers run on several "
    "backends, or a long pass uses all inputs anyway. The bound is the ratio of active decoder weights (prefill) or "
    "of bytes of weights (decode). The dense model is given what is faster in the MoE besides experts: the output matrix meets "
    "the last token alone, and a new token attends by groups of heads"
)


@dataclass(frozen=True)
class Cell:
    """One phase at one size. Seconds are per pass: over a prompt, or over one token of every row."""

    phase: Name  # prefill, decode or compiled decode
    batch: Count
    prompt: Count  # tokens of a row that are prefilled, or that the cache holds when decoding starts
    dtype: Name
    device: Name
    threads: Count
    backend: Name  # that ran what the MoE's tokens chose
    runs: Count
    dense_s: NotNegative  # median
    moe_s: NotNegative
    ratio: Positive  # median over pairs of runs of dense / MoE: above 1 the MoE is faster
    ratio_low: Positive  # the middle half of the pairs lies between these
    ratio_high: Positive
    dense_bytes: Count  # of weights that the pass reads, per token
    moe_bytes: Count
    bound: NotNegative  # the ratio if the pass cost its decoder weights' products (prefill) or bytes of weights (decoding) alone
    same_kernel_s: NotNegative | None = None  # median of the MoE with all experts or inputs, in the same kernel
    choice_ratio: Positive | None = None  # median over rounds of that / MoE: what choosing some of them gives

    @property
    def verdict(self) -> str:
        return "faster" if self.ratio_low > 1 else "SLOWER" if self.ratio_high < 1 else "even"


@dataclass(frozen=True)
class Memory:
    """The resources of one model, in bytes and operations."""

    weights: int
    cache_per_token: int  # K and V of one token in all layers
    flops_per_token: int  # multiplications and additions with the weights of decoder layers that work on a token


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
    versions: dict[str, str] = field(default_factory=dict)


def to_json(benchmark: Benchmark) -> str:
    """Serialize everything, with the verdict of every cell, for figures and for reproduction."""
    values = asdict(benchmark) | {"cells": [asdict(c) | {"verdict": c.verdict} for c in benchmark.cells]}
    return json.dumps({"format": FORMAT} | values, indent=2, allow_nan=False) + "\n"


def table(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells, one line per size of a phase, in milliseconds."""
    shown = [_shown(cell) for cell in cells]
    return list(shown[0]) if shown else [], [list(values.values()) for values in shown]


def _shown(c: Cell) -> dict[str, str]:
    slower = f" {c.verdict}" if c.verdict == "SLOWER" else ""
    return {
        "phase": c.phase,
        "batch": str(c.batch),
        "prompt": f"{c.prompt:,}",
        "dense\nms": f"{1e3 * c.dense_s:.1f}",
        "all, same\nkernel ms": "-" if c.same_kernel_s is None else f"{1e3 * c.same_kernel_s:.1f}",
        "MoE\nms": f"{1e3 * c.moe_s:.1f}",
        "faster\nby": f"{c.ratio:.2f} ({c.ratio_low:.2f}-{c.ratio_high:.2f}){slower}",
        "of it by\nchoice": "-" if c.choice_ratio is None else f"{c.choice_ratio:.2f}",
        "bound": f"{c.bound:.2f}",
        "MB/token\ndense/MoE": f"{c.dense_bytes / 1e6:.3g}/{c.moe_bytes / 1e6:.3g}",
        "backend": c.backend,
    }


def footnote(benchmark: Benchmark) -> str:
    """Describe memory and operations, the columns, what was left out, and what is needed to measure again."""

    def memory(name: str, m: Memory) -> str:
        weights, cache = format_bytes(m.weights), format_bytes(m.cache_per_token)
        return f"{name}: weights {weights}; a token adds {cache} to the cache and takes {m.flops_per_token / 1e9:.3g} GFLOP"

    share = benchmark.active_share
    parts = [
        memory(benchmark.dense, benchmark.dense_memory),
        memory(benchmark.moe, benchmark.moe_memory),
        ""
        if share is None
        else f"{share:.1%} of the decoder parameters are active, so decoder layers alone can be at most {1 / share:.2f} "
        "times as fast",
        MEANING,
        f"Text: {benchmark.text}",
        f"Left out as too slow (seconds sets the limit): {', '.join(benchmark.left_out)}" if benchmark.left_out else "",
        ", ".join(f"{name} {version}" for name, version in benchmark.versions.items()),
    ]
    return ". ".join(part for part in parts if part) + "."
