"""`tomoe repair OUT -o REPAIRED`: refit the projections of a conversion to its masks, in closed form."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tomoe.cli import options
from tomoe.cli.console import Screen, output, show_warnings
from tomoe.files import basename
from tomoe.recipe.finetuning import FinetuneRecipe


def repair(
    folder: options.Converted,
    out: options.Out,
    data: options.Data = None,
    mode: Annotated[
        Literal["full", "low_rank"] | None,
        typer.Option("--mode", help="Store full matrices in the plan, or smaller low-rank changes."),
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Tokens to fit to, at most.")] = None,
    dense: options.Dense = None,
    changes: options.Changes = None,
    force: options.Force = False,
) -> None:
    """Refit the down projections in closed form: minutes, no training. Measures the result on held-out text, if there is any."""
    from tomoe import distributed, plans
    from tomoe.evaluation import tables
    from tomoe.finetuning import finetune as finetuning
    from tomoe.finetuning import repair as refitting
    from tomoe.report import summary, warnings

    named: dict[str, object] = {"repair.mode": mode, "repair.tokens": tokens}
    settings = options.overrides(named) + (changes or [])
    with Screen() as screen:
        repaired = refitting.repair(folder, out, settings, data or (), dense or "", force, screen.on_progress)
        note = repaired.notes[plans.REPAIRED]
        screen.say(
            f"The repaired model is in {out}: relative error of a layer {note['error_before']:.3f} before, "
            f"{note['error_after']:.3f} after, on the text that it was fitted to. "
            f"Next: tomoe evaluate MODEL {folder} {out} --text FILE"
        )
        rows = []
        if (out / "run" / "corpus.safetensors").is_file():
            command = f"tomoe repair {summary.shown_name(str(folder))} -o {basename(out)}"
            rows = finetuning.measure_improvement(
                FinetuneRecipe(model=str(folder), dense=dense or ""), out, screen.on_progress, command
            )
    if rows and not distributed.rank():
        console = output()
        console.print(tables.to_rich(rows))
        show_warnings(console, warnings.find_worsening(*rows[-2:]))
