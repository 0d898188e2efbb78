"""How stock classes choose among fine-grained experts, and what has to be stored so that they choose as a converted model.

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
    weight_error: how far a weight may be from 1, at most.
    """

    reach: float
    rounding: float
    weight_error: float
    corrected: ClassVar[bool] = True

    def scale(self, largest: float) -> float:
        """eps for the largest logit Z; 1 for a router of zeros."""
        return 2.0 ** math.floor(math.log2(self.reach / largest)) if largest else 1.0

    @abstractmethod
    def corrections(self, bias: Float[Tensor, " N"], eps: float, stored: int) -> Float[Tensor, " N"]:
        """c of experts with these biases, of so many that are stored."""

    @abstractmethod
    def choose(
        self, logits: Float[Tensor, "T n"], corrections: Float[Tensor, " n"], top_k: int
    ) -> tuple[Int[Tensor, "T k"], Float[Tensor, "T k"]]:
        """The experts of each token, and how much of their outputs is added, where 1 is right."""


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

    def corrections(self, bias: Float[Tensor, " N"], eps: float, stored: int) -> Float[Tensor, " N"]:
        return eps / 4 * bias

    def choose(
        self, logits: Float[Tensor, "T n"], corrections: Float[Tensor, " n"], top_k: int
    ) -> tuple[Int[Tensor, "T k"], Float[Tensor, "T k"]]:
        scores = logits.sigmoid()
        ids = (scores + corrections).topk(top_k, dim=1).indices
        return ids, 2 * scores.gather(1, ids)


def stored_router(
    form: RouterForm, weight: Float[Tensor, "N D"], bias: Float[Tensor, " N"], eps: float, first: int, last: int
) -> tuple[Float[Tensor, "n D"], Float[Tensor, " n"]]:
    """u and c in float32; behind the N experts of the router stand `first` that are always chosen and `last` that never are."""
    stored = len(weight) + first + last
    zeros = weight.new_zeros(first + last, weight.shape[1], dtype=torch.float32)
    always = bias.new_tensor([FIRST] * first + [LAST] * last, dtype=torch.float32)
    corrections = form.corrections(bias.float(), eps, stored)
    return torch.cat([eps * weight.float(), zeros]), torch.cat([corrections, always])
