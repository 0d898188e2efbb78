"""The report page as text: it says what was measured, escapes what it is given, and needs nothing beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from page_samples import EVIL, hostile_facts
from test_warnings import sound_plan

from html_reader import Reader
from tomoe.report import page
from tomoe.report.warnings import find_warnings

pytestmark = pytest.mark.slow

DRAWING = "data:image/svg+xml;base64,"


def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return hostile_facts()


def test_everything_given_is_escaped_and_nothing_else_is_needed(facts: dict[str, Any], tmp_path: Path) -> None:
    written = page.write_page(tmp_path / "out", **facts)
    assert written == tmp_path / "out" / "report.html"
    assert list(written.parent.iterdir()) == [written]
    reader = read(written)
    assert not {"script", "link", "iframe", "object", "form"} & set(reader.tags)
    assert not [name for _, attributes in reader.elements for name in attributes if name.startswith("on")]
    places = reader.values("src") + reader.values("href") + reader.values("xlink:href")
    assert all(place.startswith(DRAWING) for place in places)
    policy = next(value for value in reader.values("content") if "default-src" in value)
    assert policy.endswith("script-src 'none'")
    for start in ("t", "p", "model", "a", "dense", "moe"):
        assert f"{start} {EVIL}" in reader.text


def test_every_figure_is_described(facts: dict[str, Any], tmp_path: Path) -> None:
    reader = read(page.write_page(tmp_path, **facts))
    ids = reader.values("id")
    assert len(set(ids)) == len(ids)
    names = {figure.name for figure in facts["figures"]}
    assert names == {"layers", "training"}
    assert {f"figure-{name}" for name in names} <= set(ids)
    assert reader.tags.count("figcaption") == len(names)
    assert reader.tags.count("figure") == len(names) + 1  # the drawing of the method
    assert [figure.alt for figure in facts["figures"] if figure.alt not in reader.values("alt")] == []
    assert reader.tags.count("img") == len(reader.values("alt"))
    assert "viewport" in reader.values("name")


def test_the_page_shows_the_numbers_and_is_the_same_twice(facts: dict[str, Any], tmp_path: Path) -> None:
    path = page.write_page(tmp_path, **facts)
    first, text = path.read_bytes(), read(path).text
    measured, sizes = facts["rows"][1].measurement, facts["rows"][1].facts
    numbers = (f"{measured.perplexity:.2f}", f"{measured.kl:.4f}", f"{sizes['active_share']:.1%}")
    for words in (*numbers, "2.00 GB", "1.1 min (text 3 s"):
        assert words in text
    assert all(warning.text in text for warning in find_warnings(facts["plan"], facts["rows"]))
    assert f"sha256 {'0' * 16}" in text
    assert page.write_page(tmp_path, **facts).read_bytes() == first


def test_the_verdict_stands_first_then_speed_then_quality(facts: dict[str, Any], tmp_path: Path) -> None:
    *others, moe = facts["rows"]
    worse = replace(moe.measurement, perplexity=2 * others[0].measurement.perplexity)
    rows = [*others, replace(moe, measurement=worse)]
    text = page.write_page(tmp_path, **facts | {"rows": rows}).read_text(encoding="utf-8")
    body = text.partition("<main>")[2]
    loops = "3 of the 8 texts that it wrote end in a loop (dense model: 1)."
    sections = ('id="speed"', 'id="quality"', f"<strong>{loops}", 'id="layers"')
    order = ["Lost: perplexity", "Gained: writing a token", *sections]
    assert loops in body.partition("Gained")[0]
    places = [body.index(words) for words in order]
    assert places == sorted(places)


def test_the_page_leaves_out_what_is_not_there(tmp_path: Path) -> None:
    reader = read(page.write_page(tmp_path, "t", sound_plan()))
    assert "figcaption" not in reader.tags
    assert [attributes["id"] for tag, attributes in reader.elements if tag == "h2"] == ["layers", "how"]
    assert "Quality was not measured." in reader.text
    assert "Speed was not measured: the commands below do it." in reader.text
    assert f"tomoe benchmark a/b {tmp_path.name} --json {tmp_path.name}/benchmark.json" in reader.text


def test_a_report_that_travels_names_no_folder(facts: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "dense").mkdir()
    recipe = facts["plan"].recipe | {"model": str(tmp_path / "dense")}
    recipe["data"] = recipe["data"] | {"sources": [str(tmp_path / "text.txt")]}
    (tmp_path / "text.txt").write_text("x")
    page.write_page(tmp_path, **facts | {"plan": replace(facts["plan"], recipe=recipe)})
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert "text.txt" in text
