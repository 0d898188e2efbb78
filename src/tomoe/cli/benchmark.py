"""`tomoe benchmark DENSE MOE`: which is faster, by how much, and why; prefill and decoding apart. With `--engine llama.cpp`,
`tomoe benchmark MODEL` times what a model could be converted to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tomoe import files, folders
from tomoe.cli import options
from tomoe.cli.console import Screen, output
from tomoe.errors import UserError
from tomoe.progress import stage_callback

if TYPE_CHECKING:
    from tomoe.evaluation.speed import timings

Engine = Literal["pytorch", "llama.cpp"]
Actives = Annotated[
    Any,
    typer.Option(
        "--active",
        help="Active fraction of MOE; for llama.cpp the fractions to try.",
        parser=options.fractions,
        metavar="FRACTION",
        show_default="llama.cpp: 0.85,0.7,0.5",
    ),
]
LAYOUTS = (
    "Layers of random numbers, timed in turn: a ratio is the median over rounds, with the lowest and the highest; the bound "
    "counts bytes of weights. Tokens/s are of all layers and the output matrix, by their bytes"
)


def benchmark(
    dense: Annotated[str, typer.Argument(metavar="DENSE", help="Dense model.")],
    moe: Annotated[str | None, typer.Argument(metavar="MOE", help="Converted model.", show_default=False)] = None,
    engine: Annotated[
        Engine, typer.Option("--engine", help="llama.cpp: time expert layouts before DENSE is converted.")
    ] = "pytorch",
    batch: Annotated[str, typer.Option("--batch", help="Comma-separated batch sizes.")] = "1,8,64",
    prompt: Annotated[
        str,
        typer.Option(
            "--prompt", help="Comma-separated prompt lengths in tokens.", show_default="128,1024; llama.cpp 256"
        ),
    ] = "",
    text: options.Text = None,
    pairs: Annotated[int, typer.Option("--pairs", min=3, help="Max paired runs per cell.")] = 9,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Skip cells that take longer.")] = 60.0,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
    dtype: options.RunDtype = "bfloat16",
    device: options.Device = "auto",
    active: Actives = None,
    json_file: options.JsonFile = None,
) -> None:
    """Time a dense model and its conversion, or estimate the gain in llama.cpp before a conversion."""
    from tomoe.evaluation.speed import throughput, timings
    from tomoe.exporting.gguf import layout_speed

    mark = layout_speed.FORMAT if engine == "llama.cpp" else timings.FORMAT
    folders.refuse_foreign_file(json_file, f'"{mark}"')
    options.check_model(dense)
    if engine == "llama.cpp":
        if moe is not None:
            raise UserError(f"--engine llama.cpp times layouts of experts before a conversion: leave {moe} out")
        _time_layouts(
            dense, active or [0.85, 0.7, 0.5], _numbers("--prompt", prompt or "256"), threads or 1, pairs, json_file
        )
        return
    if moe is None:
        raise UserError("name the converted model, too: tomoe benchmark DENSE MOE; --engine llama.cpp needs none")
    options.check_model(moe)
    if active and len(active) > 1:
        raise UserError("--active lists several fractions, but a converted model runs at one fraction at a time")
    sizes = {"batch": _numbers("--batch", batch), "prompt": _numbers("--prompt", prompt or "128,1024")}

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
            active=active and active[0],
            on_progress=screen.on_progress,
        )
    _show(measured, json_file)


def _show(measured: timings.Benchmark, json_file: Path | None) -> None:
    from tomoe.evaluation import tables
    from tomoe.evaluation.speed import timings

    output().print(tables.rich_table(*timings.table(measured.cells), timings.footnote(measured)))
    if json_file is not None:
        files.atomic_write(json_file, timings.to_json(measured))


def _time_layouts(
    model: str, actives: list[float], prompts: list[int], threads: int, rounds: int, json_file: Path | None
) -> None:
    """Time layouts of experts in llama.cpp, with Q8_0 and Q4_K_M weights."""
    from tomoe.evaluation import tables
    from tomoe.exporting.gguf import layout_speed
    from tomoe.memory.estimate import available_memory

    if len(prompts) != 1:
        raise UserError(f"--engine llama.cpp takes one --prompt, not {len(prompts)}")
    with Screen() as screen:
        progress = stage_callback(screen.on_progress, "benchmark")
        rows = layout_speed.time_layouts(
            model,
            actives,
            prompt=prompts[0],
            rounds=rounds,
            threads=threads,
            memory=available_memory("cpu").memory,
            on_progress=progress,
        )
    output().print(tables.rich_table(*layout_speed.table(rows), f"{LAYOUTS}."))
    for precision in dict.fromkeys(row.candidate.precision for row in rows):
        for fraction in actives:
            taken = layout_speed.best(
                [r for r in rows if (r.candidate.precision, r.candidate.active) == (precision, fraction)]
            )
            output().say(f"{precision} at {fraction:.0%}: {layout_speed.how_to_convert(model, taken)}")
    if json_file is not None:
        files.atomic_write(json_file, layout_speed.to_json(model, threads, rows))


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{option} is {text!r}, but it should list positive whole numbers, for example {option} 1,8")
    return numbers
