"""Experiment trackers: TensorBoard, trackio, wandb. They receive what metrics.jsonl gets, which stays the source.

A resumed run is sent to its tracker from the first step, so that every start of a run is a whole curve.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from tomoe.errors import UserError

PROJECT = "tomoe"
NONE = "none"
Row = Mapping[str, Any]
RowCallback = Callable[[Row], None]


def check(kind: str) -> None:
    """Check that the tracker's package is installed, before a run begins. Raises UserError if it is not."""
    if kind != NONE and importlib.util.find_spec(kind) is None:
        raise UserError(
            f"the recipe sets report_to={kind}, but the package {kind} is not installed; install it with: pip install {kind}"
        )


@contextmanager
def tracked(
    kind: str, run: Path, config: Mapping[str, Any], before: Iterable[Row] = (), name: str = ""
) -> Iterator[RowCallback]:
    """Open a tracker, send it the rows `before`, yield the callback for later rows, and close it at the end in any case.

    TensorBoard writes to RUN/tensorboard; trackio and wandb log to their project `tomoe` under `name` (default: that of the
    folder), as their own settings say. Raises UserError if the tracker cannot start.
    """
    if kind == NONE:
        yield lambda row: None
        return
    check(kind)
    # stdout is for results, and trackers print there
    with redirect_stdout(sys.stderr):
        try:
            opened = _tensorboard(run) if kind == "tensorboard" else _client(kind, name or run.name, dict(config))
        # which exceptions a tracker raises differs from version to version
        except Exception as error:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise UserError(f"{kind} cannot start: {reason}; set it up, or use report_to=none") from error
    log_row, close = opened
    try:
        for row in before:
            log_row(row)
        yield log_row
    finally:
        with redirect_stdout(sys.stderr):
            close()


def _numbers(row: Row) -> dict[str, float]:
    """Return what can be plotted: numbers, and booleans as 0 and 1. A row has null for a number that is not finite."""
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float) and key != "step"}


def _tensorboard(run: Path) -> tuple[RowCallback, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    # a resumed run is sent again from the first step
    writer = SummaryWriter(str(run / "tensorboard"), purge_step=0)

    def log_row(row: Row) -> None:
        for key, value in _numbers(row).items():
            writer.add_scalar(f"train/{key}", value, row["step"])

    return log_row, writer.close


def _client(kind: str, name: str, config: dict[str, Any]) -> tuple[RowCallback, Callable[[], None]]:
    """Open wandb, or trackio, which has the same interface."""
    run = importlib.import_module(kind).init(project=PROJECT, name=name, config=config)
    return lambda row: run.log(_numbers(row), step=row["step"]), run.finish
