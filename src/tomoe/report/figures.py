"""The figures, one function each, from plain rows; each says in its caption what to look for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, ScalarFormatter

from tomoe.evaluation.results import ExpertUsage, Row
from tomoe.files import format_bytes
from tomoe.plan import FINETUNED, REPAIRED, AnyPlan, InputsPlan
from tomoe.report.plan_figures import layer_axis
from tomoe.report.style import COLORS, HEAT, INK, LIGHT, MARKERS, WIDTH, CaptionedFigure, canvas, short, styled

LABELLED = 16  # points that still have room for their number
Rows = Sequence[Mapping[str, Any]]
Shares = Sequence[Sequence[float]]  # [layer][expert]


@styled
def dial_figure(rows: Sequence[Row], plan: AnyPlan) -> CaptionedFigure | None:
    """Perplexity of one model with several numbers of fine-grained experts, or inputs, a token, from the rows of dial.json.

    The first row is the dense model. None unless at least two others have an active share.
    """
    points = sorted(
        (row.facts["active_share"], row.measurement.perplexity, row.experts_per_token or 0)
        for row in rows[1:]
        if row.facts["active_share"] is not None
    )
    if len(points) < 2:
        return None
    inputs = isinstance(plan, InputsPlan)
    planned = None if isinstance(plan, InputsPlan) else max(layer.top_k for layer in plan.counts)
    dense = rows[0].measurement.perplexity
    figure, (axes,) = canvas(3.2)
    shares, perplexities, _ = zip(*points, strict=True)
    axes.plot(shares, perplexities, color=COLORS[0], marker=MARKERS[0], markersize=5)
    for x, y, k in points:
        if k == planned:
            axes.plot(x, y, color=COLORS[1], marker=MARKERS[1], markersize=7, linestyle="none", label="as planned")
        if len(points) <= LABELLED:
            axes.annotate(f"{y:.3g}", (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.axhline(dense, color=INK, linewidth=1, linestyle=":")
    axes.annotate(f"dense {dense:.2f}", (0, dense), (4, 3), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="left", fontsize=8)  # fmt: skip
    if max(dense, *perplexities) > 4 * min(dense, *perplexities):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("active share of the decoder parameters")
    axes.set_ylabel("perplexity")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.margins(x=0.08, y=0.1)
    if planned in [k for _, _, k in points]:
        axes.legend(loc="upper right")
    unit = "inputs" if inputs else "experts"
    most = "" if inputs else " ({} experts in the layer that uses most)"
    numbers = ", ".join(f"{y:.4g} at {x:.0%}{most.format(k)}" for x, y, k in points)
    refitted = " Projections were refitted for the planned number, so with all experts it need not be the dense model."
    return CaptionedFigure(
        "dial",
        "Quality against active parameters, one folder",
        f"Line chart of perplexity by active share; the dense model has {dense:.2f}. {numbers}.",
        f"The same weights with more or fewer {unit} for each token, a number that is chosen when the model is loaded. Lower "
        f"is better, and the dotted line is the dense model{'' if inputs else ', the square the planned number'}. Look for the "
        f"share at which the line begins to climb.{refitted if {REPAIRED, FINETUNED} & plan.notes.keys() else ''}",
        figure,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def _smooth(values: Sequence[float]) -> list[float]:
    """Running median over a twentieth of the run: it shows the trend of what jumps from step to step."""
    reach = max(1, len(values) // 40)
    return [median(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


TERMS = {
    "distill": "distill (KL, nats)",
    "budget": "budget",
    "coverage": "coverage",
    "balance": "balance",
    "active_fraction": "active share",
}


@styled
def training_figure(metrics: Rows, num_experts: int, active: float) -> CaptionedFigure | None:
    """The four terms of the loss, unweighted, and the sampled active share, by step; None with fewer than two rows.

    A row is one of metrics.jsonl; rows of skipped steps, or with a value that is not a finite number, are left out.
    """
    needed = ("step", *TERMS)
    whole = [row for row in metrics if not row.get("skipped") and isinstance(row.get("step"), int)]
    rows = [row for row in whole if all(_is_number(row.get(key)) for key in needed)]
    if len(rows) < 2:
        return None
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    axes = figure.subplot_mosaic([["distill", "distill"], ["budget", "coverage"], ["balance", "active_fraction"]],
                                 sharex=True, height_ratios=[1.3, 1, 1])  # fmt: skip
    steps = [row["step"] for row in rows]
    for n, (key, title) in enumerate(TERMS.items()):
        values = [row[key] for row in rows]
        axes[key].plot(steps, values, color=COLORS[0], linewidth=0.7, alpha=0.35)
        axes[key].plot(steps, _smooth(values), color=COLORS[0])
        axes[key].set_title(title, loc="left")
        if n >= 3:
            axes[key].set_xlabel("step")
    for key in ("distill", "budget", "coverage"):
        axes[key].set_ylim(bottom=0)
    levels = (
        ("balance", 1 / num_experts, f"{1 / num_experts:.3g}: even"),
        ("active_fraction", active, f"{active:.0%} requested"),
    )
    for key, level, note in levels:
        axes[key].axhline(level, color=INK, linewidth=1, linestyle=":")
        axes[key].set_title(f"{TERMS[key]} ({note})", loc="left")
        axes[key].margins(y=0.2)
    axes["active_fraction"].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    first, last = ({key: _smooth([row[key] for row in rows])[i] for key in TERMS} for i in (0, -1))
    return CaptionedFigure(
        "training",
        "Training, term by term",
        f"Line charts over {steps[-1]:,} steps, from first to last: "
        + "; ".join(f"{title} {first[key]:.3g} to {last[key]:.3g}" for key, title in TERMS.items()) + ".",
        "Pale: each logged step; dark: running median. Distill is the KL divergence of the masked model from the dense one, "
        "in nats, and should fall; every step draws other masks and other text, so it jumps. Budget and coverage are "
        "penalties that should reach zero; balance falls towards the dotted line, at which all experts get the same number "
        "of tokens. Look for a distill that still falls at the right end: more steps would help.",
        figure,
    )  # fmt: skip


@styled
def usage_figure(usage: ExpertUsage, by_source: Mapping[str, ExpertUsage] | None = None) -> CaptionedFigure:
    """Share of the tokens that each expert of each layer got: over all text, then for each source."""
    found = {f"all {usage.tokens:,} tokens": usage}
    if by_source and len(by_source) > 1:
        found |= {f"{source} ({of_source.tokens:,} tokens)": of_source for source, of_source in by_source.items()}
    shares = usage.token_shares()
    order = [list(range(len(row))) for row in shares]
    if usage.per_token:
        # many small experts without a name: from the most used one down, in all panels alike
        for ids, row in zip(order, shares, strict=True):
            ids.sort(key=lambda n: -row[n])
    panels = {
        title: [[row[n] for n in ids] for row, ids in zip(panel.token_shares(), order, strict=True)]
        for title, panel in found.items()
    }
    figure = _heat_map(panels, "experts by use" if usage.per_token else "expert")
    experts, layers, unused = len(shares[0]), len(shares), sum(share == 0 for row in shares for share in row)
    sources = f"Then the same for each of {len(panels) - 1} sources." if len(panels) > 1 else ""
    differ = "Panels that differ show experts that specialize in one kind of text." if len(panels) > 1 else ""
    if usage.per_token:
        alt, caption = _fine_usage_words(usage, unused)
    else:
        busiest = max(range(layers), key=lambda i: max(shares[i]))
        alt = (
            f"Heat map of {layers} layers by {experts} experts. The busiest is expert "
            f"{shares[busiest].index(max(shares[busiest]))} of layer {busiest} with {max(shares[busiest]):.0%} of "
            f"{usage.tokens:,} tokens; {unused} experts got none."
        )
        caption = (
            f"Even use would be {100 / experts:.3g} % everywhere. Look for columns with one light cell, in which routing "
            "hardly chooses, and for crosses: experts that got no token."
        )
    return CaptionedFigure("usage", "Use of the experts", f"{alt} {sources}", f"{caption} {differ}", figure)


def _fine_usage_words(usage: ExpertUsage, unused: int) -> tuple[str, str]:
    """Alt text and caption of the use of fine-grained experts."""
    experts, layers, per_token = len(usage.shares[0]), len(usage.shares), usage.per_token
    whole = [i for i, k in enumerate(per_token) if k == experts]
    chosen = [k for k in per_token if k < experts] or per_token
    span = f"{min(chosen)}" if min(chosen) == max(chosen) else f"{min(chosen)} to {max(chosen)}"
    even = " to ".join(dict.fromkeys(f"{100 * k / experts:.0f}" for k in (min(chosen), max(chosen))))
    alt = (
        f"Heat map of {layers} layers by {experts} experts, in each layer from the most used expert down. A token uses "
        f"{span} of them; {len(whole)} layers use all. {unused} experts got none of {usage.tokens:,} tokens."
    )
    caption = (
        f"In each column the most used expert is at the top, in every panel in the order of the first one. Even use would be "
        f"{even} % of the tokens in a layer that chooses {span} of {experts} experts"
        f"{', and 100 % where all are used' if whole else ''}. Look for columns that fall from 100 % to 0 at once, in which "
        "routing hardly chooses, and for crosses: experts that got no token."
    )
    return alt, caption


def _heat_map(panels: Mapping[str, Shares], label: str) -> Figure:
    """One panel for each title, layers from left to right, experts from top to bottom; crosses where nothing is."""
    first = next(iter(panels.values()))
    experts, layers = len(first[0]), len(first)
    highest = max(max(row) for panel in panels.values() for row in panel)
    top = min(highest, max(3 / experts, max(map(max, first))))  # a few extremes would darken all the rest
    height = 0.55 + 0.13 * min(16, max(4, experts))
    figure, axes = canvas(height * len(panels) + 0.6, len(panels), sharex=True)
    for panel_axes, (title, rows) in zip(axes, panels.items(), strict=True):
        image = panel_axes.imshow([list(column) for column in zip(*rows, strict=True)], cmap=HEAT, vmin=0, vmax=top,
                           interpolation="none", aspect="auto")  # fmt: skip
        panel_axes.set_title(short(title, 60), loc="left")
        panel_axes.set_ylabel(label)
        panel_axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        panel_axes.grid(False)
        dead = [(layer, n) for layer, row in enumerate(rows) for n, share in enumerate(row) if share == 0]
        if dead:
            panel_axes.plot(*zip(*dead, strict=True), color="white", marker="x", linestyle="none", markersize=4)
    layer_axis(axes[-1], layers)
    bar = figure.colorbar(image, ax=axes, aspect=30, label="share of the tokens of a layer",
                          extend="max" if highest > top else "neither")  # fmt: skip
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure


@styled
def cost_figure(cost: Mapping[str, Any]) -> CaptionedFigure | None:
    """What the conversion took, from the run's cost.json; None if that is not known."""
    seconds = cost.get("seconds", {})
    if not seconds:
        return None
    figure, (axes,) = canvas(0.75 + 0.33 * len(seconds))
    names, values = list(seconds), [value / 60 for value in seconds.values()]
    axes.barh(names, values, color=COLORS[0], height=0.65)
    for y, value in enumerate(values):
        axes.annotate(f"{value:.1f} min" if value >= 1 else f"{60 * value:.0f} s", (value, y), (3, 0),
                      textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlabel("minutes")
    axes.margins(x=0.14)
    axes.grid(False, axis="y")
    facts = [f"{sum(values):.1f} minutes in all", *cost_facts(cost)]
    return CaptionedFigure(
        "cost",
        "What the conversion took",
        "Bar chart of seconds by stage: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()) + ".",
        f"{'; '.join(facts)}. Look for the longest bar: a file of text shortens the first, fewer tokens shorten the repair, "
        "and fewer steps or tokens shorten learning.",
        figure,
    )


def cost_facts(cost: Mapping[str, Any]) -> list[str]:
    """Phrases on tokens, memory and device, as far as they are known."""
    tokens, device = cost.get("tokens", {}), cost.get("device")
    phrases = [f"{count:,} tokens of {name}" for name, count in tokens.items()]
    for key, place in (("peak_memory_bytes", "main memory"), ("device_peak_memory_bytes", "device memory")):
        if cost.get(key):
            phrases.append(f"{format_bytes(cost[key])} of {place} at the peak")
    if device:
        threads = cost.get("threads", 0) if device == "cpu" else 0
        phrases.append(f"on {device}" + (f" with {threads} thread{'s' * (threads > 1)}" if threads else ""))
    if cost.get("resumed"):
        phrases.append("only what came after the last --resume is counted")
    return phrases


@styled
def throughput_figure(rows: Rows) -> CaptionedFigure | None:
    """How many times as fast as the dense model the MoE is, from the benchmark's rows; None if there is none.

    A row is {phase ("prefill" or "decode"), batch, prompt (tokens), dtype, dense_s, moe_s, ratio = dense_s / moe_s,
    ratio_low, ratio_high}, and same_kernel_s where the MoE was timed with everything in the same kernel.
    """
    if not rows:
        return None
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    longest = max(sum(row["phase"] == phase for row in rows) for phase in phases)
    figure, axes = canvas(0.7 + (0.3 + 0.26 * longest) * len(phases), len(phases), sharex=True)
    for phase_axes, phase in zip(axes, phases, strict=True):
        chosen = [row for row in rows if row["phase"] == phase]
        for y, row in enumerate(chosen):
            faster = row["ratio"] >= 1
            phase_axes.plot(
                [row["ratio_low"], row["ratio_high"]], [y, y], color=LIGHT, linewidth=4, solid_capstyle="butt"
            )
            phase_axes.plot(
                row["ratio"], y, color=COLORS[0 if faster else 1], marker="o" if faster else "s", markersize=5
            )
            if whole := row.get("same_kernel_s"):
                phase_axes.plot(row["dense_s"] / whole, y, color=INK, marker="|", markersize=10)
            phase_axes.annotate(f"{row['ratio']:.2f}", (max(row["ratio"], row["ratio_high"]), y), (5, 0),
                         textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        phase_axes.set_yticks(
            range(len(chosen)), [f"{row['batch']} x {row['prompt']}, {short(row['dtype'], 10)}" for row in chosen]
        )
        phase_axes.set_ylim(len(chosen) - 0.5, -0.5)
        phase_axes.axvline(1, color=INK, linewidth=1, linestyle=":")
        phase_axes.set_title(f"{phase} (sequences x prompt tokens)", loc="left")
        phase_axes.grid(False, axis="y")
        phase_axes.margins(x=0.12)
    axes[-1].set_xlabel("times as fast as the dense model")
    ratios = "; ".join(f"{r['phase']} {r['batch']} x {r['prompt']} {r['dtype']}: {r['ratio']:.2f}" for r in rows)
    kernel = (
        " The upright line is the MoE with all experts or inputs in the same kernel: up to it the kernel gains, from it to the "
        "dot the choice."
    )
    if not any(row.get("same_kernel_s") for row in rows):
        kernel = ""
    return CaptionedFigure(
        "throughput",
        "Speed beside the dense model",
        f"Dot chart of the dense model's time over the MoE's, above 1 is faster. {ratios}.",
        "Round blue dots right of the dotted line are faster than the dense model, square orange ones slower; the bar is "
        "the middle half of the repetitions. Look for the batch sizes you will use: a few tokens and many behave differently."
        + kernel,
        figure,
    )
