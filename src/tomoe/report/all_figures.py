"""All figures of one conversion, drawn from what its folder holds, and written as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tomoe.evaluation.results import Row
from tomoe.plan import AnyPlan, InputsPlan, Plan
from tomoe.report.figures import Rows, cost_figure, dial_figure, throughput_figure, training_figure, usage_figure
from tomoe.report.plan_figures import (
    expert_width_figure,
    inputs_figure,
    parts_figure,
    similarity_figure,
    union_figure,
    value_figure,
    width_figure,
)
from tomoe.report.style import CaptionedFigure, save

OF_FORM: dict[str, tuple[Callable[[Plan], CaptionedFigure | None], ...]] = {
    "fine": (parts_figure,),
    "overlapping": (union_figure, expert_width_figure, similarity_figure),
}


def all_figures(
    plan: AnyPlan,
    rows: Sequence[Row] = (),
    metrics: Rows = (),
    cost: Mapping[str, Any] | None = None,
    timed: Rows = (),
    dial: Sequence[Row] = (),
) -> list[CaptionedFigure]:
    """Draw every figure that there are numbers for.

    `rows` come from `compare`, `metrics` and `cost` from the run's metrics.jsonl and cost.json, `timed` from the cells of
    benchmark.json, `dial` from dial.json.
    """
    if isinstance(plan, InputsPlan):
        drawn = [dial_figure(dial, plan), throughput_figure(timed), inputs_figure(plan), cost_figure(cost or {})]
        return [figure for figure in drawn if figure is not None]
    active = plan.recipe.get("active", plan.active_fraction())
    figures = [
        dial_figure(dial, plan), throughput_figure(timed), training_figure(metrics, plan.num_experts, active), width_figure(plan),
        *(draw(plan) for draw in OF_FORM[plan.form]), value_figure(plan), _usage(rows), cost_figure(cost or {}),
    ]  # fmt: skip
    return [figure for figure in figures if figure is not None]


def save_all(figures: Sequence[CaptionedFigure], folder: Path) -> None:
    """Write every figure as SVG and PNG into `folder`. Raises UserError if that fails."""
    for figure in figures:
        save(figure, folder)


def _usage(rows: Sequence[Row]) -> CaptionedFigure | None:
    """Draw the routing of the last row that has it."""
    routed = next((row for row in reversed(rows) if row.usage is not None), None)
    if routed is None or routed.usage is None:
        return None
    return usage_figure(routed.usage, routed.usage_by_source)
