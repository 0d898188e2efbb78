"""`tomoe evaluate MODEL...`: perplexity, distance from the first model and tasks, of all models on the same text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tomoe.cli import options
from tomoe.cli.words import quiet_libraries
from tomoe.errors import UserError

if TYPE_CHECKING:
    from tomoe.evaluation.rows import Row
    from tomoe.evaluation.tasks import TaskSet


def evaluate(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Dense model first, then converted ones.")],
    text: options.Text = None,
    context: Annotated[int | None, typer.Option("--context", min=8, help="Sequence length (default: 1024).")] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", min=1, help="Tokens from one sequence to the next (default: the context)."),
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=8, help="Max tokens for evaluation.")] = None,
    suite: Annotated[
        Literal["paper", "moe"] | None, typer.Option("--suite", help="Run the tasks of a table in the paper.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", help="Run lm-eval tasks, with examples if given.", metavar="NAME,NAME:SHOTS"),
    ] = None,
    task_dir: Annotated[Path | None, typer.Option("--task-dir", help="Folder of task files.", metavar="DIR")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Max questions per task.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Batch size for tasks.")] = 8,
    active: options.Dials = None,
    dtype: options.EvaluationDtype = "auto",
    device: options.Device = "auto",
    offload: options.Offload = False,
    json_file: options.JsonFile = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", help="Also write the tables to this file.", metavar="FILE")
    ] = None,
) -> None:
    """Measure models on the same text: perplexity, KL, tasks."""
    task_set = _tasks(suite, tasks, task_dir, limit, batch_size)
    for name in models:
        options.check_model(name)

    from tomoe import distributed
    from tomoe.cli.screen import Screen
    from tomoe.evaluation.rows import to_json
    from tomoe.evaluation.run import dial_settings, save_dials
    from tomoe.evaluation.run import evaluate as run_evaluation
    from tomoe.evaluation.tables import to_markdown
    from tomoe.files import atomic_write, basename

    quiet_libraries()
    settings = dial_settings(models, active or ())
    with Screen() as screen:
        for name, point in settings:
            if point is not None:
                screen.say(f"{basename(name)}: {point}")
        rows = run_evaluation(
            models, text, context=context, stride=stride, tokens=tokens, tasks=task_set, active=active or (), dtype=dtype,
            device=device, offload=offload, on_progress=screen.on_progress,
        )  # fmt: skip
    if distributed.rank():
        return
    if json_file is not None:
        atomic_write(json_file, to_json(rows))
    if markdown_file is not None:
        atomic_write(markdown_file, to_markdown(rows))
    _show([name for name, _ in settings], rows)
    if active:
        _keep(lambda: save_dials(settings, rows))


def _keep(save: Callable[[], list[Path]]) -> None:
    """Keep the points in their folders. A folder that cannot be written, of somebody else, was measured all the same."""
    from tomoe.cli.screen import results

    try:
        files = save()
    except UserError as error:
        results().say(f"The points are not kept for the report: {error}")
        return
    for file in files:
        results().say(f"The points are kept in {file}; `tomoe report {file.parent}` draws them.")


def _show(names: Sequence[str], rows: Sequence[Row]) -> None:
    """Print the tables, then warnings; `names` are the models of the rows."""
    from tomoe.cli.screen import results, show_warnings
    from tomoe.evaluation.tables import tasks_to_rich, to_rich
    from tomoe.plan import Plan
    from tomoe.report.warnings import find_warnings

    console = results()
    console.print(to_rich(rows))
    if (scores := tasks_to_rich(rows)) is not None:
        console.print(scores)
    plans = {name: Plan.load(Path(name)) for name in names if (Path(name) / "plan.json").is_file()}
    for name, row in zip(names, rows, strict=True):
        # what is wrong with a plan is said once
        show_warnings(console, find_warnings(plans.pop(name, None), [row]), row.name)


def _tasks(
    suite: str | None, names: str | None, folder: Path | None, limit: int | None, batch_size: int
) -> TaskSet | None:
    """The requested tasks, before any model is loaded. Raises UserError if one does not exist."""
    if suite is None and names is None:
        if folder is not None or limit is not None:
            raise UserError("--task-dir and --limit need tasks; name some with --tasks, or a suite with --suite")
        return None
    from tomoe.evaluation.tasks import SUITES, TaskSet, parse_tasks

    specs = (*(SUITES[suite] if suite else ()), *(parse_tasks(names) if names is not None else ()))
    return TaskSet(specs, folder, limit=limit, batch_size=batch_size)
