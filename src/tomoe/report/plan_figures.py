"""The figure of a plan: what a token uses of each layer."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tomoe.plan import AnyPlan
from tomoe.report.style import COLORS, DASHES, INK, MARKERS, SHADES, CaptionedFigure, canvas, styled
from tomoe.report.words import WORDS


@styled
def layers_figure(plan: AnyPlan) -> CaptionedFigure:
    """By layer the parts of an MLP as bars, and as lines the share of all else that a token uses a part of."""
    words = WORDS[plan.form]
    bars, lines = words.bars(plan), words.lines(plan)
    layers = range(len(plan.describe()))
    figure, (axes,) = canvas(2.9)
    for (name, shares), color in zip(bars.items(), SHADES, strict=False):
        axes.bar(layers, shares, color=color, width=0.85, label=name)
    first = 1 if bars else 0  # the bars are of the first color
    for n, (name, shares) in enumerate(lines.items(), first):
        axes.plot(layers, shares, color=COLORS[n], linestyle=DASHES[n], marker=MARKERS[n], label=name)
    axes.axhline(plan.active_fraction(), color=INK, linewidth=1, linestyle=":", label="all decoder layers together")
    _layer_axis(axes, len(layers))
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


def _layer_axis(axes: Axes, num_layers: int) -> None:
    """Layers as whole numbers, with half a layer of room at both ends."""
    axes.set_xlabel("layer")
    axes.set_xlim(-0.6, num_layers - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10]))
    axes.grid(False, axis="x")


def _span(shares: Sequence[float]) -> str:
    known = [share for share in shares if share == share]  # a layer without such a projection has none
    low, high = (f"{share:.0%}" for share in (min(known), max(known)))
    return f"{low} in all layers" if low == high else f"{low} to {high}"
