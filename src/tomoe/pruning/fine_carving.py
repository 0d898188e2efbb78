"""The carved start of fine-grained experts: which neurons all tokens use, which form an expert, and a linear router.

Per layer, on dense activations. Shared part: the neurons whose contributions a_f = |h_f| |down column f| have the most
energy, weighted by 1 / |residual|^2 of the token. Experts: clusters of one size of the other neurons by the cosine of their
contributions over tokens. Router: ridge regression with a bias from the MLP's input to the root of each expert's share of a
token's energy. Then in turn neurons move to the expert whose tokens need them most, and the router is fitted again.

Shapes, and the letters at the ends of names: T tokens, t some of them, D hidden size, F neurons, n routed ones, N experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tomoe.pruning.layouts import FineLayout
from tomoe.pruning.network import Activations
from tomoe.pruning.routing import bfloat16_values, largest

SHARED = -1  # number of the expert of neurons that every token uses
CLUSTER_STEPS, REASSIGNMENTS = 8, 2
CLUSTER_TOKENS, ERROR_TOKENS = 4096, 2048
"""Tokens that neurons are compared on, and that the error of a choice is measured on."""
PIECE_TOKENS = 4096  # tokens whose activations are held in float32 at once
ERROR_POINTS = 12  # numbers of experts per token at which the error is measured; between them it is interpolated
ROUTER_RIDGE = 1e-3  # relative to the mean of the diagonal of the inputs' covariance


def balanced_assignment(scores: Float[Tensor, "n N"], size: int) -> Int[Tensor, " n"]:
    """Assign each row to a column of high score, `size` rows to a column; those that lose most by another go first."""
    best = scores.topk(min(2, scores.shape[1]), dim=1).values
    order = (best[:, 0] - best[:, -1]).argsort(descending=True, stable=True)
    # on the CPU, in numpy: row by row a GPU would be waited for
    left = scores[order].cpu().numpy()
    assigned = left.argmax(1)
    free = [size] * left.shape[1]
    for i, column in enumerate(assigned):
        free[column] -= 1
        if not free[column]:
            # the rows that still want it take the best of the others
            left[i + 1 :, column] = -np.inf
            again = i + 1 + np.flatnonzero(assigned[i + 1 :] == column)
            assigned[again] = left[again].argmax(1)
    return torch.empty_like(order).index_copy_(0, order, torch.from_numpy(assigned).to(order.device))


def balanced_clusters(x: Float[Tensor, "n t"], num_clusters: int, seed: int) -> Int[Tensor, " n"]:
    """Cluster rows by cosine (around their mean) into clusters of one size."""
    x = F.normalize(x - x.mean(0), dim=1)
    generator = torch.Generator(x.device).manual_seed(seed)
    centroids = x[torch.randperm(len(x), generator=generator, device=x.device)[:num_clusters]]
    for _ in range(CLUSTER_STEPS):
        assigned = balanced_assignment(x @ centroids.T, len(x) // num_clusters)
        centroids = F.normalize(F.one_hot(assigned, num_clusters).T.to(x.dtype) @ x, dim=1)
    return assigned


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
        # without a bias, what all experts of a token have in common is left out instead: it decides nothing
        mean = y.mean(0) if self.bias else y.mean(1, keepdim=True)
        weight = torch.cholesky_solve((self.x.T @ (y - mean)).double(), self.factor).T.float()
        scale = 1 / self._deviation(weight).clamp_min(1e-12)
        weight = bfloat16_values(scale * weight)
        return weight, scale * mean - weight @ self.mean if self.bias else weight.new_zeros(len(weight))

    def _deviation(self, weight: Float[Tensor, "N D"]) -> Float[Tensor, ""]:
        """Return the standard deviation of all numbers in x weight^T, without making them."""
        count = len(self.x) * len(weight)
        mean = (weight @ self.x.mean(0)).mean()
        squares = ((weight @ self.gram) * weight).sum()
        return ((squares - count * mean.square()) / (count - 1)).clamp_min(0).sqrt()


@dataclass(frozen=True)
class FineStart:
    """The carved start of one layer."""

    router_weight: Float[Tensor, "N D"]
    router_bias: Float[Tensor, " N"]
    expert_of_neuron: Int[Tensor, " F"]  # the expert of each neuron, or SHARED
    loss: Float[Tensor, " N1"]
    """Relative squared error of the MLP's output, summed over tokens, with 0, 1, .. N experts per token (float64), convex."""


