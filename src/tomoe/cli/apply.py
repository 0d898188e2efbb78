"""`tomoe apply PLAN [MODEL] -o OUT`: build the MoE from a plan and dense weights."""

from __future__ import annotations

from typing import Annotated

import typer

from tomoe.cli import options
from tomoe.cli.console import Screen


def apply(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Plan folder, or hub id of a plan.")],
    out: options.Out,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Dense model (default: the one that the plan names).")
    ] = None,
    dtype: Annotated[
        options.Dtype | None, typer.Option("--dtype", help="Dtype of the weights (default: the recipe's).")
    ] = None,
    force: options.Force = False,
) -> None:
    """Build the converted model from a plan and its dense model."""
    from tomoe.pipeline import stages

    with Screen() as screen:
        applied = stages.apply_plan(plan, model, out, dtype, force)
    checked = "" if applied.source else " The plan has no fingerprint, so only the sizes of the weights were checked."
    screen.say(
        f"The converted model is in {out}, with {applied.active_fraction():.2%} of the decoder parameters active.{checked} "
        f"Next: tomoe evaluate MODEL {options.quoted(out)}"
    )
