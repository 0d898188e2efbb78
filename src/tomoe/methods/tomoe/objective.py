"""The objective that masks and routers are learned with, its penalties (Eq. 10, Sec. 3.5), and one step of it, whose masks are
drawn with noise, so that what is dropped can come back. To add a penalty, write the function and give it a line in `objective`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from tomoe.budget import decoder_params, layer_params
from tomoe.methods.tomoe.attention import SampledAttention
from tomoe.methods.tomoe.fine_grained import SampledFine
from tomoe.methods.tomoe.networks import AnyNetwork
from tomoe.methods.tomoe.overlapping import SampledOverlapping
from tomoe.model.running import family_head, hidden_states
from tomoe.model.shape import ModelShape
from tomoe.plans.masking import masked
from tomoe.plans.routing import Routing, balance_penalty
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
    routers: int = 0,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Return the weighted sum (Eq. 10, Sec. 3.5) and its unweighted terms, with the sampled active fraction among them.

    `routers`: parameters of routers that the budget counts; the paper's counts none.
    """
    fraction = sampled_fraction(masks, shape, routers)
    terms = {
        "budget": budget_penalty(layer_fractions(masks, shape, routers) if uniform_layers else fraction, target),
        "coverage": coverage_penalty(masks),
        "balance": balance_penalty([m.routing for m in masks]),
    }
    factors = {name: getattr(weights, f"{name}_weight") for name in terms}
    # a weight of zero is an ablation: the term is still reported, but gives no gradient
    loss = distill + sum(factors[name] * term for name, term in terms.items() if factors[name])
    return loss, {"distill": distill, **terms, "active_fraction": fraction}


class MaskStep:
    """The step function that trains masks and routers; the frozen dense model is also the teacher."""

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
            aim = self.target(step), recipe.loss, net.layout.uniform, net.counted_routers()
            loss, terms = objective(distill, masks, net.shape, *aim)
            (loss / recipe.train.gradient_accumulation_steps).backward()
        return {"loss": loss.detach(), **{name: t.detach() for name, t in terms.items()}}


def log_ratio(a: Tensor, b: Tensor | float) -> Tensor:
    """Return f_reg(a, b) = |log a - log b| (Sec. 3.4, no number): zero at equality, scale-free, steep also far away."""
    other = torch.as_tensor(b, dtype=a.dtype, device=a.device)
    return (a.clamp_min(1e-3).log() - other.clamp_min(1e-3).log()).abs()


