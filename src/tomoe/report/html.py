"""Render pages from templates: everything inline and escaped, and only the script whose hash is in the page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tomoe.evaluation.routing_trace import RoutingTrace
from tomoe.files import atomic_write

COLORS = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00")
MARK = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src"  # in every page, by its layout
LISTED = 8  # experts listed for a token: all of them, in every layer, would be most of the page


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tomoe", "report/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shows = (svg_uri, shown, numbers, choices, strongest)
    environment.filters |= {show.__name__: show for show in shows}
    return environment


def render(page: str, script: str = "", **values: Any) -> str:
    """Render a page from one of our templates; every value that is not markup is escaped. Without `script` none runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    source = Markup(f"'sha256-{digest}'" if script else "'none'")
    return _environment().get_template(page).render(**values, script=Markup(script), script_source=source)


def template(name: str) -> str:
    return resources.files("tomoe.report").joinpath("templates", name).read_text(encoding="utf-8")


def write_route_page(path: Path, title: str, source: str, trace: RoutingTrace, layer: int) -> Path:
    """Write a page with a text in the colors of its experts; `source` names the text. Raises UserError if it cannot."""
    page = render(
        "route.html.j2", template("tokens.js"), title=title, source=source, trace=trace, layer=layer, colors=COLORS
    )
    return atomic_write(path, page)


def svg_uri(svg: str) -> str:
    """Return the source of an <img>: the contents of an SVG cannot access the page from there."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def shown(piece: str) -> str:
    """Make a token visible: line ends and parts of a character get a mark."""
    return piece.replace("\n", "↵\n") or "·"


def numbers(trace: RoutingTrace) -> str:
    """Return one line per layer: its number, then the (strongest) expert of each token, a column per token."""
    width = len(str(trace.num_experts - 1))
    label = len(f"layer {len(trace.experts) - 1}")
    lines = (
        " ".join(f"{expert:{width}}" for expert in row)
        if trace.has_choice(layer)
        else "every token uses the same experts"
        for layer, row in enumerate(trace.experts)
    )
    return "\n".join(f"{f'layer {i}':{label}}  {line}" for i, line in enumerate(lines))


def choices(trace: RoutingTrace) -> list[list[int]] | list[list[str]]:
    """Return [layer][token] for the script of the page: the expert of a token, or "3 17 5 …", the strongest first; empty where
    all tokens use the same experts."""
    if not trace.chosen:
        return trace.experts

    def listed(experts: Sequence[int]) -> str:
        return " ".join(map(str, experts[:LISTED])) + (" …" if len(experts) > LISTED else "")

    nothing = [""] * len(trace.tokens)
    return [[listed(experts) for experts in layer] or nothing for layer in trace.chosen]


def strongest(choice: int | str) -> int | None:
    """Return the expert that colors a token, from an entry of `choices`."""
    first = str(choice).partition(" ")[0]
    return int(first) if first else None
