"""`tomoe carve MODEL --active 0.5 -o OUT`: a first MoE in minutes, from calibration statistics alone."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tomoe.cli.convert import run_conversion
from tomoe.cli.options import (
    ActiveOption,
    AttentionOption,
    DataOption,
    ForceOption,
    ModelArgument,
    OutOption,
    RecipeOption,
    ResumeOption,
    SeedOption,
    SetOption,
    TryAnywayOption,
    make_recipe,
)

_STREAM = "Leave the layers in their files and hold one at a time: for a model that is larger than memory."


def carve(
    model: ModelArgument,
    out: OutOption,
    active: ActiveOption = None,
    recipe: RecipeOption = None,
    changes: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    attention: AttentionOption = None,
    stream: Annotated[bool, typer.Option("--stream", help=_STREAM)] = False,
    resume: ResumeOption = False,
    force: ForceOption = False,
    try_anyway: TryAnywayOption = False,
) -> None:
    """Convert without learning: experts and routers from the statistics of a little text."""
    changes = [*(changes or []), "train.steps=0", "start=carved", *(["stream=true"] if stream else [])]
    # No text to train on is needed, and sampling or reading it would take longer than all the rest. How much text is left
    # is read off the recipe, where no default of data.tokens should stand in the way of what is asked for.
    ample = [f"data.tokens={sys.maxsize}", *changes]
    asked = make_recipe(recipe, ample, model=model, active=active, seed=seed, data=data, attention=attention)
    enough = asked.data.calibration_tokens + asked.data.evaluation_tokens + asked.data.block_size
    changes = [f"data.tokens={enough}", *changes]
    made = make_recipe(recipe, changes, model=model, active=active, seed=seed, data=data, attention=attention)
    run_conversion(made, out, resume, force, try_anyway)
