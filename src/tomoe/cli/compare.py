"""`tomoe compare MODEL --methods A,B -o DIR`: several methods at several budgets on one text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tomoe.cli import options
from tomoe.cli.console import Screen, output


def _names(text: str) -> list[str]:
    """Split names at commas, except commas within brackets."""
    names, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            names.append("")
        else:
            names[-1] += letter
    return [name.strip() for name in names if name.strip()]


@options.makes_recipe("active", "steps", "method", "form", "start", "attention", "repair")
def compare(
    chosen: options.RecipeOptions,
    out: options.Out,
    methods: Annotated[
        Any,
        typer.Option(
            "--methods",
            help="Methods, optionally with recipe keys: carve,carve\\[experts.num_experts=16],cmoe.",
            parser=_names,
            metavar="NAME,...",
        ),
    ],
    active: Annotated[
        Any,
        typer.Option("--active", help="Active fractions.", parser=options.fractions, metavar="FRACTION,..."),
    ] = "0.85,0.7,0.5",
    repair: Annotated[bool, typer.Option("--repair/--no-repair", help="Also measure repaired plans.")] = True,
    text: options.Text = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=8, help="Max tokens for evaluation.")] = None,
) -> None:
    """Compare methods on one text; an interrupted comparison continues when run again."""
    recipe = chosen.make()
    options.check_model(chosen.model)
    from tomoe.pipeline import comparison

    with Screen() as screen:
        entries = comparison.compare_methods(
            recipe,
            out,
            methods,
            active,
            repairs=(False, True) if repair else (False,),
            text=text,
            tokens=tokens,
            on_progress=screen.on_progress,
        )
    output().say(comparison.to_markdown(entries), f"\nTable, numbers and figure are in {out}.")
