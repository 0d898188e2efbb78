"""`tomoe finetune OUT --data SRC -o TUNED`: train weights and routers of a converted model."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tomoe.cli import options
from tomoe.cli.console import Screen, output, show_warnings
from tomoe.cli.signals import resumable
from tomoe.model import names
from tomoe.recipe.finetuning import FinetuneRecipe


def finetune(
    folder: options.Converted,
    out: options.Out,
    data: options.Data = None,
    weights: Annotated[
        Literal["full", "lora"] | None,
        typer.Option("--weights", help="Train all weights (full) or LoRA adapters (peft)."),
    ] = None,
    objective: Annotated[
        Literal["kl", "lm"] | None,
        typer.Option("--objective", help="kl: match the dense model; lm: predict the next token of the text."),
    ] = None,
    dense: options.Dense = None,
    steps: options.Steps = None,
    seed: options.Seed = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="Recipe file (.toml, .json).", metavar="FILE")] = None,
    changes: options.Changes = None,
    resume: options.Resume = False,
    force: options.Force = False,
) -> None:
    """Fine-tune a converted model to recover quality."""
    named: dict[str, object] = {
        "model": str(folder),
        "dense": dense,
        "weights": weights,
        "loss.objective": objective,
        "data.sources": data or None,
        "train.steps": steps,
        "seed": seed,
    }
    tuning = names.located(FinetuneRecipe.load(recipe, options.overrides(named) + (changes or [])))
    options.check_out(out, out / "run", tuning, resume, force)
    from tomoe import distributed, plans
    from tomoe.evaluation import tables
    from tomoe.finetuning import finetune as finetuning
    from tomoe.report import warnings

    with Screen() as screen, resumable(out / "run"):
        finetuning.finetune(tuning, out, resume, force, screen.on_progress)
        rows = finetuning.measure_improvement(tuning, out, screen.on_progress)
    if distributed.rank():
        return
    console = output()
    console.print(tables.to_rich(rows))
    found = [*warnings.find_warnings(plans.read_plan(out), rows[-1:]), *warnings.find_worsening(*rows[-2:])]
    show_warnings(console, found)
    console.say(f"\nModel, plan and card are in {out}: a converted model like any other.")