def carve_fine(seen: Activations, layout: FineLayout, seed: int) -> FineStart:
    """Carve the experts of one layer."""
    x_TD, h_TF, weight_T, down_DF = seen.x_TD, seen.h_TF, seen.weight_T, seen.down_DF
    # what neuron f adds to the output of a token has the length |h_f| |column f of down|
    norms_F = down_DF.norm(dim=0)
    # a piece at a time: of many tokens the activations in float32 are the largest matrix there is
    pieces = zip(h_TF.split(PIECE_TOKENS), weight_T.split(PIECE_TOKENS), strict=True)
    energy_F = norms_F.square() * sum(w_t @ h_tF.float().square() for h_tF, w_t in pieces)
    # the neurons that matter to all tokens are shared, and a router chooses among the others
    order_F = energy_F.argsort(descending=True, stable=True)
    routed_n = order_F[layout.shared :].sort().values
    generator = torch.Generator(x_TD.device).manual_seed(seed)
    some_T = torch.randperm(len(x_TD), generator=generator, device=x_TD.device)
    energy_Tn = (h_TF[:, routed_n] * norms_F[routed_n]).square_().mul_(weight_T[:, None])
    assigned_n, router_ND, router_bias_N = _routed_experts(x_TD, energy_Tn, some_T[:CLUSTER_TOKENS], layout, seed)
    # the largest matrix of all, which the error does not need
    del energy_Tn
    logits_TN = x_TD @ router_ND.T + router_bias_N
    expert_F = torch.full((h_TF.shape[1],), SHARED, device=x_TD.device)
    expert_F[routed_n] = assigned_n
    few_t = some_T[:ERROR_TOKENS]
    h_tn = h_TF[few_t][:, routed_n].float() * weight_T[few_t, None].sqrt()
    loss_N1 = error_curve(logits_TN[few_t], h_tn, down_DF[:, routed_n], assigned_n, layout)
    return FineStart(router_ND, router_bias_N, expert_F, loss_N1 * len(x_TD) / len(few_t))


def _routed_experts(
    x_TD: Float[Tensor, "T D"],
    energy_Tn: Float[Tensor, "T n"],
    some_t: Int[Tensor, " t"],
    layout: FineLayout,
    seed: int,
) -> tuple[Int[Tensor, " n"], Float[Tensor, "N D"], Float[Tensor, " N"]]:
    """Return the expert of each routed neuron, and weight and bias of the router; clusters start on some of the tokens."""
    # numbers of all tokens have no names here, so that as few of them as can be are held at once
    regression = RidgeRegression(x_TD, layout.router_bias)
    # neurons that work on the same tokens belong together: then a token needs few experts
    assigned_n = balanced_clusters(F.normalize(energy_Tn[some_t].sqrt().T, dim=1), layout.num_experts, seed)
    for step in range(REASSIGNMENTS + 1):
        experts_nN = F.one_hot(assigned_n, layout.num_experts).to(x_TD.dtype)
        router_ND, router_bias_N = regression.fit(F.normalize((energy_Tn @ experts_nN).sqrt(), dim=1))
        if step < REASSIGNMENTS:
            # a router errs, so neurons move to where it sends the tokens that need them
            needs_nN = energy_Tn.T @ largest(x_TD @ router_ND.T + router_bias_N, layout.top_k)
            assigned_n = balanced_assignment(needs_nN, layout.expert_size)
    return assigned_n, router_ND, router_bias_N


def error_curve(
    logits_tN: Float[Tensor, "t N"],
    h_tn: Float[Tensor, "t n"],
    down_Dn: Float[Tensor, "D n"],
    expert_n: Int[Tensor, " n"],
    layout: FineLayout,
) -> Float[Tensor, " N1"]:
    """Return the squared error of h down^T, summed over tokens, with 0, 1, .. N experts a token, as a convex function.

    Shared neurons cause none. It is measured at some numbers of experts; between them it falls by equal factors.
    """
    n = layout.num_experts
    rank_tN = logits_tN.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    rank_tn = rank_tN[:, expert_n]
    points = sorted({round(n * i / ERROR_POINTS) for i in range(ERROR_POINTS)})
    losses = [max(float((((rank_tn >= k) * h_tn) @ down_Dn.T).square().sum()), 1e-30) for k in points]
    values = [losses[0]]
    for (k0, loss0), (k1, loss1) in itertools.pairwise(zip(points, losses, strict=True)):
        values += [loss0 * (loss1 / loss0) ** ((k - k0) / (k1 - k0)) for k in range(k0 + 1, k1 + 1)]
    return torch.tensor(_convex([*range(len(values)), n], [*values, 0.0]), dtype=torch.float64)


def _convex(points: Sequence[int], values: Sequence[float]) -> list[float]:
    """Return the lower convex hull of a function at 0, 1, .. points[-1]."""
    hull: list[tuple[int, float]] = []
    for x, y in zip(points, values, strict=True):
        while len(hull) > 1 and _slope(hull[-2], (x, y)) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append((x, y))
    result = [hull[0][1]]
    for (x0, y0), (x1, y1) in itertools.pairwise(hull):
        result += [y0 + (y1 - y0) * (x - x0) / (x1 - x0) for x in range(x0 + 1, x1 + 1)]
    return result


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
