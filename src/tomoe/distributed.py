"""The ranks that `torchrun` started, and the few collectives that they need.

The forward passes of a step (`train.gradient_accumulation_steps`) are divided among the ranks, so a step is the same for any
number of ranks: same text, same draws, same gradient up to the order of its sum. All trained parameters are small and
replicated. Sequences to evaluate and rounds of text to sample are divided, too, and combined by sums in which all but one
term are zero: bit for bit the result of one process. Only rank 0 writes files.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tomoe.errors import Advice, UserError, shortened
from tomoe.files import remove_leftovers
from tomoe.locks import folder_lock

TIMEOUT = timedelta(hours=12)  # rank 0 prepares text, runs tasks and folds while the others wait
RESUME = Advice("resume", "to run the same command on")
RESTART = "run the same command again"


P = ParamSpec("P")
R = TypeVar("R")


class OtherRankFailed(SystemExit):
    """Rank 0 failed and printed why; the other ranks exit silently."""


def rank() -> int:
    """The rank of this process in its group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of processes in the group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def process_group() -> Iterator[None]:
    """Connect the processes that torchrun started, if any. Raises UserError if the others do not answer."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the processes of this run cannot reach each other ({_first_line(error)})") from error
    try:
        yield
    finally:
        leave_group()


def on_rank_zero(work: Callable[[], object]) -> bool:
    """Run the work on rank 0 while the others wait; return in every rank whether its result was true. If it fails there, every
    rank exits (the others by OtherRankFailed)."""
    if world_size() == 1:
        return bool(work())
    # 0: failed, 1: returned something false, 2: something true
    outcome = torch.zeros(1)
    try:
        if rank() == 0:
            outcome += 2 if work() else 1
    finally:
        _collective(partial(dist.broadcast, outcome, 0))
    if not outcome:
        raise OtherRankFailed(2)
    return bool(outcome == 2)


@contextmanager
def locked(folder: Path, command: str) -> Iterator[None]:
    """Hold the lock of a folder on rank 0 for all ranks, and delete what killed processes left half-written there; if another
    process holds it, every rank exits."""
    with ExitStack() as stack:

        def take() -> None:
            stack.enter_context(folder_lock(folder, command))
            remove_leftovers(folder)

        on_rank_zero(take)
        yield


def locks_out(command: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that writes the folder `out` to hold that folder's lock while it runs."""

    def decorate(work: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(work)

        @wraps(work)
        def locked_work(*args: P.args, **kwargs: P.kwargs) -> R:
            with locked(Path(signature.bind(*args, **kwargs).arguments["out"]), command):
                return work(*args, **kwargs)

        return locked_work

    return decorate


def broadcast_(tensors: Iterable[Tensor], source: int = 0) -> None:
    """Overwrite these tensors with those of rank `source`, in all ranks. Raises UserError if one is gone."""
    if world_size() == 1:
        return
    for t in tensors:
        _collective(partial(dist.broadcast, t, source))
    _collective(dist.barrier)


def sum_gradients_(net: nn.Module) -> None:
    """Sum every gradient over all ranks, bitwise equal in each. Raises UserError if a rank is gone."""
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    if world_size() == 1 or not gradients:
        return
    flat = torch.cat([g.flatten() for g in gradients])
    _collective(partial(dist.all_reduce, flat))
    for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(part.view_as(g))


def all_reduce_scalars(values: Iterable[float]) -> list[float]:
    """Sum each number over all ranks. Raises UserError if a rank is gone."""
    t = torch.tensor(list(values), dtype=torch.float64)
    all_reduce_(t, RESUME)
    return t.tolist()


def rank_indices(count: int) -> range:
    """Return which of `count` work items belong to this rank."""
    return range(rank(), count, world_size())


def is_sharded(model: nn.Module) -> bool:
    """Whether every rank holds only a part of the model, so that it must run in all ranks at once."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def all_reduce_(t: Tensor, advice: str | Advice = RESTART) -> None:
    """Combine tensors that each rank filled for its share and left zero elsewhere. Raises UserError if a rank is gone."""
    if world_size() > 1:
        _collective(partial(dist.all_reduce, t), advice)


def leave_group() -> None:
    """Leave the process group: from now on every process is rank 0 of 1."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _collective(operation: Callable[[], object], advice: str | Advice = RESUME) -> None:
    try:
        operation()
    except RuntimeError as error:
        raise UserError(
            f"another process of this run ended, so rank {rank()} cannot continue ({_first_line(error)})",
            advice,
        ) from error


def _first_line(error: Exception) -> str:
    return shortened(str(error).strip().splitlines()[0])
