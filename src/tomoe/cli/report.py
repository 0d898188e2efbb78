"""`tomoe report OUT`: one page that shows what a conversion kept, lost and cost, and all its figures as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tomoe import distributed
from tomoe.cli.screen import Screen, results
from tomoe.evaluation.compare import to_rich
from tomoe.report.build import write_reports


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `tomoe convert` wrote.")],
    again: Annotated[bool, typer.Option("--again", help="Measure again what was measured before.")] = False,
) -> None:
    """Write report.html, self-contained, and the figures (SVG and PNG). Measures what was not measured yet."""
    with Screen() as screen:
        rows = write_reports(folder, screen.listen, again=again)
    if distributed.rank():
        return
    console = results()
    console.print(to_rich(rows))
    console.print(
        f"\nThe page is {folder / 'report.html'}; its figures are in {folder / 'figures'}.",
        soft_wrap=True,
        markup=False,
    )
