"""`tomoe benchmark DENSE MOE`: which is faster, by how much, and why; prefill and decoding apart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tomoe import api
from tomoe.cli.screen import Screen, results
from tomoe.errors import UserError
from tomoe.evaluation.throughput import to_json, to_rich
from tomoe.files import write_whole


def benchmark(
    dense: Annotated[str, typer.Argument(metavar="DENSE", help="The dense model.")],
    moe: Annotated[str, typer.Argument(metavar="MOE", help="The converted model.")],
    batch: Annotated[str, typer.Option("--batch", help="Rows, separated by commas.")] = "1,8,64",
    prompt: Annotated[str, typer.Option("--prompt", help="Tokens of a row, separated by commas.")] = "128,1024",
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="FILE_OR_SOURCE", help="File or source; without it, what MOE held out."),
    ] = None,
    pairs: Annotated[int, typer.Option("--pairs", min=3, help="Pairs of runs of a cell, at most.")] = 9,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Cells that take longer are left out.")] = 60.0,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option("--dtype")] = "bfloat16",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here, too.")] = None,
) -> None:
    """Time two models side by side, run after run."""
    sizes = {"batch": _numbers("--batch", batch), "prompt": _numbers("--prompt", prompt)}
    with Screen() as screen:
        measured = api.benchmark(
            dense, moe, sizes["batch"], sizes["prompt"], text=text, pairs=pairs, seconds=seconds, threads=threads,
            dtype=dtype, device=device, listen=screen.listen,
        )  # fmt: skip
    results().print(to_rich(measured))
    if json_file is not None:
        write_whole(json_file, to_json(measured))


def _numbers(option: str, given: str) -> list[int]:
    try:
        found = [int(part) for part in given.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"{option} {given!r} is no list of whole numbers above zero; write for example {option} 1,8")
    return found
