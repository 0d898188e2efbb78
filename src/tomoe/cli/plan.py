"""`tomoe plan RUN -o PLAN`: what a run learned, as data that meets the budget exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tomoe import conversion as stages
from tomoe.cli.options import ActiveOption, ForceOption, OutOption
from tomoe.cli.screen import Screen


def plan(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, as `tomoe train` writes it.")],
    out: OutOption,
    active: ActiveOption = None,
    force: ForceOption = False,
) -> None:
    """Turn the newest checkpoint of a run into a plan."""
    made = stages.plan(run, out, active, force)
    Screen().say(
        f"The plan is in {out}: {made.active_fraction():.4f} of the blocks active. Next: tomoe apply {out} -o MODEL"
    )
