"""`tomoe benchmark DENSE MOE`: which is faster, by how much, and why; prefill and decoding apart."""

from __future__ import annotations

from typing import Annotated

import typer

from tomoe import files, folders
from tomoe.cli import options
from tomoe.cli.console import Screen, output
from tomoe.errors import UserError
from tomoe.evaluation import tables
from tomoe.evaluation.speed import throughput, timings


def benchmark(
    dense: Annotated[str, typer.Argument(metavar="DENSE", help="Dense model.")],
    moe: Annotated[str, typer.Argument(metavar="MOE", help="Converted model.")],
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, separated by commas.")] = "1,8,64",
    prompt: Annotated[
        str, typer.Option("--prompt", help="Prompt lengths in tokens, separated by commas.")
    ] = "128,1024",
    text: options.Text = None,
    pairs: Annotated[int, typer.Option("--pairs", min=3, help="Max paired runs per cell.")] = 9,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Skip cells that take longer.")] = 60.0,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
    dtype: options.RunDtype = "bfloat16",
    device: options.Device = "auto",
    active: options.Dial = None,
    json_file: options.JsonFile = None,
) -> None:
    """Time a dense model and its MoE: prefill and decoding."""
    sizes = {"batch": _numbers("--batch", batch), "prompt": _numbers("--prompt", prompt)}
    for name in (dense, moe):
        options.check_model(name)
    folders.refuse_stranger(json_file, f'"{timings.FORMAT}"')

    with Screen() as screen:
        measured = throughput.benchmark(
            dense,
            moe,
            sizes["batch"],
            sizes["prompt"],
            text=text,
            pairs=pairs,
            seconds=seconds,
            threads=threads,
            dtype=dtype,
            device=device,
            active=active,
            on_progress=screen.on_progress,
        )
    output().print(tables.rich_table(*timings.table(measured.cells), timings.footnote(measured)))
    if json_file is not None:
        files.atomic_write(json_file, timings.to_json(measured))


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{option} is {text!r}, but it should list positive whole numbers, for example {option} 1,8")
    return numbers
