"""`tomoe sweep MODEL --over active=0.7,0.5 -o OUT`: one recipe over a grid of its keys, with a table and a figure."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Annotated

import typer
from rich.table import Table

from tomoe import distributed
from tomoe import sweep as sweeping
from tomoe.cli.options import (
    AttentionOption,
    DataOption,
    ModelArgument,
    OutOption,
    RecipeOption,
    SeedOption,
    SetOption,
    StartOption,
    StepsOption,
    make_recipe,
)
from tomoe.cli.screen import Screen, duration, results
from tomoe.cli.stopping import Stopped
from tomoe.conversion import Listener


def sweep(
    model: ModelArgument,
    out: OutOption,
    over: Annotated[
        list[str],
        typer.Option(
            "--over", help="Any key of the recipe and its values; repeat it for a grid.", metavar="KEY=A,B,..."
        ),
    ],
    recipe: RecipeOption = None,
    changes: SetOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    start: StartOption = None,
    attention: AttentionOption = None,
    text: Annotated[
        str | None,
        typer.Option("--text", help="Measure on this; without it, on what was held out.", metavar="FILE_OR_SOURCE"),
    ] = None,
    context: Annotated[int | None, typer.Option("--context", min=8, help="Tokens of a block of --text.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=8, help="Tokens of --text, at most.")] = None,
) -> None:
    """Convert and measure every combination; finished ones are passed over, one that was cut off goes on."""
    base = make_recipe(
        recipe, changes, model=model, seed=seed, data=data, steps=steps, start=start, attention=attention
    )
    began = time.monotonic()
    with ExitStack() as stack:

        def begin(cell: sweeping.Cell, before: int, to_do: int) -> Listener:
            stack.close()
            screen = Screen()
            left = (time.monotonic() - began) / max(before, 1) * (to_do - before)
            screen.say(
                f"cell {before + 1} of {to_do}: {cell.name}" + (f", about {duration(left)} left" if before else "")
            )
            return stack.enter_context(screen).listen

        try:
            lines = sweeping.sweep(base, over, out, sweeping.Text(text, context, tokens), begin)
        except Stopped as stopped:
            stopped.advice = "; give the same command again to go on"
            raise
    if distributed.rank():
        return
    shown = Table("cell", box=None, padding=(0, 2, 0, 0))
    for title in ("active", "perplexity", "dense", "KL", "same top-1"):
        shown.add_column(title, justify="right")
    for line in lines:
        m = line["measured"]
        shown.add_row(
            line["cell"], f"{m['active_share']:.1%}", f"{m['perplexity']:.2f} ± {m['standard_error'] or 0:.2f}",
            f"{m['dense_perplexity']:.2f}", f"{m['kl']:.4f}", f"{m['top1_agreement']:.1%}",
        )  # fmt: skip
    console = results()
    console.print(shown)
    console.print(f"\nTable and figure are {out / 'sweep.csv'} and {out / 'accuracy.svg'}.", soft_wrap=True)
