"""Figures of what a plan keeps: widths, unions, similarity of experts, V/O dims. Layers run from left to right in all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from tomoe.plan import InputsPlan, Plan
from tomoe.report.forms import KIND_NAMES
from tomoe.report.style import COLORS, DASHES, HEAT, INK, LIGHT, MARKERS, CaptionedFigure, canvas, styled


def layer_axis(axes: Axes, num_layers: int) -> None:
    """Layers as whole numbers, with half a layer of room at both ends."""
    axes.set_xlabel("layer")
    axes.set_xlim(-0.6, num_layers - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10]))
    axes.grid(False, axis="x")


def share_axis(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0%} in all layers" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"


@styled
def width_figure(plan: Plan) -> CaptionedFigure:
    """Share of the dense width that works on one token, by layer and operation."""
    layers, dims = plan.describe(), plan.shape.head_dim
    kept = {
        "MLP neurons": [row["width_share"] for row in layers],
        # an attention that cannot be pruned has no dims to count
        "Q/K dims": [row["qk_dims"] / dims if dims else 1.0 for row in layers],
        "V/O dims": [row["value_dims"] / dims if dims else 1.0 for row in layers],
    }
    if all(share == 1 for name in ("Q/K dims", "V/O dims") for share in kept[name]):
        kept = {"MLP neurons": kept["MLP neurons"], "Q/K and V/O dims (kept whole)": kept["V/O dims"]}
    figure, (axes,) = canvas(2.7)
    for n, (name, shares) in enumerate(kept.items()):
        axes.plot(range(len(layers)), shares, color=COLORS[n], linestyle=DASHES[n], marker=MARKERS[n], label=name)
    axes.axhline(plan.active_fraction(), color=INK, linewidth=1, linestyle=":", label="all decoder layers together")
    share_axis(axes, "kept for one token")
    layer_axis(axes, len(layers))
    figure.legend(loc="outside upper left", ncols=2)
    return CaptionedFigure(
        "width",
        "Width of every layer and operation",
        f"Line chart over {len(layers)} layers of the share of its dense width that one token uses. "
        + "; ".join(f"{name}: {_span(shares)}" for name, shares in kept.items())
        + f"; all decoder layers together: {plan.active_fraction():.1%}.",
        "The budget is one for the whole model, and learning spends it where it matters most. Look for layers far above the "
        "dotted line, which the model finds hard to thin out, and for operations near zero, where a layer does little.",
        figure,
    )


@styled
def parts_figure(plan: Plan) -> CaptionedFigure:
    """Shared part, chosen and other fine-grained experts, by layer."""
    layers, size = plan.describe(), plan.shape.mlp_size
    shared, used = [row["shared"] / size for row in layers], [row["width_share"] for row in layers]
    indices = range(len(layers))
    figure, (axes,) = canvas(2.5)
    axes.bar(indices, [1.0] * len(layers), color="#dde3e8", width=0.85, label="other experts")
    axes.bar(indices, used, color=LIGHT, width=0.85, label="experts that a token chooses")
    axes.bar(indices, shared, color=COLORS[0], width=0.85, label="shared part")
    share_axis(axes, f"of {size:,} neurons")
    layer_axis(axes, len(layers))
    figure.legend(loc="outside upper left", ncols=3)
    top_ks = [row["top_k"] for row in layers]
    return CaptionedFigure(
        "parts",
        "Shared part and experts of a token",
        f"Bar chart over {len(layers)} layers. Shared part: {_span(shared)} of the neurons; with the {min(top_ks)} to "
        f"{max(top_ks)} of {plan.num_experts} experts that a token chooses: {_span(used)}.",
        "Every token uses the dark part, and of the rest as many experts as the second bar is high; which ones, its router "
        "decides. Look for layers in which the second bar reaches the top: they are whole for every token. The number of "
        "experts can be changed when the model is loaded, and only the upper end of the second bar moves.",
        figure,
    )


@styled
def union_figure(plan: Plan) -> CaptionedFigure:
    """The union of all overlapping experts beside the width of one, by layer."""
    layers = plan.describe()
    widths, unions = [row["width_share"] for row in layers], [row["union_share"] for row in layers]
    figure, (axes,) = canvas(2.5)
    indices = range(len(layers))
    axes.bar(indices, unions, color=LIGHT, width=0.85, label=f"any of the {plan.num_experts} experts")
    axes.bar(indices, widths, color=COLORS[0], width=0.85, label="one expert")
    share_axis(axes, f"of {plan.shape.mlp_size:,} neurons")
    layer_axis(axes, len(layers))
    figure.legend(loc="outside upper left", ncols=2)
    return CaptionedFigure(
        "union",
        "Union of the experts beside the width of one",
        f"Bar chart over {len(layers)} layers. Neurons in one expert: {_span(widths)}; in any expert: {_span(unions)}.",
        "The dark bar works on a token, the light one is what the layer still holds. Look for light bars that end well "
        "below 100 %: their missing neurons are in no expert, so what they knew is lost. If both bars are equal, all "
        "experts are the same and the router chooses nothing.",
        figure,
    )


@styled
def expert_width_figure(plan: Plan) -> CaptionedFigure | None:
    """How wide training left each expert before extraction gave all of a layer one width.

    None if the plan's notes do not hold one list of widths for each layer.
    """
    trained: Any = plan.notes.get("expert_widths")
    if not _are_widths(trained, plan):
        return None
    figure, (upper, lower) = canvas(3.6, 2, sharex=True, height_ratios=[1.4, 1])
    layers, chosen = range(len(trained)), [layer.width for layer in plan.counts]
    upper.vlines(layers, [min(row) for row in trained], [max(row) for row in trained], color=LIGHT, linewidth=4,
                 label="experts, narrowest to widest")  # fmt: skip
    upper.plot(layers, chosen, color=COLORS[1], marker="D", linestyle="none", label="width of all after extraction")
    upper.set_ylabel(f"neurons of {plan.shape.mlp_size:,}")
    upper.set_ylim(0, 1.05 * plan.shape.mlp_size)
    line = {"color": COLORS[0], "linewidth": 1}
    lower.boxplot(
        [[n - width for n in row] for row, width in zip(trained, chosen, strict=True)], positions=list(layers), widths=0.6,
        whis=(0, 100), manage_ticks=False, patch_artist=True, boxprops={"facecolor": LIGHT, **line}, whiskerprops=line,
        capprops=line, medianprops={"color": INK, "linewidth": 1.4},
    )  # fmt: skip
    lower.axhline(0, color=COLORS[1], linewidth=1, linestyle=":")
    lower.set_ylabel("trained less final")
    layer_axis(lower, len(trained))
    upper.grid(False, axis="x")
    figure.legend(loc="outside upper left", ncols=2)
    spreads = [max(row) - min(row) for row in trained]
    widest = spreads.index(max(spreads))
    return CaptionedFigure(
        "expert-widths",
        "Widths of the experts before they were made equal",
        f"Over {len(trained)} layers, the trained widths of the experts, and box plots of how far they are from the width "
        f"that all have after extraction. The largest spread is in layer {widest}: {min(trained[widest]):,} to "
        f"{max(trained[widest]):,} neurons, after extraction {chosen[widest]:,}.",
        "Training lets each expert have its own width; extraction gives all experts of a layer their mean, so that every "
        "token costs the same. Look for tall boxes: there the wide experts lose neurons that they had learned to keep.",
        figure,
    )


def _are_widths(values: Any, plan: Plan) -> bool:
    """Whether a note, which anyone may have written, is one list of neuron counts for each layer."""
    return (
        isinstance(values, list)
        and len(values) == len(plan.counts)
        and all(isinstance(row, list) and row for row in values)
        and all(type(width) is int and 0 <= width <= plan.shape.mlp_size for row in values for width in row)
    )


def jaccard(neurons: Bool[Tensor, "N F"]) -> Float[Tensor, "N N"]:
    """Jaccard index of every two experts: neurons in both over neurons in either."""
    both = neurons.float() @ neurons.float().T
    sizes = both.diagonal()
    return both / (sizes[:, None] + sizes[None, :] - both)


def _mosaic(tiles: Sequence[Tensor]) -> tuple[Float[Tensor, "h w"], int]:
    """Put all matrices into one image, with gaps (NaN) between them and along their diagonals; and say how many a row has."""
    size = len(tiles[0])
    columns = min(len(tiles), 8)
    image = torch.full((math.ceil(len(tiles) / columns) * (size + 2) - 2, columns * (size + 1) - 1), math.nan)
    for i, tile in enumerate(tiles):
        y, x = (size + 2) * (i // columns), (size + 1) * (i % columns)
        image[y : y + size, x : x + size] = tile.masked_fill(torch.eye(size, dtype=torch.bool), math.nan)
    return image, columns


@styled
def similarity_figure(plan: Plan) -> CaptionedFigure | None:
    """Jaccard index of every two overlapping experts, by layer; None if there is a single expert."""
    if plan.num_experts < 2:
        return None
    tiles = [jaccard(layer.expert_masks) for layer in plan.layers]
    above = torch.ones_like(tiles[0], dtype=torch.bool).triu(1)
    pairs = [tile[above] for tile in tiles]
    chance = [share / (2 - share) for share in (layer.width / plan.shape.mlp_size for layer in plan.counts)]
    image, columns = _mosaic(tiles)
    figure, (upper, lower) = canvas(2.2 + 0.55 * math.ceil(len(tiles) / columns), 2,
                                    height_ratios=[2.0, 0.6 * math.ceil(len(tiles) / columns)])  # fmt: skip
    indices = range(len(tiles))
    upper.vlines(indices, [float(p.min()) for p in pairs], [float(p.max()) for p in pairs], color=LIGHT, linewidth=4,
                 label="all pairs")  # fmt: skip
    upper.plot(indices, [float(p.mean()) for p in pairs], color=COLORS[0], marker="o", linestyle="none", label="mean")
    upper.plot(indices, chance, color=COLORS[1], linestyle=DASHES[1], label="chance, at this width")
    upper.set_ylabel("Jaccard index")
    layer_axis(upper, len(tiles))
    figure.legend(loc="outside upper left", ncols=3)
    shown = lower.imshow(image.numpy(), cmap=HEAT, vmin=0, vmax=1, interpolation="none", aspect="equal")
    lower.axis("off")
    for i in indices:
        lower.annotate(str(i), ((i % columns) * (len(tiles[0]) + 1), (i // columns) * (len(tiles[0]) + 2)), (0, 1),
                       textcoords="offset points", fontsize=6, va="bottom")  # fmt: skip
    figure.colorbar(shown, ax=lower, shrink=0.9, aspect=12, label="Jaccard")
    means = [float(p.mean()) for p in pairs]
    return CaptionedFigure(
        "similarity",
        "Similarity of the experts of a layer",
        f"Above, by layer, the Jaccard index of the neuron sets of every two experts: mean {min(means):.2f} to "
        f"{max(means):.2f}, by chance {min(chance):.2f} to {max(chance):.2f}. Below, one small matrix per layer, experts "
        "against experts.",
        "1 is the same neurons, 0 none in common; the dashed line is what random sets of that width would share. Look "
        "for layers far above it: their experts share a common core and differ in the rest. Light squares in a small "
        "matrix are groups of experts that could be one.",
        figure,
    )


@styled
def value_figure(plan: Plan) -> CaptionedFigure | None:
    """V/O dims by layer: that exist, and that work on one token; None if attention is kept whole."""
    dims = plan.shape.head_dim
    exist, used = [layer.value_dims for layer in plan.counts], [v for _, _, v in plan.widths()]
    if all(v == dims for v in used):
        return None
    figure, (axes,) = canvas(2.5)
    indices = range(len(used))
    if exist != used:
        axes.bar(indices, exist, color=LIGHT, width=0.85, label="some token may use")
    axes.bar(indices, used, color=COLORS[0], width=0.85, label="one token uses")
    axes.axhline(dims, color=INK, linewidth=1, linestyle=":", label="dense")
    axes.set_ylabel("V/O dims of a head")
    layer_axis(axes, len(used))
    figure.legend(loc="outside upper left", ncols=3)
    return CaptionedFigure(
        "value-dims",
        "V/O dims in use",
        f"Bar chart over {len(used)} layers of the V/O dims of a head that work on one token: {min(used)} to "
        f"{max(used)} of {dims}.",
        "Where the light bar is taller, each token chooses its dims. Look for layers near zero: they pass "
        "hardly anything from other tokens.",
        figure,
    )


@styled
def inputs_figure(plan: InputsPlan) -> CaptionedFigure:
    """Share of its inputs that a token uses, by layer and kind of projection."""
    layers = plan.describe()
    figure, (axes,) = canvas(2.7)
    for n, kind in enumerate(plan.names):
        shares = [math.nan if row[kind] is None else row[kind] for row in layers]
        axes.plot(
            range(len(layers)), shares, color=COLORS[n], linestyle=DASHES[n], marker=MARKERS[n], label=KIND_NAMES[kind]
        )
    axes.axhline(plan.active_fraction(), color=INK, linewidth=1, linestyle=":", label="all decoder layers together")
    share_axis(axes, "inputs of a token")
    layer_axis(axes, len(layers))
    figure.legend(loc="outside upper left", ncols=2)
    spans = ", ".join(
        f"{KIND_NAMES[kind]} {_span([row[kind] for row in layers if row[kind] is not None])}" for kind in plan.names
    )
    return CaptionedFigure(
        "inputs",
        "Inputs of a token by layer and projection",
        f"Line chart over {len(layers)} layers of the share of its inputs that each projection uses for a token. {spans}.",
        "Where the model lost least for each weight that is not read, fewer inputs are left. Look for projections near 100 %: "
        "they bear no cut.",
        figure,
    )
