"""Our pages in a real, headless Chromium: they ask no network, the slider works, they fit a phone, and anyone can use them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_samples import EVIL, hostile_facts

from tomoe.evaluation.routing_trace import RoutingTrace
from tomoe.report import page
from tomoe.report.html import write_route_page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")

BROWSER = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update
--disable-sync""".split()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)"),
]


class Seen:
    """A page, and all that the browser asked for or complained of while it was open."""

    def __init__(self, shown: playwright.Page):
        self.page, self.said, self.asked = shown, [], []
        shown.on("console", lambda message: self.said.append(message.text))
        shown.on("pageerror", lambda error: self.said.append(str(error)))
        shown.on("dialog", lambda dialog: self.said.append(dialog.message))
        shown.on("request", lambda request: self.asked.append(request.url))

    def open(self, path: Path, width: int = 1280) -> playwright.Page:
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.goto(path.as_uri())
        return self.page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page.write_page(tmp_path_factory.mktemp("report"), **hostile_facts())


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, traced by a formula, so that layers and tokens are known."""
    words = [EVIL, "two\n", "", *"abcdefgh"]
    trace = RoutingTrace(words, [[(i + layer) % 4 for i in range(len(words))] for layer in range(3)], 4)
    return write_route_page(tmp_path_factory.mktemp("routes") / "route.html", EVIL, f"source {EVIL}", trace, layer=0)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[playwright.BrowserContext]:
    with playwright.sync_playwright() as driver:
        folder = tmp_path_factory.mktemp("profile")
        context = driver.chromium.launch_persistent_context(folder, executable_path=BROWSER, headless=True, args=FLAGS)
        yield context
        context.close()


@pytest.fixture
def seen(browser: playwright.BrowserContext) -> Iterator[Seen]:
    shown = browser.new_page()
    yield Seen(shown)
    shown.close()


def colors(shown: playwright.Page) -> list[str]:
    return shown.eval_on_selector_all(".tokens span", "spans => spans.map(s => getComputedStyle(s).backgroundColor)")


def test_it_asks_no_network_and_runs_nothing_that_it_was_given(seen: Seen, report: Path) -> None:
    shown = seen.open(report)
    assert seen.said == []
    assert {url for url in seen.asked if not url.startswith("data:")} == {report.as_uri()}
    assert EVIL in shown.title()
    assert shown.locator("svg, img:not([src^='data:image/svg+xml;base64,'])").count() == 0
    assert shown.locator("figure img").count() == shown.locator("figure").count() == 3
    widths = shown.eval_on_selector_all("img", "images => images.map(i => i.complete && i.naturalWidth)")
    assert min(widths) > 100


def test_the_slider_changes_the_colors_by_keyboard_too(seen: Seen, routes: Path) -> None:
    shown = seen.open(routes)
    first = colors(shown)
    assert len(set(first)) == 4  # one for each expert
    slider = shown.get_by_role("slider", name="Layer")
    slider.focus()
    shown.keyboard.press("ArrowRight")
    second = colors(shown)
    assert second == [*first[1:], first[3]]  # by the formula, each token has its neighbour's
    assert shown.locator("output").inner_text() == "1"
    assert shown.locator(".tokens span").first.get_attribute("title") == "expert 1"
    slider.fill("2")
    assert shown.locator("output").inner_text() == "2"
    assert shown.locator(".legend li").first.inner_text() == "0 27 %"  # 3 of 11 tokens
    number = "s => getComputedStyle(s, '::after').content"
    assert shown.eval_on_selector(".tokens span", number) == "none"
    shown.get_by_label("expert numbers").check()
    assert shown.eval_on_selector(".tokens span", number) == '"2"'
    assert seen.said == []


@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [("report", "light", 360), ("report", "dark", 1280), ("routes", "light", 1280), ("routes", "dark", 360)],
)
def test_it_fits_the_window_and_passes_the_accessibility_check(
    seen: Seen, request: pytest.FixtureRequest, name: str, scheme: str, width: int
) -> None:
    seen.page.emulate_media(color_scheme=scheme)
    shown = seen.open(request.getfixturevalue(name), width)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    shown.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    dark = shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert dark == (scheme == "dark")
    found = axe.Axe().run(shown).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"][:200]) for v in found] == []


def test_the_verdict_is_read_without_scrolling_and_not_in_grey(seen: Seen, report: Path) -> None:
    shown = seen.open(report, 390)
    sentence = shown.locator(".verdict p").first
    assert sentence.bounding_box()["y"] < 900
    colors = [place.evaluate("e => getComputedStyle(e).color") for place in (sentence, shown.locator("body"))]
    assert colors[0] == colors[1]


def test_without_javascript_the_first_layer_and_all_numbers_are_there(
    browser: playwright.BrowserContext, routes: Path
) -> None:
    shown = browser.new_page()
    session = browser.new_cdp_session(shown)
    session.send("Emulation.setScriptExecutionDisabled", {"value": True})
    shown.goto(routes.as_uri())
    assert shown.locator(".controls").is_hidden()
    assert shown.locator(".tokens").count() == 1
    assert "layer 2" in str(shown.locator("pre.table").first.text_content())
    shown.close()


def test_it_prints_with_numbers_in_place_of_the_slider(seen: Seen, routes: Path) -> None:
    shown = seen.open(routes)
    shown.emulate_media(media="print")
    assert shown.locator(".controls").is_hidden()
    assert shown.eval_on_selector(".tokens span", "s => getComputedStyle(s, '::after').content") == '"0"'
