"""`tomoe doctor MODEL`: does it fit the method, does it fit this machine? Nothing is written."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from tomoe.cli import options
from tomoe.cli.console import Screen, output
from tomoe.errors import UserError
from tomoe.files import format_bytes

if TYPE_CHECKING:
    from tomoe.memory import doctor as examination


@options.makes_recipe("seed", "data", "start", "repair")
def doctor(chosen: options.RecipeOptions, as_json: options.AsJson = False) -> None:
    """Check whether a model can be converted: structure, reachable budgets, memory."""
    conversion = chosen.make()
    options.check_model(chosen.model)
    from tomoe.memory import doctor as examination

    with Screen():
        diagnosis = examination.examine(conversion)
    if as_json:
        typer.echo(json.dumps(asdict(diagnosis), indent=2))
    else:
        _show(diagnosis)
    if not diagnosis.lacking:
        return
    hint = f"; training may fit with {' or '.join(diagnosis.remedies)}" if diagnosis.remedies else ""
    if diagnosis.least[0].stage in diagnosis.lacking and not conversion.offload:
        settings = "offload=true, train.steps=0" if conversion.train.steps else "offload=true"
        text = " and a text of your own" if "self" in conversion.data.sources else ""
        hint += f"; with {settings}{text}, carving holds one layer at a time"
    raise UserError(f"this machine has too little free memory for {', '.join(diagnosis.lacking)}{hint}")


def _show(diagnosis: examination.Diagnosis) -> None:
    from tomoe.memory import duration

    console = output()
    sizes = diagnosis.sizes
    available = diagnosis.available
    shape, active = sizes.shape, diagnosis.active
    console.say(
        f"The structure fits: {shape.num_layers} layers of {shape.hidden_size} x {shape.mlp_size}, "
        f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}.",
        f"{sizes.total:,} parameters, {sizes.decoder_params:,} of them in "
        f"decoder layers ({sizes.decoder_params / sizes.total:.0%}). "
        f"At least {sizes.least_active:.1%} of the decoder parameters stay active; at {active:.0%}, "
        f"{sizes.of_all(active):.0%} of all parameters are.",
    )
    sizes_on_disk = ", ".join(f"{format_bytes(size)} in {name}" for name, size in diagnosis.file_bytes.items())
    decoding = diagnosis.decoding
    sentence = (
        decoding.sentence(diagnosis.one_expert, active)
        if decoding.routers
        else decoding.sentence_without_routers(active)
    )
    console.say(f"{sentence}.", f"The file takes {sizes_on_disk}.")
    for need in (*diagnosis.least, diagnosis.beside):
        if need is None:
            continue
        kind = " of main memory" if need is diagnosis.beside else ""
        parts = ", ".join(f"{format_bytes(size)} for {name}" for name, size in need.parts.items())
        console.say(f"About {format_bytes(need.total)}{kind} for {need.stage}: {parts}.")
    console.say(duration.in_words(diagnosis.seconds))
    free = available.device_memory or available.memory
    for fits, words in ((True, "Fits into what is free"), (False, "Does not fit")):
        named = [f"{name} {format_bytes(size)}" for name, size in diagnosis.works.items() if (size <= free) is fits]
        if named:
            console.say(f"{words}: {', '.join(named)}.")
    on_gpu = f", {format_bytes(available.device_memory)} on the GPU" if available.device_memory else ""
    console.say(f"Python and PyTorch take about 0.6 GB more. Free now: {format_bytes(available.memory)}{on_gpu}.")
