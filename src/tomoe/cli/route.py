"""`tomoe route MODEL "text"`: show every token in the color of its expert."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from tomoe import folders
from tomoe.cli import options
from tomoe.cli.console import output, printable, quiet_libraries
from tomoe.errors import UserError
from tomoe.files import basename, read_text

if TYPE_CHECKING:
    from tomoe.evaluation import routing_trace

ENOUGH = 100  # tokens that make the shares of experts meaningful
# fine-grained experts that the line on a layer names
STRONGEST = 6
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def route(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder written by `tomoe convert`.")],
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="Text to route.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Read the text from a file.", metavar="FILE")] = None,
    layer: Annotated[int | None, typer.Option("--layer", min=0, help="Show only this layer (default: all).")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Max tokens to route.")] = 512,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write an HTML page with a layer slider instead.", metavar="FILE")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print each expert as a small number after its token, without colors.")
    ] = False,
) -> None:
    """Show the expert of each token, layer by layer."""
    if (text is None) == (file is None):
        raise UserError('give a text to route, or --file FILE, for example tomoe route MODEL "Once upon a time"')
    passage = str(text) if file is None else read_text(file)
    options.check_model(model)
    from tomoe.evaluation import routing_trace
    from tomoe.moe import active_experts
    from tomoe.report import html as pages

    folders.refuse_foreign_file(html, pages.MARK)

    quiet_libraries()
    loaded, tokenizer = active_experts.load(model)
    trace = routing_trace.trace_text(loaded, tokenizer, passage, tokens)
    last = len(trace.experts) - 1
    if layer is not None and layer > last:
        raise UserError(f"there is no layer {layer}: the model has the layers 0 to {last}")
    if html is not None:
        source = file.name if file else "text"
        shown_first = next(filter(trace.has_choice, range(last + 1)), 0) if layer is None else layer
        page = pages.write_route_page(html, f"Experts of {basename(model)}", source, trace, shown_first)
        typer.echo(f"The page is {page}.")
        return
    console = output()
    # sixteen colors are too few: some experts would look alike
    colored = not plain and console.color_system in ("256", "truecolor") and not console.no_color
    for i in range(last + 1) if layer is None else [layer]:
        show_layer(console, trace, i, colored)


def show_layer(console: Console, trace: routing_trace.RoutingTrace, layer: int, colored: bool) -> None:
    """Print the tokens of a layer in the color of their (strongest) expert, or followed by its number: long text below a line
    with the experts' shares, short text in one line, so that layers can be compared."""
    from tomoe.report import html as pages

    if not trace.has_choice(layer):
        console.print(Text(f"layer {layer}: every token uses the same experts\n"), soft_wrap=True)
        return
    short = len(trace.tokens) < ENOUGH
    head = Text(f"layer {layer:>{len(str(len(trace.experts) - 1))}}:", style="bold")
    shares = sorted(enumerate(trace.shares(layer)), key=lambda pair: -pair[1]) if trace.chosen else []
    if trace.chosen and not short:
        head.append(f" {len(trace.chosen[layer][0])} of {trace.num_experts} experts per token, the strongest:")
    for expert, share in () if short else shares[:STRONGEST] or enumerate(trace.shares(layer)):
        head.append("  ").append(f" {expert} ", style(expert) if colored else "").append(f" {share:.0%}")
    if not short and (rest := sum(share for _, share in shares[STRONGEST:])):
        head.append(f"  others {rest:.0%}")
    body = Text()
    for piece, expert in zip(trace.tokens, trace.experts[layer], strict=True):
        token = printable(pages.shown(piece))
        if colored:
            body.append(token, style(expert))
        else:
            line_end = "\n" if piece.endswith("\n") else ""
            body.append(token.removesuffix(line_end) + str(expert).translate(SUBSCRIPTS) + line_end)
    if short:
        console.print(head.append(" ").append(body), soft_wrap=True)
    else:
        console.print(head, soft_wrap=True)
        console.print(body, soft_wrap=True, end="\n\n")


def style(expert: int) -> str:
    """Black on the color of the expert; the second eight experts are underlined."""
    from tomoe.report import html as pages

    return f"{'underline ' if expert // 8 % 2 else ''}#14171a on {pages.COLORS[expert % 8]}"
