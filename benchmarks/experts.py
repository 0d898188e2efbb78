"""One MLP, dense against every expert backend, in one process, run after run; ratios are of neighbouring runs.

Overlapping experts are random parts of the neurons, in the order that folding gives them. Tokens are routed as real text
was (`text`: the shares of eight experts, sorted, mean over the layers of SmolLM2-135M at 50 % active on 512 tokens of
WikiText-2), or evenly (`uniform`). Fine-grained experts are of equal size; a token uses as many as make the active share of
the neurons together with the shared ones, some experts more often than others. `rows` and `matrix`: the algorithms of `native`.

    python benchmarks/experts.py [--form overlapping] [--experts 64] [--shared 2752] [--active 0.5] [--shape 4096x11008]
        [--dtype float32] [--tokens 1,8,64,1024] [--routing text] [--threads 2] [--rounds 9]
        [--backends masked,runs,native,auto,rows,matrix] [--clock wall]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import tomoe.moe.kernels  # noqa: F401  # registers `native` in BACKENDS
from tomoe.moe.fold import neuron_order
from tomoe.moe.kernels.native import Algorithm, run_native
from tomoe.moe.modeling_tomoe import BACKENDS, ToMoEMLP, choose_backend

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
RUN = {name: backend.run for name, backend in BACKENDS["experts"].items()}
RUN |= {algorithm.name.lower(): partial(run_native, algorithm=algorithm) for algorithm in Algorithm}
RUN["auto"] = lambda mlp, x, expert_ids: RUN[choose_backend(mlp, x)](mlp, x, expert_ids)
SHARES = {"text": [0.29, 0.205, 0.155, 0.135, 0.11, 0.065, 0.03, 0.01], "uniform": [0.125] * 8}

PARTS = {
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "fused": False,
    "flat": False,
    "activation": "act_fn",
}


def make(
    hidden: int, size: int, dtype: torch.dtype, active: float, generator: torch.Generator
) -> tuple[LlamaMLP, ToMoEMLP]:
    """A dense MLP, and the MoE of eight random parts of its neurons."""
    members = torch.stack([torch.randperm(size, generator=generator) < round(active * size) for _ in range(8)])
    order = neuron_order(members)
    dense, moe = both(
        hidden,
        size,
        dtype,
        order,
        tomoe_num_experts=8,
        tomoe_expert_form="overlapping",
        tomoe_expert_sizes=[round(active * size)],
        tomoe_shared_sizes=[0],
        num_experts_per_tok=1,
    )
    moe.expert_rows.copy_(torch.stack([row.nonzero().squeeze(1) for row in members[:, order]]))
    return dense, moe


def make_fine(
    hidden: int, size: int, dtype: torch.dtype, experts: int, shared: int, active: float
) -> tuple[LlamaMLP, ToMoEMLP]:
    """A dense MLP, and the MoE of its neurons, as many as divide into experts, with `shared` of them or a few more."""
    width = (size - shared) // experts
    shared = size - experts * width
    top_k = max(1, round((active * size - shared) / width))
    return both(
        hidden,
        size,
        dtype,
        torch.arange(size),
        tomoe_num_experts=experts,
        tomoe_expert_form="fine",
        tomoe_expert_sizes=[width],
        tomoe_shared_sizes=[shared],
        layer_top_k=lambda layer: top_k,
        num_experts_per_tok=top_k,
    )


def both(hidden: int, size: int, dtype: torch.dtype, order: Tensor, **sizes: Any) -> tuple[LlamaMLP, ToMoEMLP]:
    """A dense MLP, and the MoE with such a config that has these of its neurons, in this order."""
    torch.set_default_dtype(dtype)
    dense = LlamaMLP(LlamaConfig(hidden_size=hidden, intermediate_size=size)).requires_grad_(False)
    own = {"tomoe_mlp_parts": PARTS, "tomoe_expert_backend": "auto", "top_k_key": "num_experts_per_tok"}
    config: Any = SimpleNamespace(tomoe_union_sizes=[len(order)], **own, **sizes)
    moe = ToMoEMLP(dense, config, 0).requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    for name in ("gate_proj", "up_proj"):
        getattr(moe, name).copy_(getattr(dense, name).weight[order])
    moe.down_proj.copy_(dense.down_proj.weight.t()[order])
    return dense, moe


def seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    run()
    return clock() - began


def summary(timed: list[tuple[float, float]]) -> dict[str, float]:
    """Medians in ms; the median ratio of pairs, and between which ones their middle half lies."""
    ratios = sorted(dense / moe for dense, moe in timed)
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    values = {
        "dense_ms": 1e3 * statistics.median(dense for dense, _ in timed),
        "moe_ms": 1e3 * statistics.median(moe for _, moe in timed),
        "ratio": middle, "ratio_low": low, "ratio_high": high,
    }  # fmt: skip
    return {name: round(value, 3) for name, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", default="overlapping", choices=["overlapping", "fine"])
    parser.add_argument("--experts", type=int, default=64, help="fine-grained ones")
    parser.add_argument("--shared", type=int, help="neurons (a quarter of all)")
    parser.add_argument("--active", type=float, default=0.5, help="share of the neurons that a token uses")
    parser.add_argument("--shape", default="4096x11008")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", default="1,8,64,1024")
    parser.add_argument("--routing", default="text", choices=sorted(SHARES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backends", default=",".join(["auto", *BACKENDS["experts"]]))
    parser.add_argument("--clock", default="wall", choices=sorted(CLOCKS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hidden, size = map(int, args.shape.split("x"))
    dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        fine = args.form == "fine"
        shared = size // 4 if args.shared is None else args.shared
        layout = (args.experts, shared, args.active)
        dense, moe = (
            make_fine(hidden, size, dtype, *layout) if fine else make(hidden, size, dtype, args.active, generator)
        )
        preference = 2 * torch.randn(args.experts, generator=generator)
        for count in map(int, args.tokens.split(",")):
            x = torch.randn(count, hidden, generator=generator).to(dtype)
            if moe.top_k:
                logits = torch.randn(count, args.experts, generator=generator) + preference
                expert_ids = logits.topk(moe.top_k).indices
            else:
                drawn = torch.multinomial(torch.tensor(SHARES[args.routing]), count, True, generator=generator)
                expert_ids = drawn[:, None]
            runs = {
                name: (partial(dense, x), partial(RUN[name], moe, x, expert_ids)) for name in args.backends.split(",")
            }
            timed: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
            for done in range(args.rounds + 1):  # the first is warm-up
                for name, (before, after) in runs.items():
                    both = seconds(before, CLOCKS[args.clock]), seconds(after, CLOCKS[args.clock])
                    if done:
                        timed[name].append(both)
            for name, both_s in timed.items():
                row = vars(args) | {
                    "tokens": count, "backends": name, "chosen": choose_backend(moe, x) if name == "auto" else None
                }  # fmt: skip
                print(json.dumps(row | summary(both_s)), flush=True)


if __name__ == "__main__":
    main()
