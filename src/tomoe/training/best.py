"""The best weights of a run, by their loss on held-out text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tomoe import distributed
from tomoe.model.shape import ceil_div
from tomoe.training.run_folder import RunFolder


@dataclass
class BestWeights:
    """Checks what a run has learned so far on held-out text, and keeps the best of it in a file of the run. After a resume
    checks repeat bit by bit, so the file may be of a later step than the checkpoint."""

    net: nn.Module
    run: RunFolder
    steps: int
    held_out_loss: Callable[[], float]  # of `net` as it is, in nats
    checks: int  # how often the run is checked, besides its start
    keeps: bool = True  # whether the best weights go into a file; without it `take_` cannot be asked
    start: float = float("nan")  # the loss before the first step
    loss: float = float("nan")
    """The smallest loss, and the step that it was found after: 0 if no step was better than the start."""
    step: int = 0
    checked: int = -1

    def state(self) -> dict[str, Any]:
        return {"start": self.start, "loss": self.loss, "step": self.step, "checked": self.checked}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what a checkpoint kept, if it kept something."""
        if not state:
            return
        self.start, self.loss = float(state["start"]), float(state["loss"])
        self.step, self.checked = int(state["step"]), int(state["checked"])

    def check(self, step: int) -> dict[str, float]:
        """Measure after step 0, `checks` times on the way and after the last; returns the loss as a part of the step's row."""
        due = step % ceil_div(max(1, self.steps), self.checks) == 0 or step == self.steps
        if not due or step == self.checked:
            return {}
        loss = self.held_out_loss()
        self.checked = step
        if step == 0:
            self.start = self.loss = loss
        elif loss < self.loss:
            self.loss, self.step = loss, step
            if self.keeps:
                distributed.on_rank_zero(lambda: self.run.save_best(self.net))
        return {"held_out": loss}

    @property
    def improved(self) -> bool:
        """Whether some step was better than the start; a run without steps has nothing to improve."""
        return not self.steps or self.step > 0

    def take_(self) -> None:
        """Put the best weights in the place of the last, if some step `improved` them."""
        if self.step != self.steps:
            self.run.restore_best(self.net)
