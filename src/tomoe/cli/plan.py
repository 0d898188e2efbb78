"""`tomoe plan RUN -o PLAN`: extract what a run learned, as a plan that meets the budget exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tomoe.cli import options
from tomoe.cli.console import Screen


def plan(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder written by `tomoe train`.")],
    out: options.Out,
    active: options.Active = None,
    force: options.Force = False,
) -> None:
    """Extract a plan from the newest checkpoint of a run."""
    from tomoe.pipeline import stages

    with Screen() as screen:
        extracted = stages.plan(run, out, active, force)
    screen.say(
        f"The plan is in {out}, with {extracted.active_fraction():.2%} of the decoder parameters active. "
        f"Next: tomoe apply {options.quoted(out)} -o MODEL"
    )
