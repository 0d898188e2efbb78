"""Straight-through samples: hard 0/1 going forward, the gradient of a soft relaxation going back (eqs. STG, STGS).

Noise comes from a generator that is seeded for one draw, not from a global stream: a draw can be made again (activation
checkpointing) or elsewhere (another rank) and is the same.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Noise = Literal["gumbel", "logistic"]


def derive_seed(*parts: int | str) -> int:
    """One 63-bit seed from several numbers or names; different parts give unrelated streams."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def gumbel_noise(shape: tuple[int, ...], seed: int, device: torch.device) -> Float[Tensor, ...]:
    """Gumbel(0, 1) in float32, the same values for the same seed on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(shape, generator=generator, device=device)
    return -torch.log(-torch.log(uniform.clamp_(1e-20, 1 - 6e-8)))


def mask_noise(shape: tuple[int, ...], seed: int, device: torch.device, noise: Noise) -> Float[Tensor, ...]:
    """`gumbel` is the paper's; `logistic` is the difference of two Gumbels, whose mean is zero."""
    if noise == "gumbel":
        return gumbel_noise(shape, seed, device)
    generator = torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(shape, generator=generator, device=device).clamp_(1e-20, 1 - 6e-8)
    return uniform.log() - torch.log1p(-uniform)


def _straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    return hard + (soft - soft.detach())  # in this order the values are exactly 0 and 1


def gumbel_sigmoid(
    logits: Float[Tensor, "*shape"], temperature: float, keep_bias: float, seed: int, noise: Noise = "gumbel"
) -> Float[Tensor, "*shape"]:
    """0/1 masks, [x + g + b > 0] (eq. STGS). `keep_bias` b > 0 lets a random start begin near the whole model."""
    x = logits + mask_noise(tuple(logits.shape), seed, logits.device, noise) + keep_bias
    soft = torch.sigmoid(x / temperature)
    return _straight_through((x > 0).to(soft.dtype), soft)


def gumbel_softmax(
    logits: Float[Tensor, "T N"], temperature: float, seed: int
) -> tuple[Float[Tensor, "T N"], Float[Tensor, "T N"]]:
    """One-hot assignment and the soft probabilities behind it (eq. STG)."""
    soft = torch.softmax((logits + gumbel_noise(tuple(logits.shape), seed, logits.device)) / temperature, dim=-1)
    return _straight_through(F.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype), soft), soft


def keep_probability(logits: Float[Tensor, "*shape"], keep_bias: float, noise: Noise) -> Float[Tensor, "*shape"]:
    """P[x + g + b > 0]: how often `gumbel_sigmoid` keeps a dim."""
    if noise == "gumbel":
        return -torch.expm1(-torch.exp(logits + keep_bias))
    return torch.sigmoid(logits + keep_bias)


def keep_logit(probability: Float[Tensor, "*shape"], keep_bias: float, noise: Noise) -> Float[Tensor, "*shape"]:
    """The inverse of `keep_probability`."""
    if noise == "gumbel":
        return torch.log(-torch.log1p(-probability)) - keep_bias
    return torch.logit(probability) - keep_bias
