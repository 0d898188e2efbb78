"""The report page as text: it says what was measured, escapes what it is given, and needs nothing beside it."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from page_samples import EVIL, hostile_facts

from tomoe.evaluation.routing_trace import RoutingTrace
from tomoe.evaluation.usage import ExpertUsage
from tomoe.model.shape import ModelShape
from tomoe.plan import LayerPlan, Plan
from tomoe.report import page
from tomoe.report.all_figures import all_figures
from tomoe.report.warnings import find_warnings

pytestmark = pytest.mark.slow

VOID = {"meta", "input", "br", "img"}
DRAWING = "data:image/svg+xml;base64,"


class Reader(HTMLParser):
    """Checks nesting, collects tags, attributes and text (that of the script apart)."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = self.script = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.script = data
        else:
            self.text += data

    def values(self, name: str) -> list[str]:
        return [value for _, own, value in self.attributes if own == name]


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    assert not reader.open
    return reader


@pytest.fixture(scope="module")
def facts() -> page.PageFacts:
    return hostile_facts()


@pytest.mark.slow
def test_everything_given_is_escaped(facts: page.PageFacts, tmp_path: Path) -> None:
    written = page.write_page(tmp_path / "out", facts)
    assert written == tmp_path / "out" / "report.html"
    reader = read(written)
    assert reader.tags.count("script") == 2  # our own, and the routing as JSON
    images = [value for tag, name, value in reader.attributes if (tag, name) == ("img", "src")]
    assert all(source.startswith(DRAWING) for source in images)
    assert not [name for _, name, _ in reader.attributes if name.startswith("on")]
    for start in ("t", "p", "model", "a", "tomoe x", "does", "source", "dense", "moe"):
        assert f"{start} {EVIL}" in reader.text
    digest = base64.b64encode(hashlib.sha256(reader.script.encode()).digest()).decode()
    policy = next(value for value in reader.values("content") if "default-src" in value)
    assert f"script-src 'sha256-{digest}'" in policy
    assert list(written.parent.iterdir()) == [written]


def test_the_page_needs_nothing_else_and_describes_every_figure(facts: page.PageFacts, tmp_path: Path) -> None:
    reader = read(page.write_page(tmp_path, facts))
    assert not {"link", "iframe", "object", "form"} & set(reader.tags)
    places = reader.values("src") + reader.values("href") + reader.values("xlink:href")
    assert all(place.startswith(("#", DRAWING)) for place in places)
    anchors = [place.removeprefix("#") for place in places if place.startswith("#")]
    ids = reader.values("id")
    assert set(anchors) <= set(ids)
    assert len(set(ids)) == len(ids)
    names = {figure.name for figure in facts.figures}
    assert names == {"throughput", "training", "width", "union", "expert-widths", "similarity", "value-dims",
                     "usage", "cost"}  # fmt: skip
    assert {f"figure-{name}" for name in names} <= set(ids)
    assert reader.tags.count("figure") == reader.tags.count("figcaption") == len(names)
    assert [figure.alt for figure in facts.figures if figure.alt not in reader.values("alt")] == []
    assert reader.tags.count("img") == len(reader.values("alt"))
    assert ("meta", "name", "viewport") in reader.attributes


def test_the_page_shows_the_numbers_and_is_the_same_twice(facts: page.PageFacts, tmp_path: Path) -> None:
    path = page.write_page(tmp_path, facts)
    first, text = path.read_bytes(), read(path).text
    measured, sizes, found = facts.rows[1].measurement, facts.rows[1].facts, facts.rows[1].usage
    assert found is not None
    for words in (f"{measured.perplexity:.2f}", f"KL {measured.kl:.3f}", f"{sizes['active_share']:.1%}", "2.00 GB"):
        assert words in text
    assert all(f"{100 * share:.1f} %" in text for shares in found.shares for share in shares if share > 0.001)
    assert all(warning.text in text for warning in find_warnings(facts.plan, facts.rows))
    assert f"sha256 {'0' * 16}" in text
    assert page.write_page(tmp_path, facts).read_bytes() == first


@pytest.mark.slow
def test_rare_experts_are_told_from_dead_ones(facts: page.PageFacts, tmp_path: Path) -> None:
    routed = ExpertUsage([[0.0, 0.0001, 0.9999], [0.25, 0.25, 0.5]], 10_000)
    shown = replace(facts, rows=[replace(row, usage=routed) for row in facts.rows])
    text = read(page.write_page(tmp_path, shown)).text
    assert "00< 0.1 %100.0 %" in text.replace("\n", "")
    assert "layer 0: expert 0 got none of the 10,000 tokens" in text


def large_plan() -> Plan:
    """32 layers, 8 experts, one router's worth of data."""
    generator = torch.Generator().manual_seed(0)
    shape, layers = ModelShape(32, 32, 512, 4, 4, 8, 8, True), []
    for i in range(32):
        neurons = torch.zeros(8, 512, dtype=torch.bool)
        for row in neurons:
            row[torch.randperm(512, generator=generator)[: 128 + 8 * i]] = True
        dims = torch.arange(8) < 1 + i % 8
        layers.append(LayerPlan(neurons, torch.randn(8, 32, generator=generator), torch.ones(4, dtype=torch.bool), dims,
                                int(dims.sum())))  # fmt: skip
    widths = [[100 + i * n for n in range(8)] for i in range(32)]
    return Plan(shape, tuple(layers), notes={"expert_widths": widths})


@pytest.mark.slow
def test_a_large_model_gives_a_small_page(facts: page.PageFacts, tmp_path: Path) -> None:
    plan = large_plan()
    usage = ExpertUsage(torch.rand(32, 8, generator=torch.Generator().manual_seed(1)).softmax(1).tolist(), 10_000)
    rows = [*facts.rows[:1], replace(facts.rows[1], usage=usage, usage_by_source={"a": usage, "b": usage, "c": usage})]
    metrics = [
        {"step": i, "distill": 1 / i, "budget": 0.1 / i, "coverage": 0.1, "balance": 0.3, "active_fraction": 0.9}
        for i in range(1, 10_001)
    ]
    texts = [(f"text {n}", RoutingTrace(["word"] * 120, [[n] * 120] * 32, 8)) for n in range(4)]
    shown = replace(facts, plan=plan, rows=rows, texts=texts, figures=all_figures(plan, rows, metrics, facts.cost))
    assert page.write_page(tmp_path, shown).stat().st_size < 5_000_000


def test_the_page_leaves_out_what_is_not_there(tmp_path: Path) -> None:
    reader = read(page.write_page(tmp_path, page.PageFacts("t", large_plan())))
    assert "figure" not in reader.tags
    headings = re.findall(r'<h2 id="(\w+)"', (tmp_path / "report.html").read_text(encoding="utf-8"))
    assert headings == ["warnings", "experts", "how", "speed"]
    assert [place for place in reader.values("href")] == [f"#{name}" for name in headings]
    assert "Speed was not measured." in reader.text
    assert f"tomoe benchmark DENSE {tmp_path.name} --json {tmp_path.name}/benchmark.json" in reader.text


def test_a_report_that_travels_names_no_folder(facts: page.PageFacts, tmp_path: Path) -> None:
    (tmp_path / "dense").mkdir()
    recipe = facts.plan.recipe | {"model": str(tmp_path / "dense")}
    recipe["data"] = recipe["data"] | {"sources": [str(tmp_path / "text.txt")]}
    (tmp_path / "text.txt").write_text("x")
    page.write_page(tmp_path, replace(facts, plan=replace(facts.plan, recipe=recipe)))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert "text.txt" in text
