"""The figures of the measurements, one function each, from plain rows. Each can be read without its caption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, ScalarFormatter

from tomoe.evaluation.results import Row
from tomoe.plans import FINETUNED, REPAIRED, AnyPlan, InputsPlan
from tomoe.report.style import COLORS, DASHES, INK, MARKERS, SHADES, CaptionedFigure, canvas, styled
from tomoe.report.words import words_of

# as many methods as are told apart
METHOD_COLORS = (*COLORS, "#e69f00", "#56b4e9", INK)
LABELLED = 16  # points that still have room for their number
HIGHEST = 1e100  # of a value that is drawn
NUMBER: dict[str, Any] = {  # how one stands beside what it belongs to: no line runs through it
    "textcoords": "offset points",
    "fontsize": 8,
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5},
}
Metrics = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class MethodPoint:
    """One method at one budget, for `methods_figure`."""

    method: str
    share: float  # of the decoder parameters and routers that a token uses
    kl: float  # to the dense model, nats
    repaired: bool


def all_figures(plan: AnyPlan, metrics: Metrics = (), curve: Sequence[Row] = ()) -> list[CaptionedFigure]:
    """Draw every figure that has data: of the plan, of the run's metrics.jsonl, and of active.json."""
    drawn = (active_figure(curve, plan), layers_figure(plan), training_figure(metrics))
    return [figure for figure in drawn if figure is not None]


@styled
def layers_figure(plan: AnyPlan) -> CaptionedFigure:
    """Draw, by layer, the parts of an MLP as bars, and the shares of everything else that a token uses in part as lines."""
    words = words_of(plan)
    bars, lines = words.bars(plan), words.lines(plan)
    layers = range(len(plan.describe()))
    figure, (axes,) = canvas(2.9)
    for (name, shares), color in zip(bars.items(), SHADES, strict=False):
        axes.bar(layers, shares, color=color, width=0.85, label=name)
    first = 1 if bars else 0  # the bars are of the first color
    for n, (name, shares) in enumerate(lines.items(), first):
        axes.plot(layers, shares, color=COLORS[n], linestyle=DASHES[n], marker=MARKERS[n], label=name)
    axes.axhline(plan.active_fraction(), color=INK, linewidth=1, linestyle=":", label="all decoder layers together")
    axes.set_xlabel("layer")
    axes.set_xlim(-0.6, len(layers) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10]))
    axes.grid(False, axis="x")
    axes.set_ylabel(words.measured)
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.legend(loc="outside upper left", ncols=2)
    spans = "; ".join(f"{name}: {_span(shares)}" for name, shares in {**bars, **lines}.items())
    return CaptionedFigure(
        "layers",
        "What a token uses of each layer",
        f"Chart over {len(layers)} layers. {spans}; all decoder layers together: {plan.active_fraction():.1%}.",
        "The budget is one for the whole model: some layers may use more than others.",
        figure,
    )


def _span(shares: Sequence[float]) -> str:
    known = [share for share in shares if share == share]  # a layer without such a projection has none
    low, high = (f"{share:.0%}" for share in (min(known), max(known)))
    return f"{low} in all layers" if low == high else f"{low} to {high}"


@styled
def active_figure(rows: Sequence[Row], plan: AnyPlan) -> CaptionedFigure | None:
    """Draw perplexity by active share of one model with several numbers of experts or inputs per token, from the rows of
    active.json, the dense model first. None unless at least two others have an active share."""
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
            axes.annotate(f"{y:.3g}", (x, y), (0, 7), ha="center", **NUMBER)
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
    changed = "The weights were fine-tuned" if FINETUNED in plan.notes else "Projections were refitted"
    refitted = f" {changed} for the planned number, so with all {unit} it need not be the dense model."
    return CaptionedFigure(
        "active",
        "Quality against active parameters, one folder",
        f"Line chart of perplexity by active share; the dense model has {dense:.2f}. {numbers}.",
        f"The same weights with more or fewer {unit} for each token, a number that is chosen when the model is loaded."
        + (refitted if {REPAIRED, FINETUNED} & plan.notes.keys() else ""),
        figure,
    )


@styled
def training_figure(metrics: Metrics) -> CaptionedFigure | None:
    """Draw the distillation loss by step, without skipped steps; None with fewer than two finite numbers."""
    points = [
        (row["step"], row["distill"])
        for row in metrics
        if not row.get("skipped") and isinstance(row.get("step"), int) and _is_number(row.get("distill"))
    ]
    if len(points) < 2 or not any(loss for _, loss in points):
        return None
    steps, losses = zip(*points, strict=True)
    smooth = _smooth(losses)
    figure, (axes,) = canvas(2.5)
    axes.plot(steps, losses, color=COLORS[0], linewidth=0.7, alpha=0.35, label="each logged step")
    axes.plot(steps, smooth, color=COLORS[0], label="running median")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("KL from dense, nats")
    figure.legend(loc="outside upper left", ncols=2)
    return CaptionedFigure(
        "training",
        "Training",
        f"Line chart of the KL divergence from the dense model over {steps[-1]:,} steps: from {smooth[0]:.3g} to "
        f"{smooth[-1]:.3g} nats.",
        "Every step draws other text, and other masks where these are learned, so it jumps. All terms of the loss are in "
        "run/metrics.jsonl.",
        figure,
    )


@styled
def methods_figure(points: Sequence[MethodPoint]) -> CaptionedFigure:
    """Draw KL to the dense model by active share, a line per method; dashed before the repair."""
    figure, (axes,) = canvas(3.6)
    named = list(dict.fromkeys(point.method for point in points))
    for n, method in enumerate(named):
        color, marker = METHOD_COLORS[n % len(METHOD_COLORS)], MARKERS[n % len(MARKERS)]
        for repaired in (True, False):
            line = sorted((p.share, p.kl) for p in points if (p.method, p.repaired) == (method, repaired))
            if line:
                style: dict[str, Any] = {"color": color, "marker": marker, "linestyle": "-" if repaired else ":"}
                axes.plot(*zip(*line, strict=True), **style, label=method + (", repaired" if repaired else ""))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylabel("KL from the dense model, nats")
    axes.set_xlabel("active parameters, routers included")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.legend(loc="outside upper left", ncols=2)
    numbers = ", ".join(f"{p.method}{' repaired' * p.repaired} {p.kl:.3g} at {p.share:.0%}" for p in points)
    return CaptionedFigure(
        "methods",
        "Methods on one text",
        f"Line chart of the KL divergence from the dense model by active share: {numbers}.",
        "Lower is better. All methods calibrate on the same text.",
        figure,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < HIGHEST


def _smooth(values: Sequence[float]) -> list[float]:
    """Running median over a twentieth of the run: the trend of values that jump between steps."""
    reach = max(1, len(values) // 40)
    return [median(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]
