"""`tomoe train MODEL -o RUN`: learn masks and routers."""

from __future__ import annotations

from tomoe import conversion as stages
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
    StartOption,
    StepsOption,
    TryAnywayOption,
    make_recipe,
)
from tomoe.cli.screen import Screen
from tomoe.cli.stopping import resumable
from tomoe.memory.estimate import check_room


def train(
    model: ModelArgument,
    out: OutOption,
    active: ActiveOption = None,
    recipe: RecipeOption = None,
    changes: SetOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    start: StartOption = None,
    attention: AttentionOption = None,
    resume: ResumeOption = False,
    force: ForceOption = False,
    try_anyway: TryAnywayOption = False,
) -> None:
    """Learn masks and routers; writes a run folder."""
    made = make_recipe(
        recipe, changes, model=model, active=active, seed=seed, data=data, steps=steps, start=start, attention=attention
    )
    if not try_anyway:
        check_room(made, folds=False)
    with Screen() as screen, resumable(out):
        stages.train(made, out, resume, force, screen.listen)
    screen.say(f"The run is in {out}. Next: tomoe plan {out} -o PLAN")
