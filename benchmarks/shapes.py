"""Models of random weights in the shapes that users run, dense against MoE, as `tomoe benchmark` measures.

Experts are random halves of every layer's neurons; routers are random, so tokens go to all of them about evenly.

    python benchmarks/shapes.py [--shape llama-1b | llama-7b-two-layers] [--dtype bfloat16] [--batch 1,8] [--prompt 128]
        [--threads 2] [--pairs 5] [--seconds 60]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tomoe.evaluation.param_counts import model_facts
from tomoe.evaluation.speed import throughput, timings
from tomoe.evaluation.speed.benchmark import expert_backends
from tomoe.model.structure import shape_of
from tomoe.moe.fold import fold
from tomoe.plan import LayerPlan, Plan

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=True,
    ),
    "llama-7b-two-layers": dict(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=32,
        vocab_size=32000,
    ),
}  # fmt: skip


def random_plan(dense: LlamaForCausalLM, generator: torch.Generator) -> Plan:
    """Eight experts, each of half of the neurons; attention whole."""
    shape = shape_of(dense)
    layers = []
    for _ in range(shape.num_layers):
        ranks = torch.stack([torch.randperm(shape.mlp_size, generator=generator) for _ in range(8)])
        layers.append(
            LayerPlan(
                expert_masks=ranks < shape.mlp_size // 2,
                router_weight=torch.randn(8, shape.hidden_size, generator=generator),
                qk_kept=torch.ones(shape.num_qk_choices, dtype=torch.bool),
                value_kept=torch.ones(shape.head_dim, dtype=torch.bool),
                value_top_k=shape.head_dim,
            )
        )
    return Plan(shape, tuple(layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-1b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--prompt", default="128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    config = LlamaConfig(**SHAPES[args.shape], dtype=args.dtype)
    torch.set_default_dtype(getattr(torch, args.dtype))
    dense = LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    moe = fold(dense, random_plan(dense, generator))
    ids = torch.randint(0, config.vocab_size, (4096,), generator=generator)
    pair = throughput.Pair(dense, moe, ids, expert_backends, args.seconds, args.pairs)
    batches, prompts = ([int(n) for n in sizes.split(",")] for sizes in (args.batch, args.prompt))
    cells, left_out = throughput.run_cells(pair, batches, prompts)
    memory = [
        timings.Memory(throughput.weight_bytes(m), None, throughput.cache_bytes_per_token(m, ids[None, :16]))
        for m in (dense, moe)
    ]
    share = model_facts(moe)["active_share"]
    measured = timings.Benchmark(
        args.shape, "half of it", "random tokens", share, memory[0], memory[1], tuple(cells), tuple(left_out)
    )
    print(timings.to_json(measured))


if __name__ == "__main__":
    main()
