"""The default: which neurons all tokens use, which form an expert, and a linear router, from calibration statistics alone.

Per layer, on dense activations. Shared part: the neurons whose contributions a_f = |h_f| |down column f| have the most
energy, weighted by 1 / |residual|^2 of the token. Experts: clusters of one size of the other neurons by the cosine of their
contributions over tokens. Router: ridge regression with a bias from the MLP's input to the root of each expert's share of a
token's energy. Then in turn neurons move to the expert whose tokens need them most, and the router is fitted again.

Shapes, and the letters at the ends of names: T tokens, t some of them, D hidden size, F neurons, n routed ones, N experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tomoe.methods.base import Method
from tomoe.methods.registry import method
from tomoe.model.shape import ModelShape
from tomoe.plans.partition.activations import Activations
from tomoe.plans.partition.clusters import CLUSTER_STEPS, balanced_assignment, balanced_clusters
from tomoe.plans.partition.experts import COMPARED_TOKENS, SHARED, Experts, Room
from tomoe.plans.partition.layouts import FineLayout
from tomoe.plans.partition.routers import RidgeRegression, expert_energy
from tomoe.plans.routing import largest

REASSIGNMENTS = 2
PIECE_TOKENS = 4096  # tokens whose activations are held in float32 at once


@method("carve", paper="")
class Carve(Method):
    """Groups neurons that are active on the same tokens into experts, and fits a router. The default."""

    def experts(self, seen: Activations, room: Room) -> Experts:
        x_TD, h_TF, weight_T = seen.x_TD, seen.h_TF, seen.weight_T
        # a piece at a time: of many tokens the activations in float32 are the largest matrix there is
        pieces = zip(h_TF.split(PIECE_TOKENS), weight_T.split(PIECE_TOKENS), strict=True)
        energy_F = seen.down_DF.norm(dim=0).square() * sum(w_t @ h_tF.float().square() for h_tF, w_t in pieces)
        # the neurons that matter to all tokens are shared, and a router chooses among the others
        order_F = energy_F.argsort(descending=True, stable=True)
        routed_n = order_F[room.shared :].sort().values
        generator = torch.Generator(x_TD.device).manual_seed(room.seed)
        some_t = torch.randperm(len(x_TD), generator=generator, device=x_TD.device)[:COMPARED_TOKENS]
        assigned_n, *router = _routed_experts(x_TD, seen.energy_TF(routed_n), some_t, room)
        expert_F = torch.full((h_TF.shape[1],), SHARED, device=x_TD.device)
        expert_F[routed_n] = assigned_n
        return Experts(expert_F, (router[0], router[1]))

    def grouping(self, shape: ModelShape, layout: FineLayout, tokens: int) -> float:
        routed, compared = shape.mlp_size - layout.shared, min(tokens, COMPARED_TOKENS)
        clusters = CLUSTER_STEPS * 4 * routed * compared * layout.num_experts
        # two more routers from the same factor, and where they send the tokens that neurons are needed by
        again = REASSIGNMENTS * 4 * tokens * layout.num_experts * (routed + shape.hidden_size)
        return clusters + again


def _routed_experts(
    x_TD: Float[Tensor, "T D"],
    energy_Tn: Float[Tensor, "T n"],
    some_t: Int[Tensor, " t"],
    room: Room,
) -> tuple[Int[Tensor, " n"], Float[Tensor, "N D"], Float[Tensor, " N"]]:
    """Return the expert of each routed neuron, and weight and bias of the router; clustering starts on some of the tokens."""
    # numbers of all tokens have no names here, so that as few of them as can be are held at once
    regression = RidgeRegression(x_TD, room.router_bias)
    # neurons that work on the same tokens belong together: then a token needs few experts
    assigned_n = balanced_clusters(F.normalize(energy_Tn[some_t].sqrt().T, dim=1), room.num_experts, room.seed)
    for step in range(REASSIGNMENTS + 1):
        router_ND, router_bias_N = regression.fit(expert_energy(energy_Tn, assigned_n, room.num_experts))
        if step < REASSIGNMENTS:
            # a router errs, so neurons move to where it sends the tokens that need them
            needs_nN = energy_Tn.T @ largest(x_TD @ router_ND.T + router_bias_N, room.top_k)
            assigned_n = balanced_assignment(needs_nN, room.expert_size)
    return assigned_n, router_ND, router_bias_N
