"""Several processes on one piece of work: those that `torchrun` started, and the few things they tell each other.

The forward passes of a step (`train.gradient_accumulation`) are shared out over the processes, so a step is the same step
however many take part: same text, same draws, same gradient but for the order of its sum. Everything that is trained is
small and stands whole in every process. Blocks of text to be measured, and rounds of text to be sampled, are shared out
too, and come together by sums in which all but one term are zero: to the bit what one process finds. Process 0 alone
writes files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tomoe.errors import UserError

PATIENCE = timedelta(hours=12)  # process 0 prepares text, puts tasks and folds while the others wait
RESUME, ANEW = "give the same command with --resume", "give the same command again"


class Elsewhere(SystemExit):
    """Process 0 has failed and says why; the others leave in silence."""


def rank() -> int:
    """Which of the processes this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def together() -> Iterator[None]:
    """Inside the block the processes that torchrun started know each other. Without torchrun: nothing.

    Gloo on the CPU, NCCL beside it where there is CUDA. Raises UserError where the others do not answer.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the processes of this run cannot reach each other ({_first_line(error)})") from error
    try:
        yield
    finally:
        part()


def first(work: Callable[[], object]) -> bool:
    """Process 0 does it while the others wait, and all hear whether it returned something true.

    Where it fails there, every process leaves.
    """
    if size() == 1:
        return bool(work())
    done = torch.zeros(1)
    try:
        if rank() == 0:
            done += 2 if work() else 1
    finally:
        _say(partial(dist.broadcast, done, 0))
    if not done:
        raise Elsewhere(2)
    return bool(done == 2)


def copy_(tensors: Iterable[Tensor], source: int = 0) -> None:
    """Fill these tensors with what they hold in process `source`; all processes leave together."""
    for t in tensors:
        _say(partial(dist.broadcast, t, source))
    _say(dist.barrier)


def sum_gradients_(net: nn.Module) -> None:
    """Every gradient becomes the sum over all processes, the same bits in each. Raises UserError where one is gone."""
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    if size() == 1 or not gradients:
        return
    flat = torch.cat([g.flatten() for g in gradients])
    _say(partial(dist.all_reduce, flat))
    for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(part.view_as(g))


def sums(values: Iterable[float]) -> list[float]:
    """The sum over all processes of each number."""
    t = torch.tensor(list(values), dtype=torch.float64)
    _say(partial(dist.all_reduce, t))
    return [float(v) for v in t]


def share(count: int) -> range:
    """Which of `count` pieces of work are this process's."""
    return range(rank(), count, size())


def shares_out(model: nn.Module) -> bool:
    """Whether every process holds a part of the model only, so that it runs in all of them at once or not at all."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def collect_(t: Tensor) -> None:
    """Bring together what every process filled in for its share; elsewhere it has left zeros. Raises UserError as others do."""
    _say(partial(dist.all_reduce, t), ANEW)


def part() -> None:
    """From here on every process is by itself, and number 0 of 1."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _say(talk: Callable[[], object], advice: str = RESUME) -> None:
    if size() == 1:
        return
    try:
        talk()
    except RuntimeError as error:
        raise UserError(
            f"another process of this run ended, so process {rank()} cannot go on ({_first_line(error)}); {advice}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]
