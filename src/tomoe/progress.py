"""Progress callbacks: one for a command of several stages, one for a single stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

ProgressCallback = Callable[[str, int, int, Mapping[str, Any]], None]
"""Called as (stage, done, total, info) whenever a stage advances; `info` holds loss terms and the like."""

StageCallback = Callable[[int, int], None]  # called as (done, total) by a single stage, which does not know its name


def no_progress(stage: str, done: int, total: int, info: Mapping[str, Any]) -> None:
    """Ignore progress."""


def no_stage_progress(done: int, total: int) -> None:
    """Ignore the progress of a single stage."""


def stage_callback(on_progress: ProgressCallback, stage: str) -> StageCallback:
    """Report the progress of one stage to the callback of the command."""
    return lambda done, total: on_progress(stage, done, total, {})
