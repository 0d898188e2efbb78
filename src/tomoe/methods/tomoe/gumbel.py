"""Straight-through samples: hard 0/1 forward, the gradient of a soft relaxation backward (Eqs. 14, 15; App. A.3).

Noise comes from a generator that is seeded for one draw, not from a global stream: a draw that is repeated (activation
checkpointing) or made elsewhere (another rank) is the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def gumbel_noise(logits: Float[Tensor, "*shape"], seed: int) -> Float[Tensor, "*shape"]:
    """Draw Gumbel(0, 1) for each logit, in float32: the same for the same seed on one kind of device."""
    generator = torch.Generator(logits.device).manual_seed(seed)
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device)
    return -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 6e-8)))


def _straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    # in this order the values are exactly 0 and 1
    return hard + (soft - soft.detach())


def gumbel_sigmoid(
    logits: Float[Tensor, "*shape"], temperature: float, keep_bias: float, seed: int
) -> Float[Tensor, "*shape"]:
    """Sample 0/1 masks, [x + g + b > 0] (Eq. 15). `keep_bias` is b: above 0, a random start is nearly the whole model."""
    x = logits + gumbel_noise(logits, seed) + keep_bias
    soft = torch.sigmoid(x / temperature)
    return _straight_through((x > 0).to(soft.dtype), soft)


def gumbel_softmax(
    logits: Float[Tensor, "T N"], temperature: float, seed: int
) -> tuple[Float[Tensor, "T N"], Float[Tensor, "T N"]]:
    """Sample one-hot assignments (Eq. 14); returns them and the soft probabilities that they come from."""
    soft = torch.softmax((logits + gumbel_noise(logits, seed)) / temperature, dim=-1)
    return _straight_through(F.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype), soft), soft


def keep_probability(logits: Float[Tensor, "*shape"], keep_bias: float) -> Float[Tensor, "*shape"]:
    """Return P[x + g + b > 0], the rate at which `gumbel_sigmoid` keeps a dim."""
    return -torch.expm1(-torch.exp(logits + keep_bias))


def keep_logit(probability: Float[Tensor, "*shape"], keep_bias: float) -> Float[Tensor, "*shape"]:
    """Invert `keep_probability`."""
    return torch.log(-torch.log1p(-probability)) - keep_bias
