"""`tomoe inspect PLAN_OR_MODEL_OR_RUN`: what a folder holds, as a table or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tomoe.budget import active_params, block_total
from tomoe.cli.screen import describe_step, results, show_warnings
from tomoe.errors import UserError
from tomoe.evaluation.compare import read_rows
from tomoe.files import damaged
from tomoe.plan import Plan
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.report.summary import conversion_summary, layer_table
from tomoe.report.warnings import Finding, find_warnings
from tomoe.training.run_folder import RunFolder

RUNS: dict[str, type[Recipe] | type[FinetuneRecipe]] = {
    "masks": Recipe,
    "weights": FinetuneRecipe,
}  # by what is learned


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A plan, a converted model or a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hold every file of a converted model against its checksum.")
    ] = False,
) -> None:
    """Show what a plan, a converted model or a run holds."""
    if verify:
        _verify(folder)
        return
    if (folder / "plan.json").is_file():
        plan = Plan.load(folder)
        _show_plan(plan, find_warnings(plan, read_rows(folder)), as_json)
    elif (run := _run_of(folder)) is not None:
        _show_run(run, as_json)
    else:
        raise UserError(
            f"{folder} holds no plan, converted model or run; give a folder that `tomoe convert`, plan or train wrote"
        )


def _run_of(folder: Path) -> Path | None:
    """The run that a folder is or holds."""
    runs = [path for path in (folder, folder / "run") if (path / "recipe.json").is_file()]
    return next((path for path in runs for learned in RUNS if (path / learned).is_dir()), None)


def _verify(folder: Path) -> None:
    written, found = damaged(folder)
    if found:
        raise UserError(
            f"{len(found)} of {written} files in {folder} are not as they were written ({', '.join(found)}); get them again, or "
            "make the model again from its plan: tomoe apply"
        )
    results().print(f"All {written} files in {folder} are as they were written (sha256).", soft_wrap=True)


def _show_plan(plan: Plan, found: list[Finding], as_json: bool) -> None:
    total = totals(plan)
    if as_json:
        warnings = [asdict(warning) for warning in found]
        typer.echo(json.dumps({"layers": plan.describe(), "totals": total, "warnings": warnings}, indent=2))
        return
    table = Table()
    titles, body = layer_table(plan)
    for title in titles:
        table.add_column(title, justify="right")
    for row in body:
        table.add_row(*row)
    console = results()
    console.print(table)
    for what, how in conversion_summary(plan):
        console.print(f"{what}: {how}", soft_wrap=True, markup=False)
    console.print(
        f"Of {total['block_params']:,} block parameters {total['active_block_params']:,} are active "
        f"({total['active_fraction']:.4f}) and {total['stored_block_params']:,} stored; "
        f"the routers add {total['router_params']:,}.",
        soft_wrap=True,
    )
    show_warnings(console, found)


def totals(plan: Plan) -> dict[str, Any]:
    """Counts of block parameters over all layers."""
    whole = block_total(plan.shape)
    stored = [(layer.union, plan.qk_dims(i), int(layer.value_kept.sum())) for i, layer in enumerate(plan.layers)]
    return {
        "num_layers": plan.shape.num_layers,
        "num_experts": plan.num_experts,
        "active_fraction": plan.active_fraction(),
        "block_params": whole,
        "active_block_params": round(plan.active_fraction() * whole),
        "stored_block_params": int(active_params(plan.shape, stored)),
        "router_params": sum(
            t.numel() for layer in plan.layers for t in (layer.router_weight, *layer.value_router.values())
        ),
    }


def _show_run(folder: Path, as_json: bool) -> None:
    learned = next(name for name in RUNS if (folder / name).is_dir())
    recipe: Recipe | FinetuneRecipe = RUNS[learned].load(folder / "recipe.json")
    run = RunFolder(folder, learned)
    checkpoint, rows = run.last(), run.rows()
    step = None if checkpoint is None else checkpoint.step
    if as_json:
        last = rows[-1] if rows else None
        typer.echo(json.dumps({"recipe": recipe.model_dump(mode="json"), "checkpoint": step, "last": last}, indent=2))
        return
    console = results()
    how = (
        f"{recipe.active:.0%} active" if isinstance(recipe, Recipe) else f"fine-tuning, {recipe.weights}, {recipe.form}"
    )
    console.print(f"Run on {recipe.model}, {how}, {recipe.train.steps} steps.", soft_wrap=True)
    console.print(f"Last whole checkpoint: {'none yet' if step is None else f'step {step}'}")
    if rows:
        console.print(f"Last logged step: {rows[-1]['step']}  {describe_step(rows[-1])}", soft_wrap=True)
