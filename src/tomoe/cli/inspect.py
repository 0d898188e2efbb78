"""`tomoe inspect PLAN_OR_MODEL_OR_RUN`: show the contents of a folder, as a table or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tomoe import files
from tomoe.cli import options
from tomoe.cli.console import describe_step, output, show_warnings
from tomoe.errors import UserError
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.finetuning import FinetuneRecipe

if TYPE_CHECKING:
    from tomoe import plans
    from tomoe.report import warnings

LEARNED = ("masks", "weights")  # the folder of a run's checkpoints: masks of a conversion, weights of a fine-tuning


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Plan, converted model or run.")],
    as_json: options.AsJson = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify checksums, and that all weights are finite.")
    ] = False,
) -> None:
    """Show the contents of a plan, converted model or run."""
    from tomoe import plans
    from tomoe.evaluation import results
    from tomoe.report import warnings

    if verify:
        _verify(folder)
    elif (folder / "plan.json").exists():
        loaded = plans.read_plan(folder)
        findings = warnings.find_warnings(loaded, results.read_rows(folder))
        _show_plan(loaded, findings, as_json)
    elif (run := _run_of(folder)) is not None:
        _show_run(*run, as_json)
    else:
        raise UserError(
            f"{folder} holds no plan, converted model or run; name a folder written by `tomoe convert`, plan or train"
        )


def _run_of(folder: Path) -> tuple[Path, str] | None:
    """Find the run that a folder is or contains, and what it trained."""
    runs = [path for path in (folder, folder / "run") if (path / "recipe.json").exists()]
    return next(((path, learned) for path in runs for learned in LEARNED if (path / learned).is_dir()), None)


def _verify(folder: Path) -> None:
    # a plan by itself holds the checksum of its tensors, and is refused with numbers that are not finite
    from tomoe import plans
    from tomoe.model import checks

    if (folder / "plan.json").is_file() and not (folder / "config.json").exists():
        plans.read_plan(folder)
        output().say(f"The tensors of the plan in {folder} are as they were written (sha256).")
        return
    total, failed = files.failed_checksums(folder)
    if failed:
        raise UserError(
            f"{len(failed)} of {total} files in {folder} are not as they were written ({', '.join(failed)}); get them again, or "
            "make the model again from its plan with `tomoe apply`"
        )
    if (folder / "plan.json").is_file():
        plans.read_plan(folder)
    if damaged := checks.nonfinite_tensors(folder):
        raise UserError(
            f"{len(damaged)} tensors in {folder} hold numbers that are not finite ({', '.join(damaged[:3])}); whoever made "
            "the checksums wrote them so: make the model again"
        )
    output().say(f"All {total} files in {folder} are as they were written (sha256), and all weights are finite.")


def _show_plan(loaded: plans.AnyPlan, findings: list[warnings.Finding], as_json: bool) -> None:
    from tomoe.evaluation import tables
    from tomoe.report import summary

    totals = loaded.totals()
    if as_json:
        holds = {"layers": loaded.describe(), "totals": totals, "warnings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(holds, indent=2))
        return
    console = output()
    console.print(tables.rich_table(*summary.layer_table(loaded)))
    console.say(
        *(f"{name}: {text}" for name, text in summary.conversion_summary(loaded)),
        f"{totals['active_decoder_params']:,} of {totals['decoder_params']:,} decoder parameters are active "
        f"({totals['active_fraction']:.2%}), {totals['stored_decoder_params']:,} are stored"
        + (f"; of both, {totals['router_params']:,} are in routers." if totals["router_params"] else "."),
    )
    show_warnings(console, findings)


def _show_run(folder: Path, learned: str, as_json: bool) -> None:
    from tomoe.training import run_folder

    recipe = (Recipe if learned == "masks" else FinetuneRecipe).load(folder / "recipe.json")
    run = run_folder.RunFolder(folder, learned)
    checkpoint = run.last()
    step = None if checkpoint is None else checkpoint.step
    rows = run.rows()
    if as_json:
        last = rows[-1] if rows else None
        typer.echo(json.dumps({"recipe": recipe.model_dump(mode="json"), "checkpoint": step, "last": last}, indent=2))
        return
    console = output()
    kind = f"{recipe.active:.0%} active" if isinstance(recipe, Recipe) else f"fine-tuning, {recipe.weights}"
    console.say(
        f"Run on {recipe.model}, {kind}, {recipe.train.steps} steps.",
        f"Last complete checkpoint: {'none yet' if step is None else f'step {step}'}",
    )
    if damaged := run.damaged():
        console.say(f"Damaged, and skipped by --resume: {', '.join(damaged)}.")
    if rows:
        console.say(f"Last logged step: {rows[-1].get('step', '-')}  {describe_step(rows[-1])}")