# What follows takes all layers at once, stacked: a GPU waits for each call, not for the numbers in it.
def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Stack those that are not None; None if all are."""
    there = [t for t in tensors if t is not None]
    return torch.stack(there) if there else None


def layer_widths(
    masks: Sequence[SampledLayerMasks], shape: ModelShape
) -> tuple[Float[Tensor, " L"], Float[Tensor, " L"] | int, Float[Tensor, " L"] | int]:
    """Return (MLP widths, Q/K dims, V/O dims) of sampled masks: the maximum over experts and over tokens (Eq. 8)."""
    neurons = _stacked([m.experts.neuron_masks for m in masks])
    if neurons is None:
        device = masks[0].experts.router.weight.device
        widths = torch.tensor([float(m.experts.neurons) for m in masks], device=device)
    else:
        widths = neurons.sum(-1).amax(-1)
    attention = [m.attention for m in masks if m.attention is not None]
    if not attention:
        return widths, shape.head_dim, shape.head_dim
    static, values = _stacked([a.static_values for a in attention]), _stacked([a.value_masks for a in attention])
    if static is None:
        assert values is not None, "the masks have seen no tokens yet"
        dims = values.sum(-1).amax(-1)
    else:
        dims = static.sum(-1)
    return widths, torch.stack([a.qk_mask for a in attention]).sum(-1), dims


def sampled_fraction(masks: Sequence[SampledLayerMasks], shape: ModelShape, routers: int = 0) -> Float[Tensor, ""]:
    """Return T(d_MoE) / T_total of sampled masks (Eq. 8, Sec. 3.4), with this many router parameters counted."""
    return (layer_params(shape, *layer_widths(masks, shape)).sum() + routers) / decoder_params(shape)


def budget_penalty(fractions: Float[Tensor, "*L"], target: float) -> Float[Tensor, ""]:
    """Return R_P (Eq. 8, Sec. 3.4) of the model, or the mean of R_P over separate layers."""
    return log_ratio(fractions, target).mean()


def layer_fractions(masks: Sequence[SampledLayerMasks], shape: ModelShape, routers: int = 0) -> Float[Tensor, " L"]:
    """Return the active fraction of each layer: if all layers have one width, each has to meet the budget."""
    total = decoder_params(shape) / shape.num_layers
    return (layer_params(shape, *layer_widths(masks, shape)) + routers / shape.num_layers) / total


class _Product(torch.autograd.Function):
    """Product over rows [.., n, m] -> [.., m] of numbers from 0 to 1, as a sum of logarithms.

    The gradient with respect to a row is the product of the other rows, also where rows are zero. Of zeros and ones, which
    sampled masks are, both are exact. torch's own gradient takes a running product over all rows, one after another.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        zero = rows == 0
        zeros = zero.sum(-2, keepdim=True)
        # of the rows that are not zero
        product = rows.masked_fill(zero, 1).log().sum(-2, keepdim=True).exp()
        ctx.save_for_backward(rows, zeros, product)
        return product.masked_fill(zeros > 0, 0).squeeze(-2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        rows, zeros, product = ctx.saved_tensors
        zero = rows == 0
        # only of a row that is the single zero, and of every row where none is
        others = torch.where(zero, product, product / rows.masked_fill(zero, 1)).masked_fill(zeros > zero, 0)
        return grad_outputs[0].unsqueeze(-2) * others


def _union(masks: Float[Tensor, "*L n m"]) -> Float[Tensor, "*L"]:
    """Return the fraction of dims that some row keeps: the mean of 1 - prod(1 - s) (Eq. 6, Sec. 3.4)."""
    return (1 - _Product.apply(1 - masks)).mean(-1)


def coverage_penalty(masks: Sequence[SampledLayerMasks]) -> Float[Tensor, ""]:
    """Return R_U (Eqs. 7, 16; Sec. 3.4, App. B.2), which pushes unions to 1; the mean over the sites that have one.

    The union of an MLP is over experts, that of V/O dims over tokens. Fine-grained experts cover the layer by themselves.
    """
    of_tokens = [m.attention.value_masks for m in masks if m.attention is not None]
    sites = _stacked([m.experts.neuron_masks for m in masks]), _stacked(of_tokens)
    terms = [log_ratio(_union(stacked), 1.0) for stacked in sites if stacked is not None]
    return torch.cat(terms).mean() if terms else torch.zeros(())


def sampled_masks(
    net: AnyNetwork, seed: int, token_seed: int | None = None, valid: Bool[Tensor, " T"] | None = None
) -> list[SampledLayerMasks]:
    """Sample the masks of one step.

    `seed` decides what all tokens share, `token_seed` (default: the same) what each token chooses. `valid`: which tokens are
    real, for the losses; None: all.
    """
    token_seed = seed if token_seed is None else token_seed
    embeddings = net.embeddings()
    of_attention = None
    if net.attention is not None:
        assert embeddings is not None
        of_attention = net.attention.embeddings(embeddings)
    sampled = []
    for i in range(net.shape.num_layers):
        own, own_tokens = derive_seed(seed, i), derive_seed(token_seed, i)
        attention = None
        if net.attention is not None and of_attention is not None:
            attention = SampledAttention(net.attention, i, of_attention[i], own, own_tokens, valid)
        sampled.append(SampledLayerMasks(net.sample_experts(i, embeddings, own, own_tokens), attention, valid))
    return sampled


@dataclass(eq=False)
class SampledLayerMasks:
    """The masks of one layer in one step."""

    experts: SampledFine | SampledOverlapping
    attention: SampledAttention | None = None
    valid: Bool[Tensor, " T"] | None = None
    routing: Routing | None = None  # of the real tokens, filled in by the forward pass

    def neurons(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        routing, neurons = self.experts.choose(x_TD)
        self.routing = routing.select(self.valid)
        return neurons
