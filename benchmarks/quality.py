"""Quality at equal tokens: carved without learning, random and carved learned, at several budgets, attention kept and pruned.

Every cell is a whole conversion (OUT/cell/) and one line of OUT/quality.jsonl; cells that are there already are passed over,
and one that was cut off is resumed.

    python benchmarks/quality.py MODEL OUT --train a.txt,b.jsonl --test c.txt [--active 0.7,0.5] [--steps 0,150,1000]
        [--start carved,random] [--attention none,dynamic] [--set section.key=value ...]
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import torch

from tomoe import api
from tomoe.conversion import convert
from tomoe.recipe.conversion import Recipe

BLOCK = 512


def run_cell(
    args: argparse.Namespace, out: Path, active: str, steps: str, start: str, attention: str
) -> dict[str, object]:
    overrides = [
        f"model={args.model}", f"active={active}", f"train.steps={steps}", f"start={start}", f"experts.attention={attention}",
        f"data.sources={args.train}", f"data.tokens={max(int(steps), 1) * BLOCK + 8192 + 8192}", "data.evaluation_tokens=8192",
        "train.save_every=50", *args.set,
    ]  # fmt: skip
    recipe = Recipe.load(None, overrides)
    began = time.perf_counter()
    plan = convert(recipe, out, resume=(out / "run" / "recipe.json").exists(), force=True)
    seconds = time.perf_counter() - began
    held_out = api.evaluate([args.model, str(out)])
    test = api.evaluate([args.model, str(out)], args.test, context=1024, tokens=args.test_tokens)
    line: dict[str, object] = {
        "active": plan.active_fraction(), "steps": int(steps), "start": start, "attention": attention,
        "learning_rate": recipe.train.learning_rate, "seconds": round(seconds), "threads": torch.get_num_threads(),
    }  # fmt: skip
    for name, (dense, moe) in (("held_out", held_out), ("test", test)):
        line[f"{name}_dense_perplexity"] = round(dense.measurement.perplexity, 3)
        line[f"{name}_perplexity"] = round(moe.measurement.perplexity, 3)
        line[f"{name}_standard_error"] = round(moe.measurement.standard_error or 0.0, 3)
        line[f"{name}_kl"] = round(moe.measurement.kl or 0.0, 4)
        line[f"{name}_top1"] = round(moe.measurement.top1_agreement or 0.0, 4)
        line[f"{name}_tokens"] = moe.measurement.tokens
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--test-tokens", type=int, default=8192)
    for name, default in (
        ("active", "0.7,0.5"),
        ("steps", "0,150,1000"),
        ("start", "carved,random"),
        ("attention", "none,dynamic"),
    ):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    for cell in itertools.product(*(getattr(args, n).split(",") for n in ("start", "attention", "steps", "active"))):
        start, attention, steps, active = cell
        out = args.out / f"{start}-{attention}-{steps}-{active}"
        if (start == "random" and steps == "0") or (out / "quality.json").exists():
            continue
        line = run_cell(args, out, active, steps, start, attention)
        (out / "quality.json").write_text(json.dumps(line))
        with (args.out / "quality.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
