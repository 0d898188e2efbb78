"""Figures: what stands in them is what was given, their files are the same twice, and their words are escaped."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import pytest

from tomoe.errors import UserError
from tomoe.report import figures, picture
from tomoe.report.picture import INK, Picture

EVIL = "</script><img src=x onerror=alert(1)> $\\frac$ \"&'"
ACCURACY = [
    {"label": "carved", "active_share": 0.7, "perplexity": 30.2, "dense_perplexity": 16.25},
    {"label": "carved", "active_share": 0.5, "perplexity": 81.1, "dense_perplexity": 16.25},
    {"label": EVIL, "active_share": 0.6, "perplexity": 25.2, "dense_perplexity": 16.25},
]


def drawn_lines(drawn: Picture, axes: int = 0) -> dict[str, list[tuple[float, float]]]:
    """Points of every labelled line."""
    lines = drawn.figure.axes[axes].get_lines()
    return {str(x.get_label()): [(float(a), float(b)) for a, b in x.get_xydata()] for x in lines}  # type: ignore[union-attr]


def check(drawn: Picture) -> None:
    """What holds for every figure: words, and SVG that parses, inline and as a file."""
    assert drawn.title
    assert len(drawn.alt) > 40
    assert "Look" in drawn.caption
    svg = picture.to_svg(drawn)
    assert svg == picture.to_svg(drawn)
    inline = str(picture.inline_svg(drawn))
    for text in (svg, inline):
        ET.fromstring(text)
        assert "<img" not in text
        assert "<script" not in text
    assert INK not in inline
    assert "<style" not in inline  # it would hold for the whole page
    ids = re.findall(r' id="([^"]+)"', inline)
    assert len(set(ids)) == len(ids)
    assert all(name.startswith(drawn.name + "-") for name in ids)
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', inline)) <= set(ids)


def test_accuracy_draws_the_rows() -> None:
    drawn = figures.accuracy_figure(ACCURACY)
    assert drawn_lines(drawn)["carved"] == [(0.5, 81.1), (0.7, 30.2)]
    assert "81.1 at 50%" in drawn.alt
    assert drawn.figure.axes[0].get_yscale() == "log"
    assert "dense 16.25" in picture.to_svg(drawn)
    check(drawn)


def test_accuracy_on_several_texts_is_against_each_ones_dense_model() -> None:
    other = [ACCURACY[0], {**ACCURACY[0], "label": "other", "perplexity": 20.0, "dense_perplexity": 10.0}]
    drawn = figures.accuracy_figure(other)
    assert drawn_lines(drawn)["other"] == [(0.7, 2.0)]
    assert drawn.figure.axes[0].get_ylabel() == "perplexity / dense perplexity"
    alone = figures.accuracy_figure([{"label": "", "active_share": 0.7, "perplexity": 3.0, "dense_perplexity": None}])
    check(alone)
    with pytest.raises(UserError, match="no row to draw"):
        figures.accuracy_figure([])


def test_files_are_the_same_twice_and_no_setting_elsewhere_changes_them(tmp_path: Path) -> None:
    first = [file.read_bytes() for file in picture.save(figures.accuracy_figure(ACCURACY), tmp_path)]
    with matplotlib.rc_context({"font.size": 20, "svg.hashsalt": "x", "axes.grid": False}):
        again = [file.read_bytes() for file in picture.save(figures.accuracy_figure(ACCURACY), tmp_path)]
    assert first == again
    assert first[1].startswith(b"\x89PNG")
    assert b"<dc:date>" not in first[0]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["accuracy.png", "accuracy.svg"]
