"""`tomoe convert MODEL --active 0.5 -o OUT`: text, start, training if there are steps, plan, repair, folding, measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tomoe.cli import options
from tomoe.cli.console import Screen, output, show_text, show_warnings
from tomoe.cli.export import Format, export
from tomoe.cli.options import quoted
from tomoe.cli.signals import resumable
from tomoe.errors import UserError
from tomoe.recipe.conversion import Recipe

Target = Annotated[
    Format | None,
    typer.Option(
        "--format", help="Also export to OUT/export-FORMAT; makes a plan that fits it (auto: the family's MoE class)."
    ),
]


@options.makes_recipe()
def convert(
    chosen: options.RecipeOptions,
    out: options.Out,
    format: Target = None,
    offload: options.Offload = False,
    resume: options.Resume = False,
    force: options.Force = False,
    skip_memory_check: options.SkipMemoryCheck = False,
) -> None:
    """Convert a dense model to an MoE or to sparse inputs, and measure both models."""
    # `auto` names no form: exporting/choice.py says what it stands for, before a conversion and after it
    recipe = chosen.make(target=None if format == "auto" else format, offload=offload or None)
    from tomoe.exporting import choice
    from tomoe.methods import registry

    if format == "auto" and recipe.target == "hf" and recipe.model:
        recipe = chosen.make(target=choice.of_family(recipe.model, recipe.experts.form), offload=offload or None)
    if format is not None and registry.resolve_method(recipe)[0].kind == "inputs":
        raise UserError("no engine supports sparse inputs; leave out --format or --method inputs")
    if format not in (None, "auto"):
        choice.TARGETS[format].check_verifier()
    first = run_conversion(recipe, out, resume, force, skip_memory_check, 1 if format is None else 2)
    if format is not None and first:
        export(
            out, out / f"export-{format}", format, device=recipe.device, force=force or resume, offload=recipe.offload
        )


def run_conversion(
    recipe: Recipe, out: Path, resume: bool, force: bool, skip_memory_check: bool = False, copies: int = 1
) -> bool:
    """Convert, measure, write the reports and show the results; return whether this process shows them.

    copies: models that will be written, an export among them."""
    from tomoe import distributed
    from tomoe.evaluation import tables
    from tomoe.memory import disk, duration, estimate
    from tomoe.pipeline import convert as conversion
    from tomoe.report import build, warnings

    options.check_model(recipe.model)
    options.check_out(out, out / "run", recipe, resume, force)

    if not skip_memory_check:
        estimate.check_memory(recipe, folds=True)
    if not resume:
        disk.check_disk(recipe, out, copies)
    first = distributed.rank() == 0
    if first and recipe.offload:
        output().say(duration.estimated(recipe))
    # until the report is written: the conversion locks OUT for itself only
    with Screen() as screen, distributed.locked(out, "convert"), resumable(out / "run"):
        plan, dense = conversion.convert_dense(recipe, out, resume, force, screen.on_progress)
        # not every process has memory for whole models
        if recipe.train.shard:
            distributed.leave_group()
        rows, texts = (
            build.write_reports(out, screen.on_progress, dense) if first or not recipe.train.shard else ([], [])
        )
    if first:
        console = output()
        console.print(tables.to_rich(rows))
        show_text(console, texts)
        show_warnings(console, warnings.find_warnings(plan, rows))
        console.say(f"\nModel, plan, card and report are in {out}. To try next:")
        for command, purpose in next_commands(recipe, out):
            console.say(f"  {command}", f"      {purpose}")
    return first


def next_commands(recipe: Recipe, out: Path) -> list[tuple[str, str]]:
    """Suggest commands to try after a conversion, as (command, what it does)."""
    from tomoe.methods import registry

    model, folder = quoted(recipe.model), quoted(out)
    commands = [
        (f'tomoe generate {folder} "Once upon a time"', "generate text"),
        (f"tomoe inspect {folder}", "show every layer in numbers"),
        (f"tomoe evaluate {model} {folder} --text FILE", "compare both on your own text"),
    ]
    if registry.resolve_method(recipe)[0].kind == "inputs":
        return commands
    # at equal steps this gained more than longer training of the masks (docs/lab/log.md)
    tuned = f"tomoe finetune {folder} --data FILE.txt -o TUNED"
    commands.append((tuned, "train the weights: slower, better quality"))
    if "self" in recipe.data.sources:
        commands.append((f"tomoe convert {model} --data FILE.txt -o OUT", "convert with your own text"))
    return commands
