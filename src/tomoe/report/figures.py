"""The figure of what was measured with several numbers of experts. It can be read without its caption."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter, ScalarFormatter

from tomoe.evaluation.results import Row
from tomoe.plan import FINETUNED, REPAIRED, AnyPlan, InputsPlan
from tomoe.report.style import COLORS, INK, MARKERS, CaptionedFigure, canvas, styled

LABELLED = 16  # points that still have room for their number
# behind a number, so that no line runs through it
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


@styled
def dial_figure(rows: Sequence[Row], plan: AnyPlan) -> CaptionedFigure | None:
    """Perplexity of one model with several numbers of fine-grained experts, or inputs, a token, from the rows of dial.json,
    of which the first is the dense model. None unless at least two others have an active share."""
    points = sorted(
        (row.facts["active_share"], row.measurement.perplexity, row.experts_per_token or 0)
        for row in rows[1:]
        if row.facts["active_share"] is not None
    )
    if len(points) < 2:
        return None
    planned = None if isinstance(plan, InputsPlan) else max(layer.top_k for layer in plan.counts)
    dense = rows[0].measurement.perplexity
    figure, (axes,) = canvas(3.2)
    shares, perplexities, _ = zip(*points, strict=True)
    unit = "inputs" if planned is None else "experts"
    axes.plot(shares, perplexities, color=COLORS[0], marker=MARKERS[0], markersize=5, label=f"other numbers of {unit}")
    for x, y, k in points:
        if k == planned:
            axes.plot(x, y, color=COLORS[1], marker=MARKERS[1], markersize=7, linestyle="none", label="as planned")
        if len(points) <= LABELLED:
            axes.annotate(f"{y:.3g}", (x, y), (0, 7), ha="center", textcoords="offset points", fontsize=8, bbox=PAPER)
    axes.axhline(dense, color=INK, linewidth=1, linestyle=":", label=f"dense model, {dense:.2f}")
    axes.set_ylabel("perplexity, lower is better")
    if max(dense, *perplexities) > 4 * min(dense, *perplexities):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("active share of the decoder parameters")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.margins(x=0.08, y=0.14)
    figure.legend(loc="outside upper left", ncols=3)
    most = "" if planned is None else " ({} experts in the layer that uses most)"
    numbers = ", ".join(f"{y:.4g} at {x:.0%}{most.format(k)}" for x, y, k in points)
    refitted = " Projections were refitted for the planned number, so with all experts it need not be the dense model."
    return CaptionedFigure(
        "dial",
        "Quality against active parameters, one folder",
        f"Line chart of perplexity by active share; the dense model has {dense:.2f}. {numbers}.",
        f"The same weights with more or fewer {unit} for each token, a number that is chosen when the model is loaded."
        + (refitted if {REPAIRED, FINETUNED} & plan.notes.keys() else ""),
        figure,
    )
