"""How figures look, and how they are written, as SVG and PNG. The same numbers give the same bytes."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tomoe.files import atomic_write

INK = "#1b1f24"
WIDTH = 5.0  # inches: letters stay readable on a phone
# Okabe and Ito's colors that stand out from white and from black alike; dashes and markers tell them apart in grey
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1, 2)))
MARKERS = ("o", "s", "^", "D")
SHADES = ("#dde3e8", "#8fb8cf", COLORS[0])  # of parts within each other, the whole first
FILES = {
    "svg": (100, ("Date", "Creator", "Format", "Type")),
    "png": (160, ("Software",)),
}  # dots per inch, what is left out
STYLE: dict[str, Any] = {
    "text.parse_math": False,  # names may hold a dollar sign
    "svg.fonttype": "none",
    "svg.hashsalt": "tomoe",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 9),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8),
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#808080",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure with its texts: `alt` describes it to those who cannot see it."""

    name: str  # of its files, without suffix
    title: str
    alt: str
    caption: str
    figure: Figure

    @cached_property
    def svg(self) -> str:
        """Return one <svg> element and its prologue; drawn once for the file and the page."""
        return _written(self.figure, "svg").decode()


SETTINGS: dict[Any, Any] = dict(matplotlib.rcParamsDefault) | STYLE
del SETTINGS["backend"]
styled = matplotlib.rc_context(SETTINGS)  # decorates what draws: whatever matplotlib is set to elsewhere, these hold


def canvas(height: float, rows: int = 1, **subplots: Any) -> tuple[Figure, list[Axes]]:
    """Make a figure of the common width, `height` inches tall, and its axes from top to bottom."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, 1, squeeze=False, **subplots)[:, 0])


def _fix_layout(figure: Figure, dpi: int) -> None:
    """Lay out once: each drawing would shift the axes slightly, and no two files would be equal."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for axes in figure.axes:
            # the solver's last digits depend on where objects lie in memory, and ids are hashes of positions
            x, y, width, height = axes.get_position(original=True).bounds
            axes.set_position((round(x, 5), round(y, 5), round(width, 5), round(height, 5)))
    figure.dpi = dpi


@styled
def _written(figure: Figure, kind: str) -> bytes:
    """Render to a file of this kind, svg or png, without date or version."""
    dpi, unnamed = FILES[kind]
    _fix_layout(figure, dpi)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=dpi, metadata=dict.fromkeys(unnamed))
    return buffer.getvalue()


def save(drawn: CaptionedFigure, folder: Path) -> tuple[Path, Path]:
    """Write FOLDER/name.svg and FOLDER/name.png. Raises UserError if that fails."""
    return (
        atomic_write(folder / f"{drawn.name}.svg", drawn.svg),
        atomic_write(folder / f"{drawn.name}.png", _written(drawn.figure, "png")),
    )
