"""`tomoe finetune OUT --data SRC -o HEALED`: the weights of a converted model learn on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tomoe import distributed
from tomoe.cli.options import DataOption, ForceOption, OutOption, ResumeOption, SeedOption, SetOption, StepsOption
from tomoe.cli.screen import Screen, results, show_warnings
from tomoe.cli.stopping import resumable
from tomoe.evaluation.compare import to_rich
from tomoe.finetuning import run as stages
from tomoe.plan import Plan
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.report.warnings import find_warnings


def finetune(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `tomoe convert` wrote.")],
    out: OutOption,
    data: DataOption = None,
    form: Annotated[
        Literal["moe", "pseudo"] | None,
        typer.Option("--form", help="moe: the model itself; pseudo: the dense model under the plan's masks."),
    ] = None,
    weights: Annotated[
        Literal["full", "lora"] | None, typer.Option("--weights", help="All weights, or adapters beside them (peft).")
    ] = None,
    objective: Annotated[
        Literal["kl", "lm"] | None,
        typer.Option("--objective", help="kl: what the dense model predicts; lm: the text's next token."),
    ] = None,
    dense: Annotated[
        str | None, typer.Option("--dense", help="The dense model, where it is not found as the plan names it.")
    ] = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="Recipe file (.toml, .json).", metavar="FILE")] = None,
    changes: SetOption = None,
    resume: ResumeOption = False,
    force: ForceOption = False,
) -> None:
    """Heal a converted model, or teach it something: its weights and routers learn; writes a folder of the same kind."""
    named = {
        "model": str(folder), "dense": dense, "form": form, "weights": weights, "loss.objective": objective,
        "data.sources": data or None, "train.steps": steps, "seed": seed,
    }  # fmt: skip
    overrides = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    made = FinetuneRecipe.load(recipe, overrides + (changes or []))
    with Screen() as screen, resumable(out / "run"):
        stages.finetune(made, out, resume, force, screen.listen)
        rows = stages.measure(made, out, screen.listen)
    if distributed.rank():
        return
    console = results()
    console.print(to_rich(rows))
    show_warnings(console, find_warnings(Plan.load(out), rows[-1:]))
    console.print(
        f"\nModel, plan and card are in {out}: a converted model like any other.", soft_wrap=True, markup=False
    )
