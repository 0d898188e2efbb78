"""Trains masks, and measures on held-out text, before and after, what their plan loses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tomoe.data.corpus import Sequences
from tomoe.model.running import family_head, hidden_states
from tomoe.plans import Plan
from tomoe.plans.masking import masked, planned_masks
from tomoe.progress import ProgressCallback
from tomoe.training.distillation import distill_loss
from tomoe.training.loop import BestWeights, Training, run_training

CHECKED_TOKENS = 4096
"""Held-out tokens that show, before and after training, what the masks lose."""


def train_masks_(
    training: Training, plan: Callable[[], Plan], text: Sequences, objective: str, on_progress: ProgressCallback
) -> dict[str, Any]:
    """Train from the last checkpoint, or else from the start, to the last step; `plan` makes the plan of `training.net`. Returns
    the notes for a plan."""
    steps = training.loop.steps

    def loss() -> float:
        return planned_loss(training.model, plan(), text.truncate(CHECKED_TOKENS), objective)

    # before the first step, and after the last
    checks = BestWeights(training.net, training.run, steps, loss, checks=1, keeps=False) if steps else None
    training.best = checks
    run_training(training, "train", on_progress)
    return learning_notes(steps, checks.state() if checks else {})


@torch.no_grad()
def planned_loss(model: Any, plan: Plan, text: Sequences, objective: str) -> float:
    """Return the dense model's loss under a plan's masks, in nats per token of `text`: the KL to itself, or the language-modeling
    loss if that is the objective.

    Every process reads all of the text: a sharded model runs in all of them or in none.
    """
    masks = planned_masks(plan, model.device)
    total = 0.0
    for ids, mask in zip(text.input_ids.split(1), text.mask.split(1), strict=True):
        ids, mask = ids.to(model.device), mask.to(model.device)
        teacher = hidden_states(model, ids, mask) if objective == "kl" else None
        with masked(model, masks):
            student = hidden_states(model, ids, mask)
        total += distill_loss(student, teacher, ids, mask, family_head(model)).item() * int(mask.sum())
    return total / text.tokens


def learning_notes(steps: int, checked: dict[str, Any]) -> dict[str, Any]:
    """Return the plan's notes on a training of `steps` steps; `checked` is the state of the checks on held-out text."""
    # not if the training was stopped before its last check, or if a loss was not finite
    if not steps or checked.get("checked") != steps or not math.isfinite(checked["start"]):
        return {"steps": steps}
    return {"steps": steps, "held_out_before": checked["start"], "held_out": checked["loss"]}
