"""Quality at equal tokens: carved and random start, without learning and learned, at several budgets, attention kept and pruned.

A sweep on two texts: what each cell held out and --test. Cells, tables and resuming are those of `tomoe sweep`. Nothing is
repaired, unless --set repair.mode=full.

    python benchmarks/quality.py MODEL OUT --train a.txt,b.jsonl --test c.txt [--active 0.7,0.5] [--steps 0,150,1000]
        [--start carved,random] [--attention off,per_token] [--set section.key=value ...]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tomoe.recipe.conversion import Recipe
from tomoe.sweep import Text, sweep

SEQ_LEN, EVALUATION_TOKENS, CALIBRATION_TOKENS = 512, 8192, 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--test-tokens", type=int, default=8192)
    parser.add_argument("--active", default="0.7,0.5")
    parser.add_argument("--steps", default="0,150,1000")
    parser.add_argument("--start", default="carved,random")
    parser.add_argument("--attention", default="off,per_token")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    sizes = [f"data.evaluation_tokens={EVALUATION_TOKENS}", f"data.calibration_tokens={CALIBRATION_TOKENS}"]
    named = [f"model={args.model}", f"data.sources={args.train}", f"data.seq_len={SEQ_LEN}"]
    base = Recipe.load(
        None, [*named, *sizes, "experts.form=overlapping", "train.save_every=50", "repair.mode=none", *args.set]
    )
    lines = []
    for steps in args.steps.split(","):
        tokens = max(int(steps), 1) * SEQ_LEN + EVALUATION_TOKENS + CALIBRATION_TOKENS
        # a random start that does not learn is noise
        starts = [start for start in args.start.split(",") if start != "random" or int(steps)]
        axes = [f"attention.pruning={args.attention}", f"active={args.active}"]
        axes = [f"start={','.join(starts)}", f"train.steps={steps}", f"data.tokens={tokens}", *axes]
        if starts:
            lines = sweep(base, axes, args.out, Text(args.test, 1024, args.test_tokens))
    for line in lines:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
