"""`tomoe train MODEL -o RUN`: learn masks and routers."""

from __future__ import annotations

from tomoe.cli import options
from tomoe.cli.stopping import resumable


def train(
    model: options.Model,
    out: options.Out,
    active: options.Active = None,
    recipe: options.RecipeName = None,
    changes: options.Changes = None,
    steps: options.Steps = None,
    seed: options.Seed = None,
    data: options.Data = None,
    start: options.Start = None,
    attention: options.Attention = None,
    repair: options.Repair = None,
    resume: options.Resume = False,
    force: options.Force = False,
    skip_memory_check: options.SkipMemoryCheck = False,
) -> None:
    """Learn masks and routers; write a run folder."""
    conversion = options.make_recipe(
        recipe,
        changes,
        model=model,
        active=active,
        seed=seed,
        data=data,
        steps=steps,
        start=start,
        attention=attention,
        repair=repair,
    )
    options.check_model(model)

    from tomoe.cli.screen import Screen
    from tomoe.conversion import train as run_training
    from tomoe.memory.estimate import check_memory

    if not skip_memory_check:
        check_memory(conversion, folds=False)
    with Screen() as screen, resumable(out):
        run_training(conversion, out, resume, force, screen.on_progress)
    screen.say(f"The run is in {out}. Next: tomoe plan {options.quoted(out)} -o PLAN")
