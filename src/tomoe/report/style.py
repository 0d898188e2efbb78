"""How figures look, and how one is written: SVG and PNG files, or inline in a page. The same numbers give the same bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tomoe.files import write_whole

P = ParamSpec("P")
R = TypeVar("R")

INK = "#1b1f24"
WIDTH = 5.0  # inches: letters stay readable on a phone
# Okabe and Ito's colours that stand out from white and from black alike; dashes and markers tell them apart in grey
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1, 2)))
MARKERS = ("o", "s", "^", "D")
LIGHT = "#8fb8cf"  # the paler one of two shades of the first colour
HEAT = "cividis"  # rises in lightness all the way, and looks the same to the colour-blind
PNG_DPI = 160
STYLE: dict[str, Any] = {
    "text.parse_math": False,  # names may hold a dollar sign
    "svg.fonttype": "none", "svg.hashsalt": "tomoe", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "legend.fontsize": 8, "legend.frameon": False, "lines.linewidth": 1.4, "lines.markersize": 3.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#808080", "grid.alpha": 0.25, "grid.linewidth": 0.6,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A figure with its words. `alt` says what is drawn, for who cannot see it; `caption` what to look for."""

    name: str  # of its files, without suffix
    title: str
    alt: str
    caption: str
    figure: Figure


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Draw in the house's style, whatever matplotlib is set to elsewhere."""
    settings = cast(Any, dict(matplotlib.rcParamsDefault) | STYLE)
    settings.pop("backend", None)

    @wraps(draw)
    def within(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib.rc_context(settings):
            return draw(*args, **kwargs)

    return within


def short(text: str, most: int = 32) -> str:
    """A name that leaves room for the rest of the figure."""
    return text if len(text) <= most else text[: most - 1] + "…"


def canvas(height: float, rows: int = 1, **subplots: Any) -> tuple[Figure, list[Axes]]:
    """A figure of the common width, with its axes from top to bottom."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, 1, squeeze=False, **subplots)[:, 0])


def _settle(figure: Figure) -> None:
    """Lay out once: each drawing would shift the axes by a hair, and no two files were the same."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for axes in (
            figure.axes
        ):  # the solver's last digits depend on where objects lie in memory, and ids are hashes of places
            x, y, width, height = axes.get_position(original=True).bounds
            axes.set_position((round(x, 5), round(y, 5), round(width, 5), round(height, 5)))


@styled
def to_svg(picture: Picture, transparent: bool = False) -> str:
    """One <svg> element and its prologue, without date or version."""
    _settle(picture.figure)
    buffer = io.StringIO()
    unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    picture.figure.savefig(buffer, format="svg", metadata=unsaid, transparent=transparent)
    return buffer.getvalue()


def _own(tag: str, name: str) -> str:
    """A tag in ink of the text's colour, its ids apart from other figures'. Images of equal bytes would share an id."""
    tag = re.sub(r' id="image\w+"', "", tag.replace(INK, "currentColor"))
    return re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", tag)


def inline_svg(picture: Picture) -> Markup:
    """For a page that may be dark: no background, ink in the colour of the text, ids of its own."""
    svg = to_svg(picture, transparent=True)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r"<[^>]*>", lambda tag: _own(tag[0], picture.name), svg
    )  # text holds no < and no >, but what it likes else
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    return Markup(
        svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)
    )  # safe: matplotlib escapes text


@styled
def save(picture: Picture, folder: Path) -> tuple[Path, Path]:
    """Write FOLDER/name.svg and FOLDER/name.png. Raises UserError where that fails."""
    _settle(picture.figure)
    buffer = io.BytesIO()
    picture.figure.savefig(buffer, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return (
        write_whole(folder / f"{picture.name}.svg", to_svg(picture)),
        write_whole(folder / f"{picture.name}.png", buffer.getvalue()),
    )
