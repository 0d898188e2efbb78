"""`tomoe doctor MODEL`: does it fit the method, does it fit this machine, how long will it take? Nothing is written."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from tomoe.cli.options import (
    ActiveOption,
    AttentionOption,
    ModelArgument,
    RecipeOption,
    SetOption,
    StepsOption,
    make_recipe,
)
from tomoe.cli.screen import Screen, duration, results
from tomoe.errors import UserError
from tomoe.memory.doctor import Diagnosis, examine, lacks
from tomoe.memory.estimate import gb


def doctor(
    model: ModelArgument,
    active: ActiveOption = None,
    recipe: RecipeOption = None,
    changes: SetOption = None,
    steps: StepsOption = None,
    attention: AttentionOption = None,
    count_only: Annotated[
        bool, typer.Option("--count-only", help="Try nothing; the model's config.json is enough.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say before a conversion whether it will work: structure, reachable budgets, memory, time."""
    made = make_recipe(recipe, changes, model=model, active=active, steps=steps, attention=attention)
    with Screen() as screen:
        found = examine(made, lambda stage, done, total: screen.listen(stage, done, total, {}), not count_only)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        _show(found, made.active, made.train.steps)
    lacking = [e.stage for e in found.estimates if lacks(found.room, e)]
    if lacking:
        hint = f"; training would fit with {' or '.join(found.remedies)}" if found.remedies else ""
        if "carve" in lacking and not made.stream:
            hint += "; with stream=true, train.steps=0 and a text of your own, carving holds one layer at a time"
        raise UserError(f"this machine has too little free memory for {', '.join(lacking)}{hint}")


def _show(found: Diagnosis, active: float, steps: int) -> None:
    console, s = results(), found.sizes
    console.print(
        f"The structure fits: {s.shape.num_layers} layers of {s.shape.hidden_size} x {s.shape.mlp_size}, "
        f"{s.shape.num_heads}/{s.shape.num_kv_heads} heads of {s.shape.head_dim}.\n"
        f"{s.total:,} weights, {s.blocks:,} of them in the blocks ({s.blocks / s.total:.0%}). The blocks can be cut to "
        f"{s.least_active:.1%} active; {active:.0%} of the blocks are {s.of_all(active):.0%} of all weights.",
        soft_wrap=True,
    )
    for need in found.least:
        parts = ", ".join(f"{gb(size)} for {name}" for name, size in need.parts.items())
        console.print(f"For {need.stage}, by arithmetic, at the least {gb(need.total)}: {parts}.", soft_wrap=True)
    if not found.estimates:
        return
    table = Table()
    for title in ("stage", "main memory", "GPU memory", "time"):
        table.add_column(title, justify="left" if title == "stage" else "right")
    for e in found.estimates:
        time = f"{duration(found.train_seconds)} ({steps} steps)" if e.stage == "train" else duration(e.seconds)
        table.add_row(e.stage, gb(e.memory), gb(e.device_memory) if e.device_memory else "-", time)
    table.add_row(
        "free now", gb(found.room.memory), gb(found.room.device_memory) if found.room.device_memory else "-", ""
    )
    console.print(table)
