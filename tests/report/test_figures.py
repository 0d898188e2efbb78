"""Figures: what stands in them is what was given, their files are the same twice, and their words are escaped."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

from tomoe.evaluation.results import Measurement, Row
from tomoe.model.shape import ModelShape
from tomoe.plan import LayerPlan, Plan
from tomoe.report import figures, style
from tomoe.report.style import CaptionedFigure

pytestmark = pytest.mark.slow


def check(drawn: CaptionedFigure) -> None:
    """What holds for every figure: texts, and SVG that parses and is the same twice."""
    assert drawn.title
    assert len(drawn.alt) > 40
    assert not any(axes.get_legend() for axes in drawn.figure.axes), "it would lie over the plot"
    svg = drawn.svg
    assert svg == style._to_svg(drawn.figure)
    ET.fromstring(svg)
    assert "<img" not in svg
    assert "<script" not in svg
    ids = re.findall(r' id="([^"]+)"', svg)
    assert len(set(ids)) == len(ids)
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
    assert "dense model, 16.25" in drawn.svg
    assert "90 at 30% (1 experts" in drawn.alt
    assert "refitted" not in drawn.caption
    check(drawn)
    repaired = figures.dial_figure(rows, replace(plan, notes={"repair": {}}))
    assert repaired is not None
    assert "need not be the dense model" in repaired.caption
    assert figures.dial_figure(rows[:2], plan) is None
    assert figures.dial_figure([], plan) is None


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
