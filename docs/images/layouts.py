"""Draw layouts.svg and layouts.png: how much faster than dense layers with experts run in llama.cpp, by model size.

    python docs/images/layouts.py

Reads docs/lab/engine-layouts.json, what `tomoe benchmark MODEL --engine llama.cpp --json FILE` wrote for each size. A point is
the layout that the command advises: the fastest of those that read prompts at least as fast as the dense model, if any.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from matplotlib.figure import Figure

from tomoe.exporting.gguf.layout_speed import best
from tomoe.report.style import COLORS, DASHES, INK, MARKERS, WIDTH, CaptionedFigure, save, styled

HERE = Path(__file__).parent
RATIOS = {"decoding": "token_ratios", "256-token prompt": "prompt_ratios"}


def points(runs: list[Any]) -> dict[tuple[str, str], dict[float, Any]]:
    """The row to draw, by precision and model and then by active fraction."""
    found: dict[tuple[str, str], dict[float, list[Any]]] = {}
    for run in runs:
        for row in run.rows:
            if row.candidate.layout is not None:
                of = found.setdefault((row.candidate.precision, run.model), {})
                of.setdefault(row.candidate.active, []).append(row)
    return {key: {active: best(rows) for active, rows in of.items()} for key, of in found.items()}


@styled
def figure(measured: Any) -> CaptionedFigure:
    """Times dense over the active fraction, a line for each size; above decoding, below a prompt."""
    shown = points(measured.runs)
    drawn = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = drawn.subplots(2, 2, sharex=True, sharey=True)
    sizes = list(dict.fromkeys(model for _, model in shown))
    said = []
    for row, (what, key) in zip(axes, RATIOS.items(), strict=True):
        for axis, precision in zip(row, ("q8_0", "q4_k_m"), strict=True):
            for size, color, dashes, marker in zip(sizes, COLORS, DASHES, MARKERS, strict=True):
                of = shown[precision, size]
                ratios = [statistics.median(getattr(of[active], key)) for active in of]
                axis.plot([100 * a for a in of], ratios, color=color, linestyle=dashes, marker=marker, label=size)
                cells = ", ".join(f"{ratio:.2f} at {active:.0%}" for active, ratio in zip(of, ratios, strict=True))
                said.append(f"{precision.upper()}, {what}, {size}: {cells}")
            axis.axhline(1, color=INK, linewidth=0.8)
            axis.set_title(f"{precision.upper()}, {what}")
    axes[0, 0].legend()
    axes[0, 0].invert_xaxis()
    axes[0, 0].set_xticks([85, 70, 50])
    for axis in axes[:, 0]:
        axis.set_ylabel("times dense")
    for axis in axes[1]:
        axis.set_xlabel("% active")
    caption = f"Layers of random weights; {measured.machine}, llama-cpp-python {vars(measured)['llama-cpp-python']}."
    return CaptionedFigure("layouts", "Speed of experts in llama.cpp, times dense", "; ".join(said), caption, drawn)


if __name__ == "__main__":
    text = (HERE.parent / "lab" / "engine-layouts.json").read_text("utf-8")
    save(figure(json.loads(text, object_hook=lambda fields: SimpleNamespace(**fields))), HERE)
