"""Draw quality against speed of the layouts of a stock form: docs/images/layouts.svg.

The numbers are those of the table "Quality and speed of a layout" in docs/lab/performance.md.

    python docs/images/layouts.py
"""

from __future__ import annotations

import re
from pathlib import Path

from tomoe.files import atomic_write
from tomoe.recipe.conversion import STOCK_SHARED
from tomoe.report.style import COLORS, CaptionedFigure, canvas, styled, to_svg

PAGE = Path(__file__).parents[1] / "lab" / "performance.md"
SECTION = "## Quality and speed of a layout"


def read_layouts() -> dict[str, tuple[float, float, float]]:
    """KL on WikiText-2 after repair, and speed of llama.cpp over dense, reading and decoding, of the rows that have one."""
    lines = PAGE.read_text(encoding="utf-8").split(SECTION)[1].split("\n## ")[0].splitlines()
    rows = [
        [cell.replace("*", "").strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")
    ]
    layouts: dict[str, tuple[float, float, float]] = {}
    for _, layout, shared, *_, test, speed in rows[2:]:
        if speed:
            experts, size, used, common = re.findall(r"\d+", layout)
            default = " (the default)" if shared == f"{STOCK_SHARED:.0%}".replace("%", " %") else ""
            kl, (prompts, decoding) = test.split(",")[1], speed.split("/")
            first = f"{experts} experts of {size}, {used} of a token, {common} shared"
            name = f"{experts} of {size}, {used}, {common}" if layouts else first
            layouts[name + default] = (float(kl), float(prompts), float(decoding))
    return layouts


@styled
def figure() -> CaptionedFigure:
    layouts = read_layouts()
    drawn, (axes,) = canvas(3.2)
    for n, what in enumerate(("reading prompts", "decoding 8 rows")):
        speeds = [point[1 + n] for point in layouts.values()]
        axes.plot(speeds, [point[0] for point in layouts.values()], "os"[n] + "-", color=COLORS[n], label=what)
    for name, (kl, *speeds) in layouts.items():
        axes.annotate(name, (max(speeds), kl), xytext=(8, -3), textcoords="offset points", fontsize=8)
    axes.axvline(1, color="gray", linewidth=0.8, linestyle="--")
    axes.set_xlim(0.7, 1.75)
    axes.set_xlabel("speed in llama.cpp, dense = 1")
    axes.set_ylabel("KL on WikiText-2, nats")
    axes.set_ylim(0.95, 1.025)
    axes.legend(loc="upper left")
    said = "; ".join(
        f"{name}: KL {kl}, prompts {prompts}, decoding {rows}" for name, (kl, prompts, rows) in layouts.items()
    )
    return CaptionedFigure(
        "layouts", "Quality and speed of a layout", f"Line plot of KL by speed. {said}.",
        "Lower and further right is better.", drawn,
    )  # fmt: skip


if __name__ == "__main__":
    atomic_write(Path(__file__).with_suffix(".svg"), to_svg(figure()))
