"""`tomoe apply PLAN [MODEL] -o OUT`: the planned model, for good. Also known as `fold`, the name of the stage."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tomoe import api
from tomoe.cli.options import ForceOption, OutOption
from tomoe.cli.screen import Screen


def apply(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan folder, or the hub id of a plan.")],
    out: OutOption,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The dense model, where it is not found as the plan names it."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option("--dtype", help="Default: the recipe's.")
    ] = None,
    force: ForceOption = False,
) -> None:
    """Make the MoE from a plan and the dense weights it was made for (checked); writes a Hugging Face folder."""
    made = api.apply_plan(plan, model, out, dtype, force)
    checked = "" if made.source else " The plan names no fingerprint, so only the sizes of the weights were checked."
    Screen().say(
        f"The MoE is in {out}: {made.active_fraction():.4f} of the blocks active.{checked} "
        f"Next: tomoe evaluate MODEL {out}"
    )
