"""The objective that masks and routers are learned with, and one step of it. The frozen dense model is the teacher, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from tomoe.model.shape import ModelShape
from tomoe.pruning.losses import (
    active_fraction,
    balance_penalty,
    budget_penalty,
    coverage_penalty,
    distill_loss,
    layer_fractions,
)
from tomoe.pruning.mask_network import MaskNetwork, SampledLayerMasks
from tomoe.pruning.masking import masked
from tomoe.recipe.conversion import LossSection, Recipe
from tomoe.seeds import derive_seed
from tomoe.training.loop import StepFn
from tomoe.training.teacher import TeacherCache, hidden_states


def objective(
    distill: Float[Tensor, ""],
    masks: Sequence[SampledLayerMasks],
    shape: ModelShape,
    target: float,
    weights: LossSection,
    uniform_layers: bool = False,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Return the weighted sum (Eq. 10, Sec. 3.5) and its unweighted terms, with the sampled active fraction among them."""
    fraction = active_fraction(masks, shape)
    terms = {
        "budget": budget_penalty(layer_fractions(masks, shape) if uniform_layers else fraction, target),
        "coverage": coverage_penalty(masks),
        "balance": balance_penalty([m.routing for m in masks]),
    }
    factors = {
        "budget": weights.budget_weight,
        "coverage": weights.coverage_weight,
        "balance": weights.balance_weight,
    }
    # a weight of zero is an ablation: the term is still reported, but gives no gradient
    loss = distill + sum(factors[name] * term for name, term in terms.items() if factors[name])
    return loss, {"distill": distill, **terms, "active_fraction": fraction}


def budget_target(recipe: Recipe, step: int) -> float:
    """Return the active fraction that a step aims at: it falls from 1 to `active` during the budget warm-up."""
    warmup_steps = recipe.train.budget_warmup_steps
    progress = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    return 1.0 - (1.0 - recipe.active) * progress


def micro_step(
    model: PreTrainedModel,
    net: MaskNetwork,
    recipe: Recipe,
    batch: Any,
    step: int,
    micro: int,
    teacher_hidden: Callable[[PreTrainedModel, Tensor, Tensor], Tensor] = hidden_states,
) -> dict[str, float]:
    """Run forward and backward on one batch; leaves gradients (of the mean over micro-batches) in `net`.

    Returns the loss and its terms. `teacher_hidden` gives the dense model's final hidden states [T, D] of ids and mask
    [B, S].
    """
    ids, mask = batch.input_ids.to(model.device), batch.mask.to(model.device)
    masks = net(derive_seed(recipe.seed, "step", step), derive_seed(recipe.seed, "tokens", step, micro))
    valid = None if bool(mask.all()) else mask.flatten()
    for layer_masks in masks:
        layer_masks.valid = valid
    teacher = None
    if recipe.loss.objective == "kl":
        with torch.no_grad():
            teacher = teacher_hidden(model, ids, mask)
    # around the backward pass too: activation checkpointing runs layers again there
    with masked(model, masks):
        student = hidden_states(model, ids, mask)
        distill = distill_loss(student, teacher, ids, mask, model.lm_head)
        target, uniform = budget_target(recipe, step), net.layout.uniform
        loss, terms = objective(distill, masks, net.shape, target, recipe.loss, uniform_layers=uniform)
        (loss / recipe.train.gradient_accumulation_steps).backward()
    return {"loss": loss.item(), **{name: t.item() for name, t in terms.items()}}


def mask_step(model: PreTrainedModel, net: MaskNetwork, recipe: Recipe) -> StepFn:
    """Return the step function that learns masks and routers; the teacher is the dense model itself."""
    folder = recipe.train.teacher_cache
    teacher_hidden = TeacherCache(Path(folder), model) if folder else hidden_states
    return lambda batch, step, micro: micro_step(model, net, recipe, batch, step, micro, teacher_hidden)
