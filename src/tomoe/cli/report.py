"""`tomoe report OUT`: one page on what a conversion kept, lost and cost, and all its figures as files."""

from __future__ import annotations

from typing import Annotated

import typer

from tomoe.cli import options
from tomoe.cli.console import Screen, output, show_text


def report(
    folder: options.Converted,
    again: Annotated[bool, typer.Option("--again", help="Repeat all measurements.")] = False,
) -> None:
    """Write a self-contained report.html and its figures."""
    from tomoe import distributed
    from tomoe.evaluation import tables
    from tomoe.report import build

    with Screen() as screen:
        rows, texts = build.write_reports(folder, screen.on_progress, again=again)
    if distributed.rank():
        return
    console = output()
    console.print(tables.to_rich(rows))
    show_text(console, texts)
    console.say(f"\nThe page is {folder / 'report.html'}; its figures are in {folder / 'figures'}.")
