"""`tomoe train MODEL -o RUN`: learn masks and routers."""

from __future__ import annotations

from tomoe.cli import options
from tomoe.cli.console import Screen
from tomoe.cli.signals import resumable


@options.makes_recipe()
def train(
    chosen: options.RecipeOptions,
    out: options.Out,
    resume: options.Resume = False,
    force: options.Force = False,
    skip_memory_check: options.SkipMemoryCheck = False,
) -> None:
    """Train masks and routers; write a run folder."""
    recipe = chosen.make()
    options.check_model(chosen.model)
    options.check_out(None, out, recipe, resume, force)
    from tomoe.memory import estimate
    from tomoe.pipeline import stages

    if not skip_memory_check:
        estimate.check_memory(recipe, folds=False)
    with Screen() as screen, resumable(out):
        stages.train(recipe, out, resume, force, screen.on_progress)
    if not recipe.train.steps:
        screen.say(
            "Nothing was trained, because train.steps is 0: the run holds the initial state. --steps N trains from there."
        )
    screen.say(f"The run is in {out}. Next: tomoe plan {options.quoted(out)} -o PLAN")
