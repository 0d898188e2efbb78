"""Compare a training step with its floor, in one run: median seconds and their ratio.

The floor is one dense forward plus one dense forward with input-gradient backward on the same tokens and dtype, logits
and a float32 loss on them included, as a plain distillation step would do them.

    python benchmarks/training_step.py MODEL [--tokens 512] [--dtype bfloat16] [--repeats 7] [--attention off]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from tomoe.model.loading import load_dense
from tomoe.model.structure import shape_of
from tomoe.pruning.forms import mask_network
from tomoe.pruning.layouts import settle_layout
from tomoe.pruning.objective import MaskStep
from tomoe.recipe.conversion import Recipe
from tomoe.training.loop import make_optimizer


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--attention", default="off", choices=["off", "static", "per_token"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    model = load_dense(args.model, getattr(torch, args.dtype), args.device)
    recipe = Recipe.load(None, ["experts.form=overlapping", f"attention.pruning={args.attention}"])
    layout, size = settle_layout(recipe, shape_of(model)), recipe.experts.embedding_size
    net = mask_network(shape_of(model), layout, size, recipe.attention, recipe.sampling, 0).to(args.device)
    optimizer = make_optimizer(net, recipe.train)
    ids = torch.randint(0, model.config.vocab_size, (1, args.tokens), device=args.device)
    sequences = SimpleNamespace(input_ids=ids, mask=torch.ones_like(ids, dtype=torch.bool))

    def forward() -> None:
        with torch.no_grad():
            model(ids, use_cache=False)

    def forward_backward() -> None:
        inputs = model.get_input_embeddings()(ids).requires_grad_()
        logits = model(inputs_embeds=inputs, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0].float(), ids[0]).backward()

    learn = MaskStep(model, net, recipe.loss, recipe.train, recipe.active, 0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        learn(sequences, 0, 0)
        optimizer.step()

    timed: dict[str, list[float]] = {"forward": [], "forward_backward": [], "step": []}
    for repeat in range(args.repeats + 1):  # interleaved, the first round is warm-up
        for name, run in (("forward", forward), ("forward_backward", forward_backward), ("step", step)):
            elapsed = seconds(run)
            if repeat:
                timed[name].append(elapsed)
    floors = [a + b for a, b in zip(timed["forward"], timed["forward_backward"], strict=True)]
    ratios = [s / f for s, f in zip(timed["step"], floors, strict=True)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {
                **vars(args),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                **{f"{name}_s": round(statistics.median(t), 3) for name, t in timed.items()},
                "ratio": round(statistics.median(ratios), 3),
                "ratio_min_max": [round(min(ratios), 3), round(max(ratios), 3)],
                "peak_host_mb": round(peak),
            }
        )
    )


if __name__ == "__main__":
    main()
