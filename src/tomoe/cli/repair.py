"""`tomoe repair OUT -o REPAIRED`: refit the projections of a conversion to its masks, in closed form."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tomoe import plan
from tomoe.cli import options
from tomoe.cli.console import Screen
from tomoe.finetuning import repair as refitting


def repair(
    folder: options.Converted,
    out: options.Out,
    data: options.Data = None,
    mode: Annotated[
        Literal["full", "low_rank"] | None,
        typer.Option("--mode", help="Keep whole matrices in the plan, or factors of low rank, which are smaller."),
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Tokens to fit to, at most.")] = None,
    dense: options.Dense = None,
    changes: options.Changes = None,
    force: options.Force = False,
) -> None:
    """Refit the down projections in closed form: minutes, no training."""
    named: dict[str, object] = {"repair.mode": mode, "repair.tokens": tokens}
    settings = options.overrides(named) + (changes or [])
    with Screen() as screen:
        repaired = refitting.repair(folder, out, settings, data or (), dense or "", force, screen.on_progress)
        note = repaired.notes[plan.REPAIRED]
        screen.say(
            f"The repaired model is in {out}: relative error of a layer {note['error_before']:.3f} before, "
            f"{note['error_after']:.3f} after. Next: tomoe evaluate MODEL {folder} {out} --text FILE"
        )
