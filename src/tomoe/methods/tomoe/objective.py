"""The objective that masks and routers are learned with, and one step of it. The frozen dense model is the teacher, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from tomoe.methods.tomoe.losses import active_fraction, budget_penalty, coverage_penalty, layer_fractions
from tomoe.methods.tomoe.networks import AnyNetwork
from tomoe.methods.tomoe.sampling import SampledLayerMasks, sampled_masks
from tomoe.model.running import family_head, hidden_states
from tomoe.model.shape import ModelShape
from tomoe.plans.masking import masked
from tomoe.plans.routing import balance_penalty
from tomoe.recipe.conversion import LossSection, Recipe
from tomoe.seeds import derive_seed
from tomoe.training.distillation import distill_loss


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
    factors = {name: getattr(weights, f"{name}_weight") for name in terms}
    # a weight of zero is an ablation: the term is still reported, but gives no gradient
    loss = distill + sum(factors[name] * term for name, term in terms.items() if factors[name])
    return loss, {"distill": distill, **terms, "active_fraction": fraction}


class MaskStep:
    """The step function that learns masks and routers; the frozen dense model is the teacher, too."""

    def __init__(self, model: PreTrainedModel, net: AnyNetwork, recipe: Recipe):
        self.model, self.net, self.recipe = model, net, recipe

    def target(self, step: int) -> float:
        """Return the active fraction that a step aims at: it falls from 1 to `active` during the budget warm-up."""
        warmup_steps = self.recipe.train.budget_warmup_steps
        progress = min(1.0, step / warmup_steps) if warmup_steps else 1.0
        return 1.0 - (1.0 - self.recipe.active) * progress

    def __call__(self, batch: Any, step: int, micro: int) -> dict[str, Tensor]:
        """Forward and backward of one batch; leaves gradients (of the mean over a step's batches) in the mask network."""
        model, net, recipe = self.model, self.net, self.recipe
        ids = batch.input_ids.to(model.device)
        # asked where the mask is, as a device would have to be waited for
        mask = None if bool(batch.mask.all()) else batch.mask.to(model.device)
        seeds = derive_seed(recipe.seed, "step", step), derive_seed(recipe.seed, "tokens", step, micro)
        masks = sampled_masks(net, *seeds, None if mask is None else mask.flatten())
        teacher = None
        if recipe.loss.objective == "kl":
            with torch.no_grad():
                teacher = hidden_states(model, ids, mask)
        # around the backward pass too: activation checkpointing runs layers again there
        with masked(model, masks):
            student = hidden_states(model, ids, mask)
            distill = distill_loss(student, teacher, ids, mask, family_head(model))
            loss, terms = objective(distill, masks, net.shape, self.target(step), recipe.loss, net.layout.uniform)
            (loss / recipe.train.gradient_accumulation_steps).backward()
        return {"loss": loss.detach(), **{name: t.detach() for name, t in terms.items()}}
