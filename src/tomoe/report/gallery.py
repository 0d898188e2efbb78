"""All figures of one conversion, drawn from what its folder holds, and written as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tomoe.evaluation.compare import Row
from tomoe.plan import Plan
from tomoe.report.figures import (
    Rows,
    accuracy_figure,
    cost_figure,
    throughput_figure,
    training_figure,
    usage_figure,
)
from tomoe.report.plan_figures import (
    expert_width_figure,
    similarity_figure,
    union_figure,
    value_figure,
    width_figure,
)
from tomoe.report.style import Picture, save


def figures(
    plan: Plan, rows: Sequence[Row] = (), metrics: Rows = (), cost: Mapping[str, Any] | None = None, timed: Rows = ()
) -> list[Picture]:
    """Those that something is known about. `rows` are of `compare`, the rest as in the run's metrics.jsonl and cost.json
    and in the benchmark's rows.
    """
    asked = plan.recipe.get("active", plan.active_fraction())
    found = [
        _accuracy(rows), throughput_figure(timed), training_figure(metrics, plan.num_experts, asked), width_figure(plan),
        union_figure(plan), expert_width_figure(plan), similarity_figure(plan), value_figure(plan), _usage(rows),
        cost_figure(cost or {}),
    ]  # fmt: skip
    return [picture for picture in found if picture is not None]


def draw(
    plan: Plan, rows: Sequence[Row], metrics: Rows, cost: Mapping[str, Any], timed: Rows, folder: Path
) -> list[Picture]:
    """`figures`, written as SVG and PNG into `folder`. Raises UserError where that fails."""
    drawn = figures(plan, rows, metrics, cost, timed)
    for one in drawn:
        save(one, folder)
    return drawn


def _accuracy(rows: Sequence[Row]) -> Picture | None:
    points = [
        {
            "label": "",
            "active_share": row.facts["active_share"],
            "perplexity": row.measurement.perplexity,
            "dense_perplexity": rows[0].measurement.perplexity,
        }
        for row in rows
        if row.facts["active_share"] is not None
    ]
    return accuracy_figure(points) if len(points) > 1 else None


def _usage(rows: Sequence[Row]) -> Picture | None:
    """Routing of the last row that has it."""
    routed = next((row for row in reversed(rows) if row.usage is not None), None)
    if routed is None or routed.usage is None:
        return None
    by_source = {name: (own.shares, own.tokens) for name, own in routed.usage_by_source.items()}
    return usage_figure(routed.usage.shares, routed.usage.tokens, by_source)
