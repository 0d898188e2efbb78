"""`tomoe carve MODEL --active 0.5 -o OUT`: a first MoE in minutes, from calibration statistics alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from tomoe.cli import options
from tomoe.cli.convert import run_conversion

if TYPE_CHECKING:
    from tomoe.recipe.conversion import Recipe


@options.makes_recipe("steps", "start")
def carve(
    chosen: options.RecipeOptions,
    out: options.Out,
    offload: options.Offload = False,
    resume: options.Resume = False,
    force: options.Force = False,
    skip_memory_check: options.SkipMemoryCheck = False,
) -> None:
    """Convert without training, in minutes, from calibration statistics; refit the projections in closed form."""
    fixed = ["train.steps=0", "start=carved", *(["offload=true"] if offload else [])]

    def recipe_for(tokens: int) -> Recipe:
        changes = [f"data.tokens={tokens}", *(chosen.changes or []), *fixed]
        return replace(chosen, changes=changes).make()

    # Sampling or reading text to train on would take longer than all the rest, so only as much text as carving and repair need is
    # prepared. How much that is stands in the recipe, which is first read with more text than any setting exceeds.
    whole = recipe_for(sys.maxsize)
    fitted = whole.data.seq_len if whole.repair.mode == "none" else whole.repair.tokens
    carving = recipe_for(whole.data.calibration_tokens + whole.data.evaluation_tokens + fitted)
    run_conversion(carving, out, resume, force, skip_memory_check)
