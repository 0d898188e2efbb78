"""Linear routers fitted by least squares: which experts a token needs, from the input of its MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tomoe.plans.partition.activations import Activations
from tomoe.plans.routing import bfloat16_values

ROUTER_RIDGE = 1e-3  # relative to the mean of the diagonal of the inputs' covariance


class RidgeRegression:
    """Linear functions of x [T, D], with a bias or without, by least squares with a ridge; one factorization for many targets."""

    def __init__(self, x: Float[Tensor, "T D"], bias: bool = True):
        self.bias = bias
        self.mean = x.mean(0) if bias else x.new_zeros(x.shape[1])
        self.x = x - self.mean
        self.gram = self.x.T @ self.x
        ridge = ROUTER_RIDGE * self.gram.diagonal().mean().clamp_min(1e-12)
        # In float32 a few dims with a large mean square leave no digit for the others.
        regular = self.gram.double()
        regular.diagonal().add_(ridge)
        self.factor = torch.linalg.cholesky(regular)

    def fit(self, y: Float[Tensor, "T N"]) -> tuple[Float[Tensor, "N D"], Float[Tensor, " N"]]:
        """Return weight and bias of a router, scaled so that its logits vary by 1 around their means.

        One size in all layers gives the temperature of learning one meaning. The weight holds bfloat16 values, and the bias
        belongs to these: inputs have dims with a large mean, which would turn rounding into a preference for some experts.
        """
        # without a bias, what all experts of a token have in common is dropped: it does not affect the choice
        mean = y.mean(0) if self.bias else y.mean(1, keepdim=True)
        weight = torch.cholesky_solve((self.x.T @ (y - mean)).double(), self.factor).T.float()
        scale = 1 / self._deviation(weight).clamp_min(1e-12)
        weight = bfloat16_values(scale * weight)
        return weight, scale * mean - weight @ self.mean if self.bias else weight.new_zeros(len(weight))

    def _deviation(self, weight: Float[Tensor, "N D"]) -> Float[Tensor, ""]:
        """Return the standard deviation of all entries of x weight^T, without computing them."""
        count = len(self.x) * len(weight)
        mean = (weight @ self.x.mean(0)).mean()
        squares = ((weight @ self.gram) * weight).sum()
        return ((squares - count * mean.square()) / (count - 1)).clamp_min(0).sqrt()


def expert_energy(
    energy_Tn: Float[Tensor, "T n"], expert_n: Int[Tensor, " n"], num_experts: int
) -> Float[Tensor, "T N"]:
    """The root of each expert's share of a token's energy, normalized per token: the target that routers are fitted to."""
    experts_nN = F.one_hot(expert_n, num_experts).to(energy_Tn.dtype)
    return F.normalize((energy_Tn @ experts_nN).sqrt(), dim=1)


def fit_router(
    seen: Activations, expert_of_neuron: Int[Tensor, " F"], num_experts: int, bias: bool
) -> tuple[Float[Tensor, "N D"], Float[Tensor, " N"]]:
    """Fit weight and bias of the router that predicts `expert_energy` from the input of the MLP by ridge regression."""
    routed_n = (expert_of_neuron >= 0).nonzero().squeeze(1)
    energy_TN = expert_energy(seen.energy_TF(routed_n), expert_of_neuron[routed_n], num_experts)
    return RidgeRegression(seen.x_TD, bias).fit(energy_TN)
