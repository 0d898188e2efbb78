"""What the masks of a plan lose on held-out text: measured before and after learning."""

from __future__ import annotations

from typing import Any

import torch

from tomoe.data.corpus import Sequences
from tomoe.model.running import family_head, hidden_states
from tomoe.plan import Plan
from tomoe.pruning.masking import masked, planned_masks
from tomoe.training.distillation import distill_loss


@torch.no_grad()
def planned_loss(model: Any, plan: Plan, text: Sequences, objective: str) -> float:
    """Return what the dense model loses under a plan's masks, in nats a token of `text`: the KL to itself, or the
    language-modeling loss if that is the objective.

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
