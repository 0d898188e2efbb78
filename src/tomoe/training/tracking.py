"""Experiment trackers that follow a training run: TensorBoard, trackio, wandb. The run's metrics.jsonl stays the source.

Whatever a tracker gets stands there, and a run that goes on is told to the tracker from its first step: every start of a
run is a whole curve.
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
Follower = Callable[[Row], None]


def check(kind: str) -> None:
    """Raises UserError where the tracker's package is not installed; to be asked before a run begins."""
    if kind != NONE and importlib.util.find_spec(kind) is None:
        raise UserError(
            f"the recipe asks for track={kind}, but the package {kind} is not installed; install it with: pip install {kind}"
        )


@contextmanager
def tracked(
    kind: str, run: Path, config: Mapping[str, Any], before: Iterable[Row] = (), name: str = ""
) -> Iterator[Follower]:
    """Open a tracker, tell it the rows of `before`, give who takes the next ones; close it at the end, whatever happens.

    TensorBoard writes to RUN/tensorboard; trackio and wandb to their project `tomoe`, under `name` (default: the folder's),
    where their own settings say. Raises UserError where the tracker cannot begin.
    """
    if kind == NONE:
        yield lambda row: None
        return
    check(kind)
    with redirect_stdout(sys.stderr):  # what they say is no result
        try:
            opened = _tensorboard(run) if kind == "tensorboard" else _client(kind, name or run.name, dict(config))
        except Exception as error:  # theirs differ from version to version
            said = str(error).strip().split("\n")[0]
            raise UserError(
                f"{kind} cannot begin: {said or type(error).__name__}; set it up, or give track=none"
            ) from error
    follow, close = opened
    try:
        for row in before:
            follow(row)
        yield follow
    finally:
        with redirect_stdout(sys.stderr):
            close()


def _numbers(row: Row) -> dict[str, float]:
    """What can be drawn: numbers, yes and no as 1 and 0. What was not finite is null in a row, and left out."""
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float) and key != "step"}


def _tensorboard(run: Path) -> tuple[Follower, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"), purge_step=0)  # an earlier start of this run is told again

    def follow(row: Row) -> None:
        for key, value in _numbers(row).items():
            writer.add_scalar(f"train/{key}", value, row["step"])

    return follow, writer.close


def _client(kind: str, name: str, config: dict[str, Any]) -> tuple[Follower, Callable[[], None]]:
    """trackio speaks as wandb does."""
    run = importlib.import_module(kind).init(project=PROJECT, name=name, config=config)
    return lambda row: run.log(_numbers(row), step=row["step"]), run.finish
