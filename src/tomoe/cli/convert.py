"""`tomoe convert MODEL --active 0.5 -o OUT`: text, start, learning, plan, fold, and both models measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tomoe import api, distributed
from tomoe import conversion as stages
from tomoe.cli.export import Format, export
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
from tomoe.cli.screen import Screen, results, show_warnings
from tomoe.cli.stopping import resumable
from tomoe.evaluation.compare import to_rich
from tomoe.memory.estimate import check_room
from tomoe.recipe.conversion import Recipe
from tomoe.report.build import write_reports
from tomoe.report.card import write_card
from tomoe.report.warnings import find_warnings

ConvertFormatOption = Annotated[
    Format | None,
    typer.Option("--format", help="Make the plan fit this form, and export to it (OUT/export-FORMAT) when done."),
]


def convert(
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
    format: ConvertFormatOption = None,
    resume: ResumeOption = False,
    force: ForceOption = False,
    try_anyway: TryAnywayOption = False,
) -> None:
    """Turn a dense model into a Mixture-of-Experts: learn it, save it, measure it beside the dense one."""
    target = None if format in (None, "auto") else format
    made = make_recipe(
        recipe, changes, model=model, active=active, seed=seed, data=data, steps=steps, start=start, attention=attention,
        target=target,
    )  # fmt: skip
    rank = distributed.rank()
    run_conversion(made, out, resume, force, try_anyway)
    if format is not None and not rank:
        export(out, out / f"export-{format}", format, device=made.device, force=force or resume)


def run_conversion(recipe: Recipe, out: Path, resume: bool, force: bool, try_anyway: bool = False) -> None:
    """Convert, measure, write the reports and show what came out."""
    if not try_anyway:
        check_room(recipe, folds=True)
    with Screen() as screen, resumable(out / "run"):
        plan, dense = stages.convert_dense(recipe, out, resume, force, screen.listen)
        other = distributed.rank() > 0
        if recipe.stream and not other:
            write_card(out, plan)
            screen.say(
                f"The model is in {out}, not measured: every block of text reads all weights anew. Where that is no matter, "
                f"or on a larger machine: tomoe evaluate {recipe.model} {out} --stream"
            )
        if recipe.stream:
            return
        if recipe.train.shard:  # not every process has room for whole models
            distributed.part()
        rows = [] if other and recipe.train.shard else write_reports(out, screen.listen, dense)
    if other:
        return
    console = results()
    console.print(to_rich(rows))
    show_warnings(console, find_warnings(plan, rows))
    console.print(f"\nModel, plan, card and report are in {out}. To try next:")
    for command, purpose in api.next_commands(recipe, out):
        console.print(f"  {command}\n      {purpose}", soft_wrap=True, markup=False)
