"""The penalties of the objective (Eq. 10, Sec. 3.5). To add one, write the function and give it a line in `objective`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tomoe.budget import decoder_params, layer_params
from tomoe.methods.tomoe.sampling import SampledLayerMasks
from tomoe.model.shape import ModelShape


def log_ratio(a: Tensor, b: Tensor | float) -> Tensor:
    """Return f_reg(a, b) = |log a - log b| (Sec. 3.4, no number): zero at equality, scale-free, steep also far away."""
    other = torch.as_tensor(b, dtype=a.dtype, device=a.device)
    return (a.clamp_min(1e-3).log() - other.clamp_min(1e-3).log()).abs()


# What follows takes all layers at once, stacked: a GPU waits for each call, not for the numbers in it.
def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Those that are there, one upon another; None if there is none."""
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


def active_fraction(masks: Sequence[SampledLayerMasks], shape: ModelShape) -> Float[Tensor, ""]:
    """Return T(d_MoE) / T_total of sampled masks (Eq. 8, Sec. 3.4)."""
    return layer_params(shape, *layer_widths(masks, shape)).sum() / decoder_params(shape)


def budget_penalty(fractions: Float[Tensor, "*L"], target: float) -> Float[Tensor, ""]:
    """Return R_P (Eq. 8, Sec. 3.4) of the whole model, or of several layers the mean of R_P for each layer by itself."""
    return log_ratio(fractions, target).mean()


def layer_fractions(masks: Sequence[SampledLayerMasks], shape: ModelShape) -> Float[Tensor, " L"]:
    """Return the active fraction of each layer by itself: if all layers have one width, each has to meet the budget."""
    whole = decoder_params(shape) / shape.num_layers
    return layer_params(shape, *layer_widths(masks, shape)) / whole


class _Product(torch.autograd.Function):
    """The product over rows [.., n, m] -> [.., m] of numbers from 0 to 1, as a sum of logarithms.

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
