"""`tomoe sweep MODEL --over active=0.7,0.5 -o OUT`: one recipe over a grid of its keys, with a table and a figure."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.table import Table

from tomoe import distributed
from tomoe import sweep as grid
from tomoe.cli import options
from tomoe.cli.console import Screen, duration, output
from tomoe.cli.signals import Stopped
from tomoe.progress import ProgressCallback


@options.makes_recipe("active")
def sweep(
    chosen: options.RecipeOptions,
    out: options.Out,
    over: Annotated[
        list[str],
        typer.Option("--over", help="Recipe key and its values; repeat it for a grid.", metavar="KEY=A,B,..."),
    ],
    text: options.Text = None,
    context: Annotated[int | None, typer.Option("--context", min=8, help="Sequence length of --text.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=8, help="Max tokens of --text.")] = None,
) -> None:
    """Convert and measure a grid of recipe values.

    Run the same command again to resume; finished cells are skipped.
    """
    base = chosen.make()
    options.check_model(chosen.model)

    axes, began = [options.with_fractions(axis) for axis in over], time.monotonic()
    with ExitStack() as stack:

        def begin(cell: grid.Cell, before: int, to_do: int) -> ProgressCallback:
            stack.close()
            screen = Screen()
            left = (time.monotonic() - began) / max(before, 1) * (to_do - before)
            screen.say(
                f"cell {before + 1} of {to_do}: {cell.name}" + (f", about {duration(left)} left" if before else "")
            )
            return stack.enter_context(screen).on_progress

        try:
            lines = grid.sweep(base, axes, out, grid.Text(text, context, tokens), begin)
        except Stopped as stopped:
            stopped.advice = "; run the same command again to resume"
            raise
    if distributed.rank():
        return
    console = output()
    console.print(_table(lines))
    console.say(f"\nTable and figure are {out / 'sweep.csv'} and {out / 'accuracy.svg'}.")


def _table(lines: list[dict[str, Any]]) -> Table:
    table = Table("cell", box=None, padding=(0, 2, 0, 0))
    for title in ("active", "perplexity", "dense", "KL", "same top-1"):
        table.add_column(title, justify="right")
    for line in lines:
        m = line["measured"]
        table.add_row(
            line["cell"], f"{m['active_share']:.1%}", f"{m['perplexity']:.2f} ± {m['standard_error'] or 0:.2f}",
            f"{m['dense_perplexity']:.2f}", f"{m['kl']:.4f}", f"{m['top1_agreement']:.1%}",
        )  # fmt: skip
    return table
