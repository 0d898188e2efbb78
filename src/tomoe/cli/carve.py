"""`tomoe carve MODEL --active 0.5 -o OUT`: a first MoE in minutes, from calibration statistics alone."""

from __future__ import annotations

from dataclasses import replace

from tomoe.cli import options
from tomoe.cli.convert import run_conversion


@options.makes_recipe("steps", "start")
def carve(
    chosen: options.RecipeOptions,
    out: options.Out,
    offload: options.Offload = False,
    resume: options.Resume = False,
    force: options.Force = False,
    skip_memory_check: options.SkipMemoryCheck = False,
) -> None:
    """Convert without learning, whatever the recipe says, and from models larger than memory if --offload is given."""
    fixed = ["train.steps=0", "start=carved", *(["offload=true"] if offload else [])]
    # a named recipe may have text to learn from, too
    changes = ["data.tokens=0", *(chosen.changes or []), *fixed]
    run_conversion(replace(chosen, changes=changes).make(), out, resume, force, skip_memory_check)
