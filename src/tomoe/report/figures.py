"""The figures, one function each, from plain rows; each says in its caption what to look for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, ScalarFormatter

from tomoe.errors import UserError
from tomoe.report.plan_figures import layer_axis
from tomoe.report.style import COLOURS, DASHES, HEAT, INK, LIGHT, MARKERS, WIDTH, Picture, canvas, short, styled

LABELLED = 16  # points that still have room for their number
Rows = Sequence[Mapping[str, Any]]
Shares = Sequence[Sequence[float]]  # [layer][expert]


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
        axes.plot(*zip(*sorted(points), strict=True), label=short(label), **style)
        for x, y in points if len(rows) <= LABELLED else ():
            axes.annotate(f"{y:.3g}", (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    if relative or dense:
        level = 1.0 if relative else max(dense)
        axes.axhline(level, color=INK, linewidth=1, linestyle=":")
        said = "dense" if relative else f"dense {level:.2f}"
        axes.annotate(said, (0, level), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="left", fontsize=8)  # fmt: skip
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _smooth(values: Sequence[float]) -> list[float]:
    """A running median over a twentieth of the run: what jumps about from step to step shows its course."""
    reach = max(1, len(values) // 40)
    return [median(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


TERMS = {
    "fidelity": "fidelity (nats)",
    "budget": "budget",
    "coverage": "coverage",
    "balance": "balance",
    "active_fraction": "active share",
}


@styled
def training_figure(metrics: Rows, num_experts: int, active: float) -> Picture | None:
    """The four terms of the objective, unweighted, and the sampled active share, by step; None with fewer than two rows.

    A row is one of metrics.jsonl; rows of skipped steps, or with a value that is not finite, are passed over.
    """
    needed = ("step", *TERMS)
    rows = [row for row in metrics if not row.get("skipped") and all(_is_number(row.get(key)) for key in needed)]
    if len(rows) < 2:
        return None
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    axes = figure.subplot_mosaic([["fidelity", "fidelity"], ["budget", "coverage"], ["balance", "active_fraction"]],
                                 sharex=True, height_ratios=[1.3, 1, 1])  # fmt: skip
    steps = [row["step"] for row in rows]
    for n, (key, title) in enumerate(TERMS.items()):
        values = [row[key] for row in rows]
        axes[key].plot(steps, values, color=COLOURS[0], linewidth=0.7, alpha=0.35)
        axes[key].plot(steps, _smooth(values), color=COLOURS[0])
        axes[key].set_title(title, loc="left")
        if n >= 3:
            axes[key].set_xlabel("step")
    for key in ("fidelity", "budget", "coverage"):
        axes[key].set_ylim(bottom=0)
    levels = (
        ("balance", 1 / num_experts, f"{1 / num_experts:.3g}: even"),
        ("active_fraction", active, f"{active:.0%} asked"),
    )
    for key, level, said in levels:
        axes[key].axhline(level, color=INK, linewidth=1, linestyle=":")
        axes[key].set_title(f"{TERMS[key]} ({said})", loc="left")
        axes[key].margins(y=0.2)
    axes["active_fraction"].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    first, last = ({key: _smooth([row[key] for row in rows])[i] for key in TERMS} for i in (0, -1))
    return Picture(
        "training",
        "Learning, term by term",
        f"Line charts over {steps[-1]:,} steps, from first to last: "
        + "; ".join(f"{title} {first[key]:.3g} to {last[key]:.3g}" for key, title in TERMS.items()) + ".",
        "Pale: each logged step; dark: running median. Fidelity says how far the masked model is from its aim, and should "
        "fall; every step draws other masks and other text, so it jumps. Budget and coverage are penalties that should "
        "reach zero; balance falls towards the dotted line where all experts get the same number of tokens. Look for a "
        "fidelity that still falls at the right end: more steps would help.",
        figure,
    )  # fmt: skip


@styled
def usage_figure(shares: Shares, tokens: int, by_source: Mapping[str, tuple[Shares, int]] | None = None) -> Picture:
    """Share of the tokens that each expert of each layer got, [layer][expert]: of all text, then of each source."""
    panels = {f"all {tokens:,} tokens": shares}
    if by_source and len(by_source) > 1:
        panels |= {f"{source} ({count:,} tokens)": own for source, (own, count) in by_source.items()}
    experts, layers = len(shares[0]), len(shares)
    highest = max(max(row) for own in panels.values() for row in own)
    top = min(highest, max(3 / experts, max(map(max, shares))))  # a few extremes would darken all the rest
    height = 0.55 + 0.13 * max(4, experts)
    figure, axes = canvas(height * len(panels) + 0.6, len(panels), sharex=True)
    for own, (title, rows) in zip(axes, panels.items(), strict=True):
        image = own.imshow([list(column) for column in zip(*rows, strict=True)], cmap=HEAT, vmin=0, vmax=top,
                           interpolation="none", aspect="auto")  # fmt: skip
        own.set_title(short(title, 60), loc="left")
        own.set_ylabel("expert")
        own.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        own.grid(False)
        dead = [(layer, n) for layer, row in enumerate(rows) for n, share in enumerate(row) if share == 0]
        if dead:
            own.plot(*zip(*dead, strict=True), color="white", marker="x", linestyle="none", markersize=4)
    layer_axis(axes[-1], layers)
    bar = figure.colorbar(image, ax=axes, aspect=30, label="share of the tokens of a layer",
                          extend="max" if highest > top else "neither")  # fmt: skip
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    busiest = max(range(layers), key=lambda i: max(shares[i]))
    unused = sum(share == 0 for row in shares for share in row)
    return Picture(
        "usage",
        "Use of the experts",
        f"Heat map of {layers} layers by {experts} experts. The busiest is expert {shares[busiest].index(max(shares[busiest]))} "
        f"of layer {busiest} with {max(shares[busiest]):.0%} of {tokens:,} tokens; {unused} experts got none. "
        + (f"Then the same for each of {len(panels) - 1} sources." if len(panels) > 1 else ""),
        f"Even use would be {100 / experts:.3g} % everywhere. Look for columns with one light cell, where routing hardly "
        "chooses, and for crosses: experts that nothing reached. "
        + ("Panels that differ from source to source show experts that took to one kind of text." if len(panels) > 1 else ""),
        figure,
    )  # fmt: skip


@styled
def cost_figure(cost: Mapping[str, Any]) -> Picture | None:
    """What the conversion took, from the run's cost.json; None where that is not known."""
    seconds = cost.get("seconds", {})
    if not seconds:
        return None
    figure, (axes,) = canvas(0.75 + 0.33 * len(seconds))
    names, values = list(seconds), [value / 60 for value in seconds.values()]
    axes.barh(names, values, color=COLOURS[0], height=0.65)
    for y, value in enumerate(values):
        axes.annotate(f"{value:.1f} min" if value >= 1 else f"{60 * value:.0f} s", (value, y), (3, 0),
                      textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlabel("minutes")
    axes.margins(x=0.14)
    axes.grid(False, axis="y")
    facts = [f"{sum(values):.1f} minutes in all", *cost_facts(cost)]
    return Picture(
        "cost",
        "What the conversion took",
        "Bar chart of seconds by stage: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()) + ".",
        f"{'; '.join(facts)}. Look for the longest bar: fewer steps or blocks shorten learning, a file of text shortens "
        "the first.",
        figure,
    )


def cost_facts(cost: Mapping[str, Any]) -> list[str]:
    """Tokens, memory and device in words, as far as they are known."""
    tokens, device = cost.get("tokens", {}), cost.get("device")
    said = [f"{count:,} tokens of {name}" for name, count in tokens.items()]
    for key, place in (("peak_memory_bytes", "main memory"), ("device_peak_memory_bytes", "memory of the device")):
        if cost.get(key):
            said.append(f"{cost[key] / 1e9:.2f} GB of {place} at the peak")
    if device:
        threads = cost.get("threads", 0) if device == "cpu" else 0
        said.append(f"on {device}" + (f" with {threads} thread{'s' * (threads > 1)}" if threads else ""))
    if cost.get("resumed"):
        said.append("only what came after the last --resume is counted")
    return said


@styled
def throughput_figure(rows: Rows) -> Picture | None:
    """How many times as fast as the dense model the MoE is, from the benchmark's rows; None where there is none.

    A row is {phase ("prefill" or "decode"), batch, prompt (tokens), dtype, dense_s, moe_s, ratio = dense_s / moe_s,
    ratio_low, ratio_high}.
    """
    if not rows:
        return None
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    longest = max(sum(row["phase"] == phase for row in rows) for phase in phases)
    figure, axes = canvas(0.7 + (0.3 + 0.26 * longest) * len(phases), len(phases), sharex=True)
    for own, phase in zip(axes, phases, strict=True):
        chosen = [row for row in rows if row["phase"] == phase]
        for y, row in enumerate(chosen):
            faster = row["ratio"] >= 1
            own.plot([row["ratio_low"], row["ratio_high"]], [y, y], color=LIGHT, linewidth=4, solid_capstyle="butt")
            own.plot(row["ratio"], y, color=COLOURS[0 if faster else 1], marker="o" if faster else "s", markersize=5)
            own.annotate(f"{row['ratio']:.2f}", (max(row["ratio"], row["ratio_high"]), y), (5, 0),
                         textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        own.set_yticks(
            range(len(chosen)), [f"{row['batch']} x {row['prompt']}, {short(row['dtype'], 10)}" for row in chosen]
        )
        own.set_ylim(len(chosen) - 0.5, -0.5)
        own.axvline(1, color=INK, linewidth=1, linestyle=":")
        own.set_title(f"{phase} (sequences x prompt tokens)", loc="left")
        own.grid(False, axis="y")
        own.margins(x=0.12)
    axes[-1].set_xlabel("times as fast as the dense model")
    told = "; ".join(f"{r['phase']} {r['batch']} x {r['prompt']} {r['dtype']}: {r['ratio']:.2f}" for r in rows)
    return Picture(
        "throughput",
        "Speed beside the dense model",
        f"Dot chart of the dense model's time over the MoE's, above 1 is faster. {told}.",
        "Round blue dots right of the dotted line are faster than the dense model, square orange ones slower; the bar is "
        "the middle half of the repetitions. Look for the batch sizes you will use: a few tokens and many behave differently.",
        figure,
    )
