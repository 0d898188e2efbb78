"""Peak memory of the distillation loss at a large vocabulary, each variant in a process of its own.

python benchmarks/kl_memory.py [--tokens 2048] [--vocab 150000] [--hidden 1024]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

import torch
import torch.nn.functional as F

from tomoe.pruning.losses import kl_loss


def one(variant: str, tokens: int, vocab: int, hidden: int) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden, vocab, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    student = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    teacher = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if variant == "chunked":
        loss = kl_loss(student, teacher, head, torch.ones(tokens, dtype=torch.bool))
    else:
        log_q, log_p = head(student).float().log_softmax(-1), head(teacher).float().log_softmax(-1)
        loss = F.kl_div(log_q, log_p, log_target=True, reduction="sum") / tokens
    loss.backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {"variant": variant, "loss": loss.item(), "before_mb": round(before), "added_mb": round(peak - before)}
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--variant", choices=["chunked", "plain"])
    args = parser.parse_args()
    if args.variant:
        one(args.variant, args.tokens, args.vocab, args.hidden)
        return
    full = args.tokens * args.vocab * 4 / 2**20
    print(json.dumps({"tokens": args.tokens, "vocab": args.vocab, "one_full_float32_mb": round(full)}))
    for variant in ("chunked", "plain"):
        sizes = [f"--{name}={getattr(args, name)}" for name in ("tokens", "vocab", "hidden")]
        subprocess.run([sys.executable, __file__, "--variant", variant, *sizes], check=True)


if __name__ == "__main__":
    main()
