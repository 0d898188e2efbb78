"""`tomoe evaluate MODEL...`: perplexity of each, and how far each is from the first, on the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tomoe import api
from tomoe.cli.screen import Screen, results, show_warnings
from tomoe.files import write_whole
from tomoe.plan import Plan
from tomoe.report.compare import to_json, to_rich
from tomoe.report.warnings import find_warnings


def evaluate(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="The dense model first, then converted ones.")
    ],
    text: Annotated[
        str | None,
        typer.Option(
            "--text", help="File or source; without it, what a converted folder held out.", metavar="FILE_OR_SOURCE"
        ),
    ] = None,
    context: Annotated[int | None, typer.Option("--context", min=8, help="Tokens of a block (default: 1024).")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=8, help="Measure on no more than these.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option("--dtype")] = "bfloat16",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here, too.")] = None,
) -> None:
    """Measure models side by side; the first is the reference."""
    with Screen() as screen:
        rows = api.evaluate(
            models, text, context=context, tokens=tokens, dtype=dtype, device=device, listen=screen.listen
        )
    console = results()
    console.print(to_rich(rows))
    for name, row in zip(models, rows, strict=True):
        plan = Plan.load(Path(name)) if (Path(name) / "plan.json").is_file() else None
        show_warnings(console, find_warnings(plan, [row]), row.name)
    if json_file is not None:
        write_whole(json_file, to_json(rows))
