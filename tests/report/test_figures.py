"""Figures: what stands in them is what was given, their files are the same twice, and their words are escaped."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from torch import Tensor

from tomoe.evaluation.results import ExpertUsage, Measurement, Row
from tomoe.model.shape import ModelShape
from tomoe.plan import LayerPlan, Plan
from tomoe.report import figures, plan_figures, style
from tomoe.report.all_figures import all_figures
from tomoe.report.style import INK, CaptionedFigure

pytestmark = pytest.mark.slow

EVIL = "</script><img src=x onerror=alert(1)> $\\frac$ \"&'"


def drawn_lines(drawn: CaptionedFigure, axes: int = 0) -> dict[str, list[tuple[float, float]]]:
    """Points of every labelled line."""
    lines = drawn.figure.axes[axes].get_lines()
    return {str(x.get_label()): [(float(a), float(b)) for a, b in x.get_xydata()] for x in lines}  # type: ignore[union-attr]


def check(drawn: CaptionedFigure) -> None:
    """What holds for every figure: texts, and SVG that parses and is the same twice."""
    assert drawn.title
    assert len(drawn.alt) > 40
    assert "Look" in drawn.caption
    svg = drawn.svg
    assert svg == style._to_svg(drawn.figure)
    ET.fromstring(svg)
    assert "<img" not in svg
    assert "<script" not in svg
    ids = re.findall(r' id="([^"]+)"', svg)
    apart = [name for name in ids if not name.startswith("image")]  # two images of equal bytes have one id
    assert len(set(apart)) == len(apart)
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', svg)) <= set(ids)


def dial_row(perplexity: float, active: float, k: int | None) -> Row:
    facts: Any = {"active_share": active}
    return Row(Measurement(perplexity, None, 0.0, 10, 1, 8), facts, experts_per_token=k)


DIAL = [dial_row(16.25, 1.0, None), dial_row(40.0, 0.5, 4), dial_row(90.0, 0.3, 1), dial_row(16.5, 1.0, 8)]


def test_the_dial_draws_each_number_of_experts() -> None:
    plan, rows = make_fine_plan(), DIAL
    drawn = figures.dial_figure(rows, plan)
    assert drawn is not None
    assert drawn.figure.axes[0].get_yscale() == "log"
    lines = [[tuple(point) for point in line.get_xydata()] for line in drawn.figure.axes[0].get_lines()]
    assert lines[0] == [(0.3, 90.0), (0.5, 40.0), (1.0, 16.5)]
    assert lines[1] == [(1.0, 16.5)]  # the plan's 8
    assert [y for _, y in lines[2]] == [16.25, 16.25]
    assert "dense 16.25" in drawn.svg
    assert "90 at 30% (1 experts" in drawn.alt
    assert "refitted" not in drawn.caption
    check(drawn)
    repaired = figures.dial_figure(rows, replace(plan, notes={"repair": {}}))
    assert repaired is not None
    assert "need not be the dense model" in repaired.caption
    assert figures.dial_figure(rows[:2], plan) is None
    assert figures.dial_figure([], plan) is None
    assert [figure.name for figure in all_figures(plan, dial=rows)] == ["dial", "width", "parts"]


def test_files_are_the_same_twice_and_no_setting_elsewhere_changes_them(tmp_path: Path) -> None:
    def files() -> list[bytes]:
        drawn = figures.dial_figure(DIAL, make_fine_plan())
        assert drawn is not None
        return [file.read_bytes() for file in style.save(drawn, tmp_path)]

    first = files()
    with matplotlib.rc_context({"font.size": 20, "svg.hashsalt": "x", "axes.grid": False}):
        again = files()
    assert first == again
    assert first[1].startswith(b"\x89PNG")
    assert b"<dc:date>" not in first[0]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dial.png", "dial.svg"]


def make_plan(
    num_layers: int = 3, experts: int = 4, mlp: int = 48, values: tuple[int, ...] = (), **notes: object
) -> Plan:
    """Random neuron sets, wider in later layers; of layer i only the first `values[i]` V/O dims."""
    generator = torch.Generator().manual_seed(0)
    shape, layers = ModelShape(num_layers, 32, mlp, 4, 4, 8, 8, True), []
    for i in range(num_layers):
        neurons = torch.zeros(experts, mlp, dtype=torch.bool)
        for row in neurons:
            row[torch.randperm(mlp, generator=generator)[: mlp // 4 + i]] = True
        kept = torch.arange(8) < (values[i] if values else 8)
        layers.append(LayerPlan(neurons, torch.randn(experts, 32, generator=generator), torch.ones(4, dtype=torch.bool),
                                kept, int(kept.sum())))  # fmt: skip
    return Plan(shape, tuple(layers), notes=notes)


def make_fine_plan() -> Plan:
    """Two layers of 48 neurons: 8 of them shared, and 8 experts of 5, of which a token uses 2 and 8."""
    shape, expert = ModelShape(2, 32, 48, 4, 4, 8, 8, True), torch.arange(-8, 40).div(5, rounding_mode="floor")
    masks = expert == torch.arange(8)[:, None]
    whole, dims = torch.ones(4, dtype=torch.bool), torch.ones(8, dtype=torch.bool)
    layers = (
        LayerPlan(
            masks, torch.randn(8, 32), whole, dims, 8, shared_mask=expert < 0, router_bias=torch.zeros(8), top_k=k
        )
        for k in (2, 8)
    )
    return Plan(shape, tuple(layers))


def bars(drawn: CaptionedFigure) -> list[float]:
    return [patch.get_height() for patch in drawn.figure.axes[0].patches if isinstance(patch, Rectangle)]


def image(drawn: CaptionedFigure, axes: int = 0) -> Tensor:
    (shown,) = (child for child in drawn.figure.axes[axes].get_children() if isinstance(child, AxesImage))
    return torch.from_numpy(np.ma.filled(shown.get_array(), np.nan))


METRICS = [
    {"step": step, "distill": 3.0 / step, "budget": 0.1, "coverage": 0.2, "balance": 0.25, "active_fraction": 0.7}
    for step in range(1, 101)
]  # fmt: skip


def test_widths_and_unions_are_those_of_the_plan() -> None:
    plan = make_plan(values=(8, 8, 2))
    drawn = plan_figures.width_figure(plan)
    lines = drawn_lines(drawn)
    assert [y for _, y in lines["MLP neurons"]] == [12 / 48, 13 / 48, 14 / 48]
    assert [y for _, y in lines["V/O dims"]] == [1, 1, 0.25]
    assert "25% to 100%" in drawn.alt
    assert "Q/K and V/O dims (kept whole)" in drawn_lines(plan_figures.width_figure(make_plan()))
    check(drawn)
    union = plan_figures.union_figure(plan)
    assert bars(union) == [layer.union / 48 for layer in plan.counts] + [12 / 48, 13 / 48, 14 / 48]
    check(union)
    value = plan_figures.value_figure(plan)
    assert value is not None
    assert bars(value) == [8, 8, 2]
    check(value)
    assert plan_figures.value_figure(make_plan()) is None


def test_spread_of_trained_widths_is_drawn_where_the_plan_knows_it() -> None:
    assert plan_figures.expert_width_figure(make_plan()) is None
    drawn = plan_figures.expert_width_figure(make_plan(expert_widths=[[10, 12, 13, 14], [13] * 4, [2, 14, 20, 28]]))
    assert drawn is not None
    assert "layer 2: 2 to 28 neurons, after extraction 14" in drawn.alt
    medians = [line.get_ydata()[0] for line in drawn.figure.axes[1].get_lines() if line.get_color() == INK]
    assert medians == [0.5, 0, 3]  # less the final widths: 12, 13, 14
    check(drawn)


@pytest.mark.parametrize(
    "note", [7, "wide", {}, [], [[1]] * 2, [[], [1], [1]], [[1], [1], ["1"]], [[1], [1], [True]], [[1], [1], [49]], [[1], 1, [1]],
             [[1], [1], [-1]], [[1], [1], [10**400]], [[1], [1], [1.5]]],
)  # fmt: skip
def test_a_note_that_holds_no_widths_is_not_drawn(note: object) -> None:
    assert plan_figures.expert_width_figure(make_plan(expert_widths=note)) is None


def test_likeness_of_experts_is_counted_in_neurons() -> None:
    plan = make_plan(num_layers=9)
    sets = [[set(row.nonzero()[:, 0].tolist()) for row in layer.expert_masks] for layer in plan.layers]
    for layer, own in zip(plan.layers, sets, strict=True):
        expected = torch.tensor([[len(a & b) / len(a | b) for b in own] for a in own])
        torch.testing.assert_close(plan_figures.jaccard(layer.expert_masks), expected)
    drawn = plan_figures.similarity_figure(plan)
    assert drawn is not None
    shown = image(drawn, 1)
    assert shown.shape == (4 + 2 + 4, 8 * 5 - 1)  # nine layers: a row of eight, then one
    assert float(shown[6, 1]) == pytest.approx(len(sets[8][0] & sets[8][1]) / len(sets[8][0] | sets[8][1]))
    assert shown[0, 0].isnan()  # an expert is like itself
    check(drawn)
    assert plan_figures.similarity_figure(make_plan(experts=1)) is None


def test_usage_shows_each_source_and_crosses_the_dead() -> None:
    shares = [[0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]]
    usage = ExpertUsage(shares, 1000)
    drawn = figures.usage_figure(usage)
    torch.testing.assert_close(image(drawn), torch.tensor(shares).T.to(image(drawn).dtype))
    assert drawn.figure.axes[0].get_lines()[0].get_xydata().tolist() == [[0, 2], [0, 3]]
    assert "2 experts got none" in drawn.alt
    assert len(drawn.figure.axes) == 2  # and the scale
    both = figures.usage_figure(usage, {"a": ExpertUsage(shares, 600), EVIL: ExpertUsage(shares[::-1], 400)})
    assert [axes.get_title(loc="left") for axes in both.figure.axes[:3]] == [
        "all 1,000 tokens", "a (600 tokens)", f"{EVIL} (400 tokens)"[:59] + "…",
    ]  # fmt: skip
    assert len(figures.usage_figure(usage, {"a": usage}).figure.axes) == 2  # one source is all
    check(both)


def test_fine_grained_experts_are_drawn_by_use_and_as_shares_of_the_tokens() -> None:
    usage = ExpertUsage([[0.1, 0.5, 0.0, 0.4], [0.25] * 4], 1000, [2, 4])
    other = ExpertUsage([[0.5, 0.25, 0.25, 0.0], [0.25] * 4], 400, [2, 4])
    drawn = figures.usage_figure(usage, {"a": other, EVIL: usage})
    torch.testing.assert_close(image(drawn), torch.tensor([[1.0, 0.8, 0.2, 0.0], [1.0] * 4]).T.to(image(drawn).dtype))
    # in the order of the first panel: experts 1, 3, 0, 2
    assert image(drawn, 1)[:, 0].tolist() == [0.5, 0.0, 1.0, 0.5]
    assert drawn.figure.axes[0].get_lines()[0].get_xydata().tolist() == [[0, 3]]
    assert "A token uses 2 of them; 1 layers use all. 1 experts got none of 1,000 tokens" in drawn.alt
    assert "50 % of the tokens" in drawn.caption
    check(drawn)
    wide = ExpertUsage([[1 / 64] * 64] * 2, 1000, [8, 8])
    assert figures.usage_figure(wide).figure.get_figheight() < 4


def test_the_parts_of_fine_grained_experts() -> None:
    plan = make_fine_plan()
    drawn = plan_figures.parts_figure(plan)
    assert drawn is not None
    size = plan.shape.mlp_size
    used = [(8 + k * 5) / size for k in (2, 8)]
    assert bars(drawn) == pytest.approx([1.0, 1.0, *used, 8 / size, 8 / size])
    assert "2 to 8 of 8 experts" in drawn.alt
    check(drawn)
    assert [figure.name for figure in all_figures(make_plan())] == ["width", "union", "similarity"]
    assert [figure.name for figure in all_figures(plan)] == ["width", "parts"]


def test_training_draws_each_term_and_passes_over_what_is_not_a_number() -> None:
    spoiled = [
        {**METRICS[0], "step": 101, "skipped": True},
        {**METRICS[0], "step": 102, "distill": None},
        {"step": 103},
        {**METRICS[0], "step": 104, "budget": float("inf")},
        {**METRICS[0], "step": 105, "balance": 10**400},
        {**METRICS[0], "step": "106"},
    ]
    drawn = figures.training_figure([*METRICS, *spoiled], 4, 0.7)
    assert drawn is not None
    raw, smooth = drawn.figure.axes[0].get_lines()
    assert [float(y) for y in raw.get_ydata()] == [3.0 / step for step in range(1, 101)]
    assert float(smooth.get_ydata()[50]) == 3.0 / 51  # the median of what only falls
    assert "distill (KL, nats) 1.5 to 0.0303" in drawn.alt
    check(drawn)
    assert figures.training_figure(METRICS[:1], 4, 0.7) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_panels_are_laid_out_the_same_each_time(seed: int) -> None:
    draws = torch.rand(4, 5, generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [{"step": i, **dict(zip(figures.TERMS, draw, strict=True))} for i, draw in enumerate(draws)]
    drawn = [figures.training_figure(rows, 2, 0.5) for _ in range(3)]
    assert len({one.svg for one in drawn if one is not None}) == 1


def test_cost_says_what_it_knows() -> None:
    known = {
        "seconds": {"text": 10.0, "learning": 120.0}, "tokens": {"text": 5000}, "peak_memory_bytes": 1_500_000_000,
        "device": "cpu", "threads": 2, "resumed": True,
    }  # fmt: skip
    drawn = figures.cost_figure(known)
    assert drawn is not None
    for words in ("2.2 minutes in all", "5,000 tokens of text", "1.50 GB", "2 threads", "last --resume"):
        assert words in drawn.caption
    check(drawn)
    assert figures.cost_figure({}) is None


def test_throughput_says_which_cells_are_slower() -> None:
    cell = {"prompt": 128, "dtype": "bfloat16", "dense_s": 1.0}
    rows = [
        {**cell, "phase": "prefill", "batch": 8, "moe_s": 0.8, "ratio": 1.25, "ratio_low": 1.2, "ratio_high": 1.3},
        {**cell, "phase": "decode", "batch": 1, "moe_s": 1.25, "ratio": 0.8, "ratio_low": 0.7, "ratio_high": 0.9},
    ]
    drawn = figures.throughput_figure(rows)
    assert drawn is not None
    markers = [[line.get_marker() for line in axes.get_lines()[1:2]] for axes in drawn.figure.axes]
    assert markers == [["o"], ["s"]]
    assert "decode 1 x 128 bfloat16: 0.80" in drawn.alt
    assert "same kernel" not in drawn.caption
    marked = figures.throughput_figure([{**rows[0], "same_kernel_s": 0.9, "choice_ratio": 1.125}, rows[1]])
    assert marked is not None
    assert [list(axes.get_lines()[2].get_xdata()) for axes in marked.figure.axes] == [[1 / 0.9], [1, 1]]
    assert "all experts or inputs in the same kernel" in marked.caption
    check(drawn)
    assert figures.throughput_figure([]) is None
