"""`tomoe evaluate MODEL...`: perplexity, distance from the first model and tasks, of all models on the same text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tomoe import folders
from tomoe.cli import options
from tomoe.cli.console import Screen, output, quiet_libraries, show_warnings
from tomoe.errors import UserError
from tomoe.files import atomic_write, basename

if TYPE_CHECKING:
    from tomoe.evaluation import results
    from tomoe.evaluation import tasks as task_sets
    from tomoe.moe import active_experts

Suite = Annotated[
    Literal["paper", "moe"] | None, typer.Option("--suite", help="Run the tasks of one of the paper's tables.")
]
Tasks = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        help="Run tasks: humaneval, loops, or lm-eval's, optionally with a number of shots.",
        metavar="NAME,NAME:SHOTS",
    ),
]
RunCode = Annotated[
    bool,
    typer.Option("--run-code", help="Execute the programs that models generate (humaneval), with your user rights."),
]
MarkdownFile = Annotated[
    Path | None, typer.Option("--markdown", help="Also write the tables to this file.", metavar="FILE")
]


def evaluate(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Dense model first, then converted ones.")],
    text: options.Text = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=8, help="Sequence length (default: at most 1024)."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", min=1, help="Tokens between the starts of two sequences (default: the context)."),
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=8, help="Max tokens for evaluation.")] = None,
    suite: Suite = None,
    tasks: Tasks = None,
    task_dir: Annotated[Path | None, typer.Option("--task-dir", help="Folder of task files.", metavar="DIR")] = None,
    run_code: RunCode = False,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Max questions per task.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Batch size for tasks.")] = 8,
    active: options.ActiveFractions = None,
    dtype: options.EvaluationDtype = "auto",
    device: options.Device = "auto",
    offload: options.Offload = False,
    json_file: options.JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Measure models on the same text: perplexity, KL, tasks."""
    from tomoe.evaluation import evaluate as evaluation

    task_set = _tasks(suite, tasks, task_dir, limit, batch_size, run_code)
    for name in models:
        options.check_model(name)
    _check_files(json_file, markdown_file)

    quiet_libraries()
    settings = evaluation.settings_to_measure(models, active or ())
    measured: list[results.Row] = []
    try:
        with Screen() as screen:
            for name, point in settings:
                if point is not None:
                    screen.say(f"{basename(name)}: {point}")
            evaluation.evaluate(
                models,
                text,
                context=context,
                stride=stride,
                tokens=tokens,
                tasks=task_set,
                active=active or (),
                dtype=dtype,
                device=device,
                offload=offload,
                on_progress=screen.on_progress,
                on_row=measured.append,
            )
    finally:
        # what was measured before an error, or before the command was stopped, took its time
        if measured:
            _write(measured, json_file, markdown_file)
            _show(settings[: len(measured)], measured)


def _check_files(json_file: Path | None, markdown_file: Path | None) -> None:
    """Raise UserError for files that tomoe did not write, and if both are the same file."""
    from tomoe.evaluation import results, tables

    folders.refuse_foreign_file(json_file, f'"{results.FORMAT}"')
    folders.refuse_foreign_file(markdown_file, tables.MARK)
    if json_file and markdown_file and json_file.resolve() == markdown_file.resolve():
        raise UserError(f"--json and --markdown both name {json_file}; give each a file of its own")


def _write(measured: Sequence[results.Row], json_file: Path | None, markdown_file: Path | None) -> None:
    from tomoe import distributed
    from tomoe.evaluation import results, tables

    if distributed.rank():
        return
    if json_file is not None:
        atomic_write(json_file, results.to_json(list(measured)))
    if markdown_file is not None:
        atomic_write(markdown_file, tables.to_markdown(list(measured)))


def _show(settings: Sequence[tuple[str, active_experts.Setting | None]], measured: Sequence[results.Row]) -> None:
    """Print tables and warnings; save rows measured at several active fractions, one for each of `settings`."""
    from tomoe import distributed, plans
    from tomoe.evaluation import evaluate as evaluation
    from tomoe.evaluation import tables
    from tomoe.report import warnings

    if distributed.rank():
        return
    console = output()
    console.print(tables.to_rich(measured))
    for table in tables.more_to_rich(measured):
        console.print(table)
    read = {name: plans.read_plan(Path(name)) for name, _ in settings if (Path(name) / "plan.json").is_file()}
    for (name, _), row in zip(settings, measured, strict=True):
        # what is wrong with a plan is said once
        show_warnings(console, warnings.find_warnings(read.pop(name, None), [row]), row.name)
    try:
        for file in evaluation.save_active_curves(settings, measured):
            console.say(f"The measurements are saved in {file}; `tomoe report {file.parent}` plots them.")
    except UserError as error:
        # a folder that cannot be written, of somebody else, was measured all the same
        console.say(f"The measurements are not saved for the report: {error.wrong}")


def _tasks(
    suite: str | None, names: str | None, folder: Path | None, limit: int | None, batch_size: int, run_code: bool
) -> task_sets.TaskSet | None:
    """Parse the requested tasks before any model is loaded. Raises UserError if one does not exist."""
    from tomoe.evaluation import tasks as task_sets

    if suite is None and names is None:
        if folder is not None or limit is not None or run_code:
            raise UserError(
                "--task-dir, --limit and --run-code need tasks; name some with --tasks, or a suite with --suite"
            )
        return None
    specs = task_sets.parse_tasks(names) if names is not None else ()
    if suite:
        specs = (*task_sets.SUITES[suite], *specs)
    return task_sets.TaskSet(specs, folder, limit=limit, batch_size=batch_size, run_code=run_code)
