"""`tomoe route MODEL "text"`: every token in the colour of the expert that it goes to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tomoe import api
from tomoe.cli.screen import results
from tomoe.errors import UserError
from tomoe.evaluation.routing_trace import RoutingTrace, trace_text
from tomoe.files import own_name
from tomoe.report.html import COLOURS, shown, write_route_page

SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def route(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder that `tomoe convert` wrote.")],
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The text to route.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Read the text from a file.", metavar="FILE")] = None,
    layer: Annotated[int | None, typer.Option("--layer", min=0, help="Only this layer (default: all).")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Route no more than these.")] = 512,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with a layer slider here instead.", metavar="FILE")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="No colours: the expert as a small number after each token.")
    ] = False,
) -> None:
    """Show which expert each token of a text goes to, layer by layer."""
    given = read_text(text, file)
    loaded, tokenizer = api.load(model)
    trace = trace_text(loaded, tokenizer, given, tokens)
    last = len(trace.experts) - 1
    if layer is not None and layer > last:
        raise UserError(f"there is no layer {layer}: the model has the layers 0 to {last}")
    if html is not None:
        title = f"Experts of {own_name(model)}"
        typer.echo(
            f"The page is {write_route_page(html, title, [(file.name if file else 'text', trace)], layer or 0)}."
        )
        return
    console = results()
    # sixteen colours are too few: some of ours would fall together
    coloured = not plain and console.color_system in ("256", "truecolor") and not console.no_color
    for i in range(last + 1) if layer is None else [layer]:
        show_layer(console, trace, i, coloured)


def read_text(text: str | None, file: Path | None) -> str:
    """Raises UserError unless exactly one of the two is given and readable."""
    if (text is None) == (file is None):
        raise UserError('give a text to route, or --file FILE: tomoe route MODEL "Once upon a time"')
    if file is None:
        return str(text)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not text in UTF-8") from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error


def show_layer(console: Console, trace: RoutingTrace, layer: int, coloured: bool) -> None:
    """A line on the layer, then its tokens: on the colour of their expert, or with its number behind them."""
    head = Text(f"layer {layer}:", style="bold")
    for expert, share in enumerate(trace.shares(layer)):
        head.append("  ").append(f" {expert} ", style(expert) if coloured else "").append(f" {share:.0%}")
    body = Text()
    for piece, expert in zip(trace.tokens, trace.experts[layer], strict=True):
        if coloured:
            body.append(shown(piece), style(expert))
        else:
            line_end = "\n" if piece.endswith("\n") else ""
            body.append(shown(piece).removesuffix(line_end) + str(expert).translate(SUBSCRIPTS) + line_end)
    console.print(head, soft_wrap=True)
    console.print(body, soft_wrap=True, end="\n\n")


def style(expert: int) -> str:
    """Black on the colour of the expert; the second eight are underlined."""
    return f"{'underline ' if expert // 8 % 2 else ''}#14171a on {COLOURS[expert % 8]}"
