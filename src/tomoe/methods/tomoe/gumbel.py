"""Straight-through samples: hard 0/1 forward, the gradient of a soft relaxation backward (Eqs. 14, 15; App. A.3).

Noise comes from a generator that is seeded for one draw, not from a global stream: a draw that is repeated (activation
checkpointing) or made elsewhere (another rank) is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tomoe.model.compiled import fused


def uniform_noise(shape: Sequence[int], device: torch.device, seed: int) -> Tensor:
    """Draw numbers in float32: the same for the same seed on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.rand(shape, generator=generator, device=device)


def gumbel_of(uniform: Tensor) -> Tensor:
    """Gumbel(0, 1)."""
    return -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 6e-8)))


def _straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    # in this order the values are exactly 0 and 1
    return hard + (soft - soft.detach())


def gumbel_sigmoid(
    logits: Float[Tensor, "*shape"], temperature: float, keep_bias: float, seed: int
) -> Float[Tensor, "*shape"]:
    """Sample 0/1 masks, [x + g + b > 0] (Eq. 15). `keep_bias` is b: above 0, a random start is nearly the whole model."""
    noise = uniform_noise(logits.shape, logits.device, seed)
    return _fused_sigmoid_sample(logits, noise, temperature, keep_bias)


# Without shapes, as torch.compile traces them.
def sigmoid_sample(logits: Tensor, uniform: Tensor, temperature: float, keep_bias: float) -> Tensor:
    x = logits + gumbel_of(uniform) + keep_bias
    soft = torch.sigmoid(x / temperature)
    return _straight_through((x > 0).to(soft.dtype), soft)


def softmax_sample(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    soft = torch.softmax((logits + gumbel_of(uniform)) / temperature, dim=-1)
    return _straight_through(F.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype), soft), soft


_fused_sigmoid_sample, _fused_softmax_sample = fused(sigmoid_sample), fused(softmax_sample)


def gumbel_softmax(
    logits: Float[Tensor, "T N"], temperature: float, seed: int
) -> tuple[Float[Tensor, "T N"], Float[Tensor, "T N"]]:
    """Sample one-hot assignments (Eq. 14); returns them and the soft probabilities that they come from."""
    return _fused_softmax_sample(logits, uniform_noise(logits.shape, logits.device, seed), temperature)


def keep_probability(logits: Float[Tensor, "*shape"], keep_bias: float) -> Float[Tensor, "*shape"]:
    """Return P[x + g + b > 0]: how often `gumbel_sigmoid` keeps a dim."""
    return -torch.expm1(-torch.exp(logits + keep_bias))


def keep_logit(probability: Float[Tensor, "*shape"], keep_bias: float) -> Float[Tensor, "*shape"]:
    """Invert `keep_probability`."""
    return torch.log(-torch.log1p(-probability)) - keep_bias
