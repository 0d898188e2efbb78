"""`tomoe fold PLAN [MODEL] -o OUT`: the planned model, for good."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tomoe import convert as stages
from tomoe.cli.options import ForceOption, OutOption
from tomoe.cli.screen import Screen


def fold(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan folder, as `tomoe plan` writes it.")],
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
    """Fold a plan into its dense model; writes a Hugging Face folder."""
    made = stages.fold_plan(plan, model, out, dtype, force)
    Screen().say(
        f"The MoE is in {out}: {made.active_fraction():.4f} of the blocks active. Next: tomoe evaluate MODEL {out}"
    )
