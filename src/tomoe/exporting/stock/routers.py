"""How stock classes choose among fine-grained experts, and what to store so that they choose as a converted model.

A converted model chooses the k experts with the largest z + b, where z = W x, and adds their outputs. A stock router makes
scores s of u x, chooses by s + c, where c is a correction that only the choice sees (some classes have none), and multiplies
outputs by weights made of the scores. Stored is u = eps W: a small eps makes all weights equal, and what they are equal to is
undone elsewhere. With |z| <= Z the weights are off by some multiple of eps Z, and rounding may change the order of two experts
whose z + b differ by less than some multiple of 1 / eps. A smaller eps makes the weights better and the order worse, so eps
is where both errors, relative to Z, are equal: the power of two next below, one for each layer, so that bfloat16 routers lose
nothing by it.

Letters: N experts, n those that are stored, k of a token, D hidden size, T tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Corrections of experts that are chosen before all others, or after all others: scores are within [0, 1], and no other
# correction comes near 1.
FIRST, LAST = 1.0, -1.0


class RouterForm(ABC):
    """A kind of stock router.

    reach: eps Z at most; rounding: two experts keep their order if their z + b differ by more than rounding / eps;
    weight_error: how far a weight may be from 1, at most; corrected: whether there is a c; normalized: whether the chosen
    scores are divided by their sum, and not by 1/2.
    """

    reach: float
    rounding: float
    weight_error: float
    corrected: ClassVar[bool] = True
    normalized: ClassVar[bool] = False

    def scale(self, largest: float) -> float:
        """Return eps for the largest logit Z; 1 for a router of zeros."""
        return 2.0 ** math.floor(math.log2(self.reach / largest)) if largest else 1.0

    def corrections(self, bias: Float[Tensor, " N"], eps: float) -> Float[Tensor, " N"]:
        """Return c of experts with these biases, if the router has it."""
        return torch.zeros_like(bias)

    @abstractmethod
    def scores(self, logits: Float[Tensor, "T n"]) -> Float[Tensor, "T n"]:
        """Compute s of u x."""

    def choose(
        self, logits: Float[Tensor, "T n"], corrections: Float[Tensor, " n"], top_k: int
    ) -> tuple[Int[Tensor, "T k"], Float[Tensor, "T k"]]:
        """Return the experts of each token, and the factors of their outputs, where 1 is right."""
        scores = self.scores(logits)
        ids = (scores + corrections).topk(top_k, dim=1).indices
        chosen = scores.gather(1, ids)
        return ids, top_k * chosen / chosen.sum(1, keepdim=True) if self.normalized else 2 * chosen


class Sigmoid(RouterForm):
    """s = sigmoid(u x), weights 2 s.

    In float32:

    - The weight of an expert is 2 sigmoid(eps z) = 1 + tanh(eps z / 2), off by at most eps Z / 2.
    - s + c = 1/2 + eps (z + b) / 4 with c = eps b / 4, up to the cubic term of the sigmoid, (eps Z)^3 / 48, and to rounding:
      numbers in [1/2, 1) are 2^-24 apart, and sigmoid and sum round by at most two of that. Two experts keep their order if
      their z + b differ by more than 4 (2 x 2 x 2^-24) / eps = 2^-20 / eps.

    The errors eps Z / 2 and 2^-20 / (eps Z) are equal at eps Z = 2^-9.5: below 2^-10 both, half of what bfloat16 rounds off a
    weight. There the cubic term is 2^-34, less than the rounding.
    """

    reach, rounding, weight_error = 2.0**-9.5, 2.0**-20, 2.0**-8

    def corrections(self, bias: Float[Tensor, " N"], eps: float) -> Float[Tensor, " N"]:
        return eps / 4 * bias

    def scores(self, logits: Float[Tensor, "T n"]) -> Float[Tensor, "T n"]:
        return logits.sigmoid()


class HalfPrecisionSigmoid(Sigmoid):
    """Sigmoid with scores rounded to the 16 bits in which the model is stored, as Lfm2Moe's.

    Numbers in [1/2, 1) are a = 2^-8 apart in bfloat16, 2^-11 in float16, so two experts keep their order if their z + b differ
    by more than 4 a / eps. That is far too coarse for the balance above, so both errors are weighed by what they do to the
    output. With N = 32 normally distributed logits, the largest of which is Z = 3.5 of their deviations, and k = 8: about
    35 a / (eps Z) experts of a token change places, with the energy of two experts each; the 8 that stay are off by 0.19 eps Z.
    The sum is least at eps Z = 0.8 (2^8 a)^(1/3), and so was the divergence of a small random model.
    """

    def __init__(self, dtype: torch.dtype):
        spacing = torch.finfo(dtype).eps / 2
        self.rounding = 4 * spacing
        self.reach = 0.8 * (2**8 * spacing) ** (1 / 3)
        # of a text on which Z is twice what it was measured to be
        self.weight_error = self.reach


class NormalizedSigmoid(Sigmoid):
    """Sigmoid with weights that sum to 1, as in llama.cpp's lfm2moe."""

    normalized = True


class Softmax(RouterForm):
    """s = softmax(u x) in float32, weights s / sum of the chosen s: 1/k each, so down projections are multiplied by k.

    s = (1 + eps (z - mean z)) / n up to the square. Exponential, sum and quotient round by at most three units of 2^-24, so two
    experts keep their order if their z differ by more than 2 x 3 x 2^-24 / eps, less than 2^-21 / eps. A weight times k is off
    1 by the distance of its eps z from the mean of the chosen, at most 2 eps Z. Both errors are equal at eps Z = 2^-11.
    """

    reach, rounding, weight_error = 2.0**-11, 2.0**-21, 2.0**-8
    corrected = False
    normalized = True

    def scores(self, logits: Float[Tensor, "T n"]) -> Float[Tensor, "T n"]:
        return logits.softmax(1)
