"""`tomoe evaluate MODEL...`: perplexity, distance from the first model and tasks, of all models on the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tomoe import api, distributed
from tomoe.cli.screen import Screen, results, show_warnings
from tomoe.errors import UserError
from tomoe.evaluation.compare import tasks_to_rich, to_json, to_markdown, to_rich
from tomoe.evaluation.tasks import BATCH, SUITES, TaskSet, parse_tasks
from tomoe.files import write_whole
from tomoe.plan import Plan
from tomoe.report.warnings import find_warnings


def evaluate(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="The dense model first, then converted ones.")
    ],
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            help="wikitext, c4, ptb, a hub id or a file; without it, what a converted folder held out.",
            metavar="FILE_OR_SOURCE",
        ),
    ] = None,
    context: Annotated[int | None, typer.Option("--context", min=8, help="Tokens of a block (default: 1024).")] = None,
    stride: Annotated[
        int | None, typer.Option("--stride", min=1, help="Tokens from one block to the next (default: the context).")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=8, help="Measure on no more than these.")] = None,
    suite: Annotated[
        Literal["paper", "moe"] | None, typer.Option("--suite", help="Tasks of the paper's tables, with their shots.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="lm-eval's tasks, some with examples.", metavar="NAME,NAME:SHOTS")
    ] = None,
    task_dir: Annotated[Path | None, typer.Option("--task-dir", help="Folder of task files.", metavar="DIR")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Questions of a task, at most.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Requests of tasks at a time.")] = BATCH,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option("--dtype")] = "bfloat16",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    stream: Annotated[
        bool, typer.Option("--stream", help="Leave the layers in their files: slow, but in the memory of one.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here, too.")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the tables here, too.")] = None,
) -> None:
    """Measure models side by side; the first is the reference. Under torchrun the blocks of text are shared out."""
    asked = _tasks(suite, tasks, task_dir, limit, batch_size)
    with Screen() as screen:
        rows = api.evaluate(
            models, text, context=context, stride=stride, tokens=tokens, tasks=asked, dtype=dtype, device=device,
            stream=stream, listen=screen.listen,
        )  # fmt: skip
    if distributed.rank():
        return
    if json_file is not None:
        write_whole(json_file, to_json(rows))
    if markdown_file is not None:
        write_whole(markdown_file, to_markdown(rows))
    console = results()
    console.print(to_rich(rows))
    if (shown := tasks_to_rich(rows)) is not None:
        console.print(shown)
    for name, row in zip(models, rows, strict=True):
        plan = Plan.load(Path(name)) if (Path(name) / "plan.json").is_file() else None
        show_warnings(console, find_warnings(plan, [row]), row.name)


def _tasks(
    suite: str | None, names: str | None, folder: Path | None, limit: int | None, batch_size: int
) -> TaskSet | None:
    """The tasks that are asked for, before any model is loaded. Raises UserError where one cannot be had."""
    specs = (*(SUITES[suite] if suite else ()), *(parse_tasks(names) if names is not None else ()))
    if not specs:
        if folder is not None or limit is not None:
            raise UserError("no task is asked for; name some with --tasks, or a suite with --suite")
        return None
    return TaskSet(specs, folder, limit=limit, batch_size=batch_size)
