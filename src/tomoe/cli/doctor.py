"""`tomoe doctor MODEL`: does it fit the method, does it fit this machine, how long will it take? Nothing is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tomoe.cli import options
from tomoe.errors import UserError

if TYPE_CHECKING:
    from tomoe.memory.doctor import Diagnosis


@options.makes_recipe("seed", "data", "start", "repair")
def doctor(
    chosen: options.RecipeOptions,
    trial: Annotated[
        bool,
        typer.Option("--trial", help="Also run the stages on a few layers, to estimate memory and time (minutes)."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Check before a conversion: structure, reachable budgets, memory."""
    conversion = chosen.make()
    options.check_model(chosen.model)

    from tomoe.cli.screen import Screen
    from tomoe.memory.doctor import examine, lacks

    with Screen() as screen:

        def on_progress(stage: str, done: int, total: int, info: Mapping[str, Any] | None = None) -> None:
            screen.on_progress(stage, done, total, info or {})

        diagnosis = examine(conversion, on_progress, trial)
    if as_json:
        typer.echo(json.dumps(asdict(diagnosis), indent=2))
    else:
        _show(diagnosis, conversion.active, conversion.train.steps)
    available = diagnosis.available
    lacking = [e.stage for e in diagnosis.estimates if lacks(available, e)]
    if not diagnosis.estimates:
        lacking = [need.stage for need in diagnosis.least if need.total > (available.device_memory or available.memory)]
    if lacking:
        steps = conversion.train.steps
        hint = f"; training would fit with {' or '.join(diagnosis.remedies)}" if diagnosis.remedies else ""
        if "carve" in lacking and not conversion.offload:
            settings = "offload=true, train.steps=0" if steps else "offload=true"
            text = " and a text of your own" if "self" in conversion.data.sources else ""
            hint += f"; with {settings}{text}, carving holds one layer at a time"
        elif steps and not trial:
            hint += "; --trial looks for settings that fit"
        raise UserError(f"this machine has too little free memory for {', '.join(lacking)}{hint}")


def _show(diagnosis: Diagnosis, active: float, steps: int) -> None:
    from rich.table import Table

    from tomoe.cli.screen import duration, results
    from tomoe.files import format_bytes

    console, sizes, available = results(), diagnosis.sizes, diagnosis.available
    shape = sizes.shape
    console.say(
        f"The structure fits: {shape.num_layers} layers of {shape.hidden_size} x {shape.mlp_size}, "
        f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}.",
        f"{sizes.total:,} parameters, {sizes.decoder_params:,} of them in "
        f"decoder layers ({sizes.decoder_params / sizes.total:.0%}). "
        f"At least {sizes.least_active:.1%} of the decoder parameters stay active; at {active:.0%}, "
        f"{sizes.of_all(active):.0%} of all parameters are.",
    )
    for need in diagnosis.least:
        parts = ", ".join(f"{format_bytes(size)} for {name}" for name, size in need.parts.items())
        console.say(f"At least {format_bytes(need.total)} for {need.stage}: {parts}.")
    gpu = format_bytes(available.device_memory) if available.device_memory else "-"
    if not diagnosis.estimates:
        on_gpu = f", {gpu} on the GPU" if available.device_memory else ""
        console.say(f"Free now: {format_bytes(available.memory)}{on_gpu}. Time and real peaks: --trial (minutes).")
        return
    table = Table()
    for title in ("stage", "main memory", "GPU memory", "time"):
        table.add_column(title, justify="left" if title == "stage" else "right")
    for e in diagnosis.estimates:
        time = f"{duration(diagnosis.train_seconds)} ({steps} steps)" if e.stage == "train" else duration(e.seconds)
        table.add_row(e.stage, format_bytes(e.memory), format_bytes(e.device_memory) if e.device_memory else "-", time)
    table.add_row("free now", format_bytes(available.memory), gpu, "")
    console.print(table)
