"""Options that several verbs share, and the recipe they make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tomoe.recipe.conversion import Recipe

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Hub id, folder, .gguf file, or a name that `tomoe fetch` knows.")
]
ActiveOption = Annotated[
    float | None, typer.Option("--active", help="Share of the block parameters that work on a token.")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.", metavar="OUT")]
RecipeOption = Annotated[
    str | None, typer.Option("--recipe", help="Recipe file (.toml, .json) or preset.", metavar="FILE_OR_PRESET")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Any key of the recipe; may be repeated.", metavar="SECTION.KEY=VALUE")
]
StepsOption = Annotated[int | None, typer.Option("--steps", help="Training steps.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of everything that is drawn.")]
DataOption = Annotated[
    list[str] | None,
    typer.Option("--data", help="Text: self, wikitext, alpaca, code-alpaca, a hub id or a file; may be repeated.", metavar="SRC"),
]  # fmt: skip
StartOption = Annotated[str | None, typer.Option("--start", help="carved or random.")]
AttentionOption = Annotated[str | None, typer.Option("--attention", help="dynamic, static or none (stays whole).")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with a run that was cut off.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what OUT holds.")]
TryAnywayOption = Annotated[
    bool, typer.Option("--try-anyway", help="Begin even where the memory that is free cannot suffice.")
]


def make_recipe(
    base: str | None,
    changes: list[str] | None,
    *,
    model: str,
    active: float | None = None,
    seed: int | None = None,
    data: list[str] | None = None,
    steps: int | None = None,
    start: str | None = None,
    attention: str | None = None,
    target: str | None = None,
) -> Recipe:
    """The recipe `base` with the named options, then `--set` applied. Raises UserError for a wrong key or value."""
    named = {
        "model": model, "active": active, "seed": seed, "data.sources": data or None, "train.steps": steps,
        "start": start, "experts.attention": attention, "target": target,
    }  # fmt: skip
    overrides = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    return Recipe.load(base, overrides + (changes or []))
