"""The figures, one function each, from plain rows; each says in its caption what to look for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter, ScalarFormatter

from tomoe.errors import UserError
from tomoe.report.picture import COLOURS, DASHES, INK, MARKERS, Picture, canvas, styled

LABELLED = 16  # points that still have room for their number
Rows = Sequence[Mapping[str, Any]]


@styled
def accuracy_figure(rows: Rows) -> Picture:
    """Perplexity against active share, one line for each label.

    A row is {label, active_share (of the blocks, 0..1), perplexity, dense_perplexity (or None)}. Where the rows have
    several dense perplexities (other texts, other models), each perplexity is drawn against its own. Raises UserError
    where there is no row.
    """
    if not rows:
        raise UserError("there is no row to draw: give at least one model with its active share and its perplexity")
    dense = {row["dense_perplexity"] for row in rows if row.get("dense_perplexity")}
    relative = len(dense) > 1 and all(row.get("dense_perplexity") for row in rows)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        value = row["perplexity"] / row["dense_perplexity"] if relative else row["perplexity"]
        lines.setdefault(str(row["label"]), []).append((row["active_share"], value))
    figure, (axes,) = canvas(3.2)
    for n, (label, points) in enumerate(lines.items()):
        style = {"color": COLOURS[n % 4], "marker": MARKERS[n % 4], "linestyle": DASHES[n % 4], "markersize": 5}
        axes.plot(*zip(*sorted(points), strict=True), label=label, **style)
        for x, y in points if len(rows) <= LABELLED else ():
            axes.annotate(f"{y:.3g}", (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    if relative or dense:
        level = 1.0 if relative else max(dense)
        axes.axhline(level, color=INK, linewidth=1, linestyle=":")
        said = "dense" if relative else f"dense {level:.2f}"
        axes.annotate(said, (1, level), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="right", fontsize=8)  # fmt: skip
    values = [value for points in lines.values() for _, value in points] + ([1.0] if relative else [*dense])
    if max(values) > 4 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("active share of the block parameters")
    axes.set_ylabel("perplexity / dense perplexity" if relative else "perplexity")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.margins(x=0.08, y=0.1)
    if len(lines) > 1 or next(iter(lines)):
        axes.legend()
    told = "; ".join(
        f"{label or 'model'}: " + ", ".join(f"{y:.4g} at {x:.0%}" for x, y in sorted(points))
        for label, points in lines.items()
    )
    return Picture(
        "accuracy",
        "Quality against active parameters",
        f"Line chart of {'perplexity over dense perplexity' if relative else 'perplexity'} by active share. {told}.",
        "Lower is better, the dotted line is the dense model. Look for the share at which the line begins to climb: "
        "below it each parameter saved costs more than the last. Points on different texts cannot be compared.",
        figure,
    )
