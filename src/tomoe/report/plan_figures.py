"""Figures of what a plan keeps: widths, unions, likeness of experts, V/O dims. Layers run from left to right in all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from tomoe.plan import Plan
from tomoe.report.style import COLOURS, DASHES, HEAT, INK, LIGHT, MARKERS, Picture, canvas, styled


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
def width_figure(plan: Plan) -> Picture:
    """Share of the dense width that works on one token, by layer and operation."""
    layers, dims = plan.describe(), plan.shape.head_dim
    kept = {
        "MLP neurons": [row["width_share"] for row in layers],
        "Q/K dims": [row["qk_dims"] / dims for row in layers],
        "V/O dims": [row["value_dims"] / dims for row in layers],
    }
    if all(share == 1 for name in ("Q/K dims", "V/O dims") for share in kept[name]):
        kept = {"MLP neurons": kept["MLP neurons"], "Q/K and V/O dims (kept whole)": kept["V/O dims"]}
    figure, (axes,) = canvas(2.7)
    for n, (name, shares) in enumerate(kept.items()):
        axes.plot(range(len(layers)), shares, color=COLOURS[n], linestyle=DASHES[n], marker=MARKERS[n], label=name)
    axes.axhline(plan.active_fraction(), color=INK, linewidth=1, linestyle=":", label="all blocks together")
    share_axis(axes, "kept for one token")
    layer_axis(axes, len(layers))
    figure.legend(loc="outside upper left", ncols=2)
    return Picture(
        "width",
        "Width of every layer and operation",
        f"Line chart over {len(layers)} layers of the share of its dense width that one token uses. "
        + "; ".join(f"{name}: {_span(shares)}" for name, shares in kept.items())
        + f"; all blocks together: {plan.active_fraction():.1%}.",
        "The budget is one for the whole model, and learning spends it where it counts. Look for layers far above the "
        "dotted line, which the model finds hard to thin out, and for operations near zero, where a layer does little.",
        figure,
    )


@styled
def union_figure(plan: Plan) -> Picture:
    """The union of all experts beside the width of one, by layer."""
    layers = plan.describe()
    widths, unions = [row["width_share"] for row in layers], [row["union_share"] for row in layers]
    figure, (axes,) = canvas(2.5)
    where = range(len(layers))
    axes.bar(where, unions, color=LIGHT, width=0.85, label=f"any of the {plan.num_experts} experts")
    axes.bar(where, widths, color=COLOURS[0], width=0.85, label="one expert")
    share_axis(axes, f"of {plan.shape.mlp_size:,} neurons")
    layer_axis(axes, len(layers))
    figure.legend(loc="outside upper left", ncols=2)
    return Picture(
        "union",
        "Union of the experts beside the width of one",
        f"Bar chart over {len(layers)} layers. Neurons in one expert: {_span(widths)}; in any expert: {_span(unions)}.",
        "The dark bar works on a token, the light one is what the layer still holds. Look for light bars that end well "
        "below 100 %: their missing neurons are in no expert, so what they knew is lost. Where both bars are equal, all "
        "experts are the same and the router chooses nothing.",
        figure,
    )


@styled
def expert_width_figure(plan: Plan) -> Picture | None:
    """How wide training left each expert before extraction gave all of a layer one width; None for a plan that does not say."""
    wanted = plan.notes.get("expert_widths")
    if not wanted:
        return None
    figure, (upper, lower) = canvas(3.6, 2, sharex=True, height_ratios=[1.4, 1])
    where, chosen = range(len(wanted)), [layer.width for layer in plan.layers]
    upper.vlines(where, [min(row) for row in wanted], [max(row) for row in wanted], color=LIGHT, linewidth=4,
                 label="experts, narrowest to widest")  # fmt: skip
    upper.plot(where, chosen, color=COLOURS[1], marker="D", linestyle="none", label="width given to all")
    upper.set_ylabel(f"neurons of {plan.shape.mlp_size:,}")
    upper.set_ylim(0, 1.05 * plan.shape.mlp_size)
    line = {"color": COLOURS[0], "linewidth": 1}
    lower.boxplot(
        [[n - given for n in row] for row, given in zip(wanted, chosen, strict=True)], positions=list(where), widths=0.6,
        whis=(0, 100), manage_ticks=False, patch_artist=True, boxprops={"facecolor": LIGHT, **line}, whiskerprops=line,
        capprops=line, medianprops={"color": INK, "linewidth": 1.4},
    )  # fmt: skip
    lower.axhline(0, color=COLOURS[1], linewidth=1, linestyle=":")
    lower.set_ylabel("more than given")
    layer_axis(lower, len(wanted))
    upper.grid(False, axis="x")
    figure.legend(loc="outside upper left", ncols=2)
    spreads = [max(row) - min(row) for row in wanted]
    widest = spreads.index(max(spreads))
    return Picture(
        "expert-widths",
        "Widths of the experts before they were made equal",
        f"Over {len(wanted)} layers, the trained widths of the experts, and box plots of how far they are from the width "
        f"that all were given. The largest spread is in layer "
        f"{widest}: {min(wanted[widest]):,} to {max(wanted[widest]):,} neurons, all given {chosen[widest]:,}.",
        "Training lets each expert have its own width; extraction gives all experts of a layer their mean, so that every "
        "token costs the same. Look for tall boxes: there the wide experts lose neurons that they had learned to keep.",
        figure,
    )


def jaccard(neurons: Bool[Tensor, "N F"]) -> Float[Tensor, "N N"]:
    """Neurons in both experts over neurons in either."""
    both = neurons.float() @ neurons.float().T
    sizes = both.diagonal()
    return both / (sizes[:, None] + sizes[None, :] - both)


def _mosaic(tiles: Sequence[Tensor]) -> tuple[Float[Tensor, "h w"], int]:
    """All matrices in one, row by row, with gaps (NaN) between them and along their diagonals; and how many a row has."""
    size = len(tiles[0])
    columns = min(len(tiles), 8)
    image = torch.full((math.ceil(len(tiles) / columns) * (size + 2) - 2, columns * (size + 1) - 1), math.nan)
    for i, tile in enumerate(tiles):
        y, x = (size + 2) * (i // columns), (size + 1) * (i % columns)
        image[y : y + size, x : x + size] = tile.masked_fill(torch.eye(size, dtype=torch.bool), math.nan)
    return image, columns


@styled
def similarity_figure(plan: Plan) -> Picture | None:
    """Jaccard index of every two experts, by layer; None for a single expert."""
    if plan.num_experts < 2:
        return None
    tiles = [jaccard(layer.expert_neurons) for layer in plan.layers]
    above = torch.ones_like(tiles[0], dtype=torch.bool).triu(1)
    pairs = [tile[above] for tile in tiles]
    chance = [share / (2 - share) for share in (layer.width / plan.shape.mlp_size for layer in plan.layers)]
    image, columns = _mosaic(tiles)
    figure, (upper, lower) = canvas(2.2 + 0.55 * math.ceil(len(tiles) / columns), 2,
                                    height_ratios=[2.0, 0.6 * math.ceil(len(tiles) / columns)])  # fmt: skip
    where = range(len(tiles))
    upper.vlines(where, [float(p.min()) for p in pairs], [float(p.max()) for p in pairs], color=LIGHT, linewidth=4,
                 label="all pairs")  # fmt: skip
    upper.plot(where, [float(p.mean()) for p in pairs], color=COLOURS[0], marker="o", linestyle="none", label="mean")
    upper.plot(where, chance, color=COLOURS[1], linestyle=DASHES[1], label="chance, at this width")
    upper.set_ylabel("Jaccard index")
    layer_axis(upper, len(tiles))
    figure.legend(loc="outside upper left", ncols=3)
    shown = lower.imshow(image.numpy(), cmap=HEAT, vmin=0, vmax=1, interpolation="none", aspect="equal")
    lower.axis("off")
    for i in where:
        lower.annotate(str(i), ((i % columns) * (len(tiles[0]) + 1), (i // columns) * (len(tiles[0]) + 2)), (0, 1),
                       textcoords="offset points", fontsize=6, va="bottom")  # fmt: skip
    figure.colorbar(shown, ax=lower, shrink=0.9, aspect=12, label="Jaccard")
    means = [float(p.mean()) for p in pairs]
    return Picture(
        "similarity",
        "How alike the experts of a layer are",
        f"Above, by layer, the Jaccard index of the neuron sets of every two experts: mean {min(means):.2f} to "
        f"{max(means):.2f}, by chance {min(chance):.2f} to {max(chance):.2f}. Below, one small matrix per layer, experts "
        "against experts.",
        "1 is the same neurons, 0 none in common; the dashed line is what random sets of that width would share. Look "
        "for layers far above it: their experts share a common core and differ in the rest. Light blocks in a small "
        "matrix are groups of experts that could be one.",
        figure,
    )


@styled
def value_figure(plan: Plan) -> Picture | None:
    """V/O dims by layer: that exist, and that work on one token; None where attention is whole."""
    dims = plan.shape.head_dim
    exist, used = [int(layer.value_kept.sum()) for layer in plan.layers], [v for _, _, v in plan.widths()]
    if all(v == dims for v in used):
        return None
    figure, (axes,) = canvas(2.5)
    where = range(len(used))
    if exist != used:
        axes.bar(where, exist, color=LIGHT, width=0.85, label="some token may use")
    axes.bar(where, used, color=COLOURS[0], width=0.85, label="one token uses")
    axes.axhline(dims, color=INK, linewidth=1, linestyle=":", label="dense")
    axes.set_ylabel("V/O dims of a head")
    layer_axis(axes, len(used))
    figure.legend(loc="outside upper left", ncols=3)
    return Picture(
        "value-dims",
        "V/O dims in use",
        f"Bar chart over {len(used)} layers of the V/O dims of a head that work on one token: {min(used)} to "
        f"{max(used)} of {dims}.",
        "Where the light bar is taller, each token chooses its dims. Look for layers near zero: they pass hardly "
        "anything on from other tokens.",
        figure,
    )
