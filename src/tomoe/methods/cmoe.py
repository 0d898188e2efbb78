"""CMoE: neurons are grouped by the tokens on which they are among the largest.

A neuron is active on a token if it is among the `top` neurons of largest |h| there: a column of bits for each neuron. Shared: the
neurons with the highest rate. Experts: balanced k-means of the other columns by their L1 distance, from the columns of the
highest rates, with an optimal assignment in every step.

The authors route by |act(gate x) up x| of one representative neuron of each expert, which no linear router computes and no engine
loads. That router is left out: a linear one is fitted by least squares, as for every method that brings none.

Shapes, and the letters at the ends of names: T tokens, t some of them, D hidden size, F neurons, n routed ones, N experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tomoe.methods.base import Method, MethodConfig
from tomoe.methods.registry import method
from tomoe.model.mlp import WeightMatrix
from tomoe.plans.partition.activations import Activations
from tomoe.plans.partition.clusters import optimal_assignment
from tomoe.plans.partition.experts import SHARED, Experts, Room

PIECE_TOKENS = 1024  # tokens whose activations and bits are held in float32 at once


@method("cmoe", paper="https://arxiv.org/abs/2502.04416")
class CMoE(Method):
    """Shares the neurons that are most often among a token's largest, clusters the others into balanced experts by the tokens on
    which they are among the largest, and fits a router."""

    class Config(MethodConfig):
        top: int = Field(default=10, ge=1)
        """Neurons of a token that count as active."""
        normalized: bool = True
        """Compare neurons on inputs and weights of unit length and without biases, as the authors' code does; false: by |h| as
        the model computes it."""
        steps: int = Field(default=1, ge=1)
        """Steps of k-means; the authors' code takes one."""

    config: Config
    # as S3A3E8: half of what a token uses is shared
    defaults: ClassVar[Mapping[str, Any]] = {"experts.num_experts": 16, "experts.shared": 0.5}

    def experts(self, seen: Activations, room: Room) -> Experts:
        active_TF = self.active(seen)
        order_F = active_TF.sum(0).argsort(descending=True, stable=True)
        routed_n = order_F[room.shared :]
        expert_F = torch.full_like(order_F, SHARED)
        expert_F[routed_n] = self.clusters(active_TF[:, routed_n], room)
        return Experts(expert_F)

    def active(self, seen: Activations) -> Bool[Tensor, "T F"]:
        """Mark the `top` neurons of each token."""
        active_TF = torch.zeros_like(seen.h_TF, dtype=torch.bool)
        top = min(self.config.top, active_TF.shape[1])
        pieces = zip(*(t.split(PIECE_TOKENS) for t in (active_TF, seen.x_TD, seen.h_TF)), strict=True)
        for active_tF, x_tD, h_tF in pieces:
            size_tF = _by_directions(seen, x_tD) if self.config.normalized else h_tF
            active_tF.scatter_(1, size_tF.abs().topk(top, dim=1).indices, True)
        return active_TF

    def clusters(self, active_Tn: Bool[Tensor, "T n"], room: Room) -> Int[Tensor, " n"]:
        """Balanced k-means of the columns, which are sorted by their rates."""
        centroids_TN = active_Tn[:, : room.num_experts].float()
        for _ in range(self.config.steps):
            pieces = zip(active_Tn.split(PIECE_TOKENS), centroids_TN.split(PIECE_TOKENS), strict=True)
            # the L1 distance of bits b to c is the sum of c + b (1 - 2 c), and the sum of c the same for all that a cluster holds
            nearness_nN = sum(active_tn.float().T @ (2 * centroids_tN - 1) for active_tn, centroids_tN in pieces)
            assert isinstance(nearness_nN, Tensor)
            assigned_n = optimal_assignment(nearness_nN, room.expert_size)
            members_nN = F.one_hot(assigned_n, room.num_experts).float() / room.expert_size
            centroids_TN = torch.cat([active_tn.float() @ members_nN for active_tn in active_Tn.split(PIECE_TOKENS)])
        return assigned_n


def _by_directions(seen: Activations, x_tD: Float[Tensor, "t D"]) -> Float[Tensor, "t F"]:
    """Return the neurons of an MLP with input and weight rows of unit length, without biases."""
    x_tD = F.normalize(x_tD, dim=1)

    def project(projection: WeightMatrix) -> Float[Tensor, "t F"]:
        return x_tD @ F.normalize(projection.weight.float(), dim=1).T

    up_tF = project(seen.mlp.up)
    activation, gate = seen.mlp.activation, seen.mlp.gate
    return activation(up_tF) if gate is None else activation(project(gate)) * up_tF
