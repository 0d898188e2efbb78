"""Figures: what stands in them is what was given, their files are the same twice, and their words are escaped."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.patches import Rectangle
from test_report import some_plan

from conftest import make_pico, make_plan
from tomoe.budget import decoder_params
from tomoe.evaluation.results import Measurement, Row
from tomoe.model.shape import ModelShape
from tomoe.plans import InputsPlan, PathPoint
from tomoe.report import figures, style
from tomoe.report.figures import all_figures, layers_figure
from tomoe.report.style import CaptionedFigure

pytestmark = pytest.mark.slow


def drawn_lines(drawn: CaptionedFigure) -> dict[str, list[float]]:
    """Heights of every labelled line."""
    lines = drawn.figure.axes[0].get_lines()
    return {str(line.get_label()): [float(y) for y in line.get_ydata()] for line in lines}  # type: ignore[union-attr]


def bars(drawn: CaptionedFigure) -> list[float]:
    return [patch.get_height() for patch in drawn.figure.axes[0].patches if isinstance(patch, Rectangle)]


def check(drawn: CaptionedFigure) -> None:
    """What holds for every figure: texts, and SVG that parses and is the same twice."""
    assert drawn.title
    assert len(drawn.alt) > 40
    words = drawn.title + drawn.alt + drawn.caption
    assert drawn.name == "training" or not re.search("learn|train", words, re.IGNORECASE), "no plan here was trained"
    assert not any(axes.get_legend() for axes in drawn.figure.axes), "it would lie over the plot"
    svg = drawn.svg
    assert svg.encode() == style._written(drawn.figure, "svg")
    ET.fromstring(svg)
    assert "<img" not in svg
    assert "<script" not in svg
    ids = re.findall(r' id="([^"]+)"', svg)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', svg)) <= set(ids)


def active_row(perplexity: float, active: float, k: int | None) -> Row:
    facts: Any = {"active_share": active}
    return Row(Measurement(perplexity, None, 0.0, 10, 1, 8), facts, experts_per_token=k)


DENSE = make_pico("llama")
FINE = make_plan(DENSE, "off", form="fine")  # of 8 experts a token uses 3 and 2
CURVE = [active_row(16.25, 1.0, None), active_row(40.0, 0.5, 3), active_row(90.0, 0.3, 1), active_row(16.5, 1.0, 8)]


def test_the_curve_draws_each_number_of_experts() -> None:
    drawn = figures.active_figure(CURVE, FINE)
    assert drawn is not None
    assert drawn.figure.axes[0].get_yscale() == "log"
    lines = [[tuple(point) for point in line.get_xydata()] for line in drawn.figure.axes[0].get_lines()]
    assert lines[0] == [(0.3, 90.0), (0.5, 40.0), (1.0, 16.5)]
    assert lines[1] == [(0.5, 40.0)]  # the plan's 3
    assert [y for _, y in lines[2]] == [16.25, 16.25]
    assert "dense model, 16.25" in drawn.svg
    assert "90 at 30% (1 experts" in drawn.alt
    assert "refitted" not in drawn.caption
    check(drawn)
    repaired = figures.active_figure(CURVE, replace(FINE, notes={"repair": {}}))
    assert repaired is not None
    assert "need not be the dense model" in repaired.caption
    assert figures.active_figure(CURVE[:2], FINE) is None
    assert figures.active_figure([], FINE) is None
    assert [figure.name for figure in all_figures(FINE, curve=CURVE)] == ["active", "layers"]


def test_files_are_the_same_twice_and_no_setting_elsewhere_changes_them(tmp_path: Path) -> None:
    def files() -> list[bytes]:
        drawn = figures.active_figure(CURVE, FINE)
        assert drawn is not None
        return [file.read_bytes() for file in style.save(drawn, tmp_path)]

    first = files()
    with matplotlib.rc_context({"font.size": 20, "svg.hashsalt": "x", "axes.grid": False}):
        again = files()
    assert first == again
    assert first[1].startswith(b"\x89PNG")
    assert b"<dc:date>" not in first[0]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["active.png", "active.svg"]


def test_layers_of_overlapping_experts_show_one_expert_within_all_of_them() -> None:
    plan = some_plan(DENSE, per_token=False)
    drawn = layers_figure(plan)
    assert bars(drawn) == pytest.approx([1, 1, *(layer.union / 48 for layer in plan.counts), 0.5, 0.5])
    lines = drawn_lines(drawn)
    assert (lines["Q/K dims"], lines["V/O dims"]) == ([1, 0.75], [1, 0.625])
    assert not {"Q/K dims", "V/O dims"} & drawn_lines(layers_figure(make_plan(DENSE, "off"))).keys(), "they are whole"
    assert "Q/K dims: 75% to 100%" in drawn.alt
    check(drawn)


def test_layers_of_fine_grained_experts_show_the_shared_part_and_what_is_chosen() -> None:
    drawn = layers_figure(FINE)
    assert bars(drawn) == pytest.approx([1, 1, *((16 + k * 4) / 48 for k in (3, 2)), 16 / 48, 16 / 48])
    assert "experts that a token chooses: 50% to 58%" in drawn.alt
    check(drawn)


def test_layers_of_inputs_are_lines() -> None:
    shape, names = ModelShape(2, 32, 48, 4, 4, 8, 8, True), {"up": ["mlp.up_proj"], "down": ["mlp.down_proj"]}
    widths, columns = {"up": [32, 32], "down": [48, 48]}, {"up": [48, 48], "down": [32, 32]}
    fewer = {"up": [16, 32], "down": [12, 48]}
    least = 1 - (16 * 48 + 36 * 32) / decoder_params(shape)
    plan = InputsPlan(shape, names, widths, columns, (PathPoint(1.0, widths), PathPoint(least, fewer)), least)
    drawn = layers_figure(plan)
    assert bars(drawn) == []
    assert drawn_lines(drawn) | {"gate and up": [0.5, 1], "down": [0.25, 1]} == drawn_lines(drawn)
    check(drawn)


METRICS = [{"step": step, "distill": 3.0 / step} for step in range(1, 101)]


def test_training_draws_the_loss_and_passes_over_what_is_not_a_number() -> None:
    spoiled = [
        {"step": 101, "distill": 1.0, "skipped": True},
        {"step": 102, "distill": None},
        {"step": 103},
        {"step": 104, "distill": float("inf")},
        {"step": 105, "distill": 10**400},
        {"step": "106", "distill": 1.0},
    ]
    drawn = figures.training_figure([*METRICS, *spoiled])
    assert drawn is not None
    raw, smooth = drawn.figure.axes[0].get_lines()
    assert [float(y) for y in raw.get_ydata()] == [3.0 / step for step in range(1, 101)]
    assert float(smooth.get_ydata()[50]) == 3.0 / 51  # the median of what only falls
    assert "from 1.5 to 0.0303 nats" in drawn.alt
    check(drawn)
    assert figures.training_figure(METRICS[:1]) is None
    assert figures.training_figure([{"step": step, "distill": 0.0} for step in (1, 2)]) is None
