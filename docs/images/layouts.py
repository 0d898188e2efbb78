"""Draw quality against speed of the layouts of a stock form: docs/images/layouts.svg.

The numbers are those of the table "Quality and speed of a layout" in docs/lab/performance.md.

    python docs/images/layouts.py
"""

from __future__ import annotations

from pathlib import Path

from tomoe.files import atomic_write
from tomoe.report.style import COLORS, CaptionedFigure, canvas, styled, to_svg

# layout: KL on WikiText-2 after repair; speed of llama.cpp over dense, reading 8 x 128 tokens and decoding 8 rows
LAYOUTS = {
    "56 experts of 24, 12 of a token, 192 shared": (0.958, 0.74, 0.85),
    "49 of 24, 5, 360 (the default)": (0.988, 1.07, 1.01),
    "24 of 48, 2, 384": (1.020, 1.26, 1.19),
}


@styled
def figure() -> CaptionedFigure:
    drawn, (axes,) = canvas(3.2)
    for n, what in enumerate(("reading prompts", "decoding 8 rows")):
        speeds = [point[1 + n] for point in LAYOUTS.values()]
        axes.plot(speeds, [point[0] for point in LAYOUTS.values()], "os"[n] + "-", color=COLORS[n], label=what)
    for name, (kl, *speeds) in LAYOUTS.items():
        axes.annotate(name, (max(speeds), kl), xytext=(8, -3), textcoords="offset points", fontsize=8)
    axes.axvline(1, color="gray", linewidth=0.8, linestyle="--")
    axes.set_xlim(0.7, 1.75)
    axes.set_xlabel("speed in llama.cpp, dense = 1")
    axes.set_ylabel("KL on WikiText-2, nats")
    axes.set_ylim(0.95, 1.025)
    axes.legend(loc="upper left")
    said = "; ".join(
        f"{name}: KL {kl}, prompts {prompts}, decoding {rows}" for name, (kl, prompts, rows) in LAYOUTS.items()
    )
    return CaptionedFigure(
        "layouts", "Quality and speed of a layout", f"Line plot of KL by speed. {said}.",
        "Lower and further right is better.", drawn,
    )  # fmt: skip


if __name__ == "__main__":
    atomic_write(Path(__file__).with_suffix(".svg"), to_svg(figure()))
