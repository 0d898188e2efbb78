"""The penalties of the objective (Eq. 10, Sec. 3.5). To add one, write the function and give it a line in `objective`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tomoe.budget import active_params, decoder_params, layer_params
from tomoe.model.shape import ModelShape
from tomoe.pruning.learned.sampling import SampledLayerMasks


def log_ratio(a: Tensor, b: Tensor | float) -> Tensor:
    """Return f_reg(a, b) = |log a - log b| (Sec. 3.4, no number): zero at equality, scale-free, steep also far away."""
    other = torch.as_tensor(b, dtype=a.dtype, device=a.device)
    return (a.clamp_min(1e-3).log() - other.clamp_min(1e-3).log()).abs()


def layer_widths(masks: SampledLayerMasks, shape: ModelShape) -> tuple[Tensor | int, Tensor | int, Tensor | int]:
    """Return (MLP width, Q/K dims, V/O dims) of sampled masks: the maximum over experts and over tokens (Eq. 8)."""
    attention = masks.attention
    if attention is None:
        return masks.experts.width, shape.head_dim, shape.head_dim
    if attention.static_values is not None:
        values = attention.static_values.sum()
    else:
        assert attention.value_masks is not None, "the masks have seen no tokens yet"
        values = attention.value_masks.sum(-1).max()
    return masks.experts.width, attention.qk_mask.sum(), values


def active_fraction(masks: Sequence[SampledLayerMasks], shape: ModelShape) -> Float[Tensor, ""]:
    """Return T(d_MoE) / T_total of sampled masks (Eq. 8, Sec. 3.4)."""
    return active_params(shape, [layer_widths(m, shape) for m in masks]) / decoder_params(shape)


def budget_penalty(fractions: Float[Tensor, "*L"], target: float) -> Float[Tensor, ""]:
    """Return R_P (Eq. 8, Sec. 3.4) of the whole model, or of several layers the mean of R_P for each layer by itself."""
    return log_ratio(fractions, target).mean()


def layer_fractions(masks: Sequence[SampledLayerMasks], shape: ModelShape) -> Float[Tensor, " L"]:
    """Return the active fraction of each layer by itself: if all layers have one width, each has to meet the budget."""
    whole = decoder_params(shape) / shape.num_layers
    return torch.stack([layer_params(shape, *layer_widths(m, shape)) / whole for m in masks])


def _union(masks: Float[Tensor, "n m"]) -> Float[Tensor, ""]:
    """Return the fraction of dims that some row keeps: the mean of 1 - prod(1 - s) (Eq. 6, Sec. 3.4).

    The gradient of the product with respect to a row is the product of the other rows; torch gives it exactly, zeros
    included.
    """
    return (1 - (1 - masks).prod(0)).mean()


def coverage_penalty(masks: Sequence[SampledLayerMasks]) -> Float[Tensor, ""]:
    """Return R_U (Eqs. 7, 16; Sec. 3.4, App. B.2), which pushes unions to 1; the mean over the sites that have one.

    The union of an MLP is over experts, that of V/O dims over tokens. Fine-grained experts cover the layer by themselves.
    """
    terms = [log_ratio(_union(m.experts.neuron_masks), 1.0) for m in masks if m.experts.neuron_masks is not None]
    of_tokens = (m.attention.value_masks for m in masks if m.attention is not None)
    terms += [log_ratio(_union(chosen), 1.0) for chosen in of_tokens if chosen is not None]
    return torch.stack(terms).mean() if terms else torch.zeros(())
