"""Whole models in transformers, dense against MoE: a table of Markdown from `tomoe benchmark`.

    python benchmarks/speed.py FOLDER TEXT smollm2-135m qwen2.5-coder-0.5b.gguf [--active 0.5 0.7] [--batches 1,8]

Each model is carved for each share of active parameters, on some thousand tokens of TEXT and without a repair, which changes
no speed, unless FOLDER has it already.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CARVING = ["data.seq_len=512", "data.tokens=10752", "data.evaluation_tokens=2048", "data.calibration_tokens=8192"]


def tomoe(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "tomoe", *map(str, words)], check=True)


def carve(model: str, active: float, folder: Path, text: Path) -> Path:
    """The model with so many of its parameters active, made if it is not there."""
    moe = folder / f"{Path(model).stem}-{active}"
    if not moe.exists():
        settings = [word for setting in CARVING for word in ("--set", setting)]
        tomoe("convert", model, "--active", active, "-o", moe, "--data", text, "--repair", "none", *settings)
    return moe


def row(model: str, active: float, cell: dict[str, Any]) -> str:
    times = f"{1e3 * cell['dense_s']:,.0f} | {1e3 * cell['moe_s']:,.0f}"
    ratio = f"{cell['ratio']:.2f} ({cell['ratio_low']:.2f}-{cell['ratio_high']:.2f})"
    what = f"{cell['phase']} {cell['batch']} x {cell['prompt']:,}"
    return f"| {Path(model).stem} | {active:.0%} | {what} | {times} | {ratio} | {cell['bound']:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--active", type=float, nargs="+", default=[0.5, 0.7])
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompts", default="128")
    parser.add_argument("--pairs", default="9")
    parser.add_argument("--threads", default="1")
    args = parser.parse_args()
    sizes = ["--batch", args.batches, "--prompt", args.prompts, "--pairs", args.pairs, "--threads", args.threads]
    rows = ["| model | active | prompts | dense ms | MoE ms | ratio | bound |", "|---|---|---|---|---|---|---|"]
    for model in args.models:
        for active in args.active:
            moe = carve(model, active, args.folder, args.text)
            measured = moe.with_suffix(f"{moe.suffix}.json")
            tomoe("benchmark", model, moe, *sizes, "--json", measured)
            rows += [row(model, active, cell) for cell in json.loads(measured.read_text())["cells"]]
    print("\n".join(rows))


if __name__ == "__main__":
    main()
