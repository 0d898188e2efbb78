"""ExpertWeaver: the gates of an MLP tell which neurons are universal, which belong together, and where tokens go.

The profile of a neuron is its mean act(gate x) on each sequence. Neurons whose coefficient of variation over sequences is at most
`threshold` are universal, and the share of them is the share of a token's neurons that are shared in this layer. Shared are the
universal neurons of the highest mean, then, where there are too few, others of the lowest variation. Experts: balanced k-means of
the other profiles. Router: the mean of the gate's rows of an expert, so nothing is fitted.

The budget gives tokens equally many neurons in all layers (except for a few dense ones), and experts have one size. So the
shared part of a layer is the one of the layout and the experts that every token uses beside it: right to half an expert, with one
expert left to choose at least. A target whose routers have no bias cannot mark such experts.

Shapes, and the letters at the ends of names: T tokens, s sequences, D hidden size, F neurons, n routed ones, N experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tomoe.errors import UserError
from tomoe.methods.base import Method, MethodConfig, Task
from tomoe.methods.registry import method
from tomoe.model.shape import ModelShape
from tomoe.plans import ALWAYS, Plan
from tomoe.plans.layer import LayerPlan
from tomoe.plans.partition.activations import Activations
from tomoe.plans.partition.clusters import balanced_clusters
from tomoe.plans.partition.experts import FLOAT32, SHARED, Experts, Room
from tomoe.plans.routing import bfloat16_values
from tomoe.recipe.conversion import Recipe


@method("expert_weaver", paper="https://arxiv.org/abs/2602.15521")
class ExpertWeaver(Method):
    """Shares the neurons whose gates vary little between texts, in each layer as many as there are; clusters the others into
    balanced experts by their gates on each text; the router is the mean gate of an expert."""

    class Config(MethodConfig):
        threshold: float = Field(default=0.6, gt=0)
        """Largest coefficient of variation of a universal neuron, of its mean activated gate over sequences."""

    config: Config

    def plan(self, task: Task) -> Plan:
        sequences = len(task.text.calibration.input_ids)
        if sequences < 2:
            raise UserError(
                "method expert_weaver compares neurons between sequences of calibration text, but there is only one; set "
                "data.calibration_tokens to several times data.seq_len, or more"
            )
        plan = super().plan(task)
        assert isinstance(plan, Plan)
        return replace(plan, layers=tuple(_leaving_a_choice(layer) for layer in plan.layers))

    def experts(self, seen: Activations, room: Room) -> Experts:
        profile_sF = _means(seen.gate_TF(), seen.sequence_T)
        order_F, universal = self.most_universal(profile_sF)
        always = self.always_used(universal / len(order_F), room)
        first = room.shared + always * room.expert_size
        expert_F = torch.full_like(order_F, SHARED)
        expert_F[order_F[room.shared : first]] = (
            torch.arange(first - room.shared, device=order_F.device) // room.expert_size
        )
        others_n = order_F[first:]
        clusters = room.num_experts - always
        expert_F[others_n] = always + balanced_clusters(profile_sF[:, others_n].T.contiguous(), clusters, room.seed)
        return Experts(expert_F, _mean_gates(seen, expert_F, always, room))

    def peak(self, recipe: Recipe, shape: ModelShape, dtype: torch.dtype, vocabulary: int) -> dict[str, int]:
        gates = FLOAT32 * shape.mlp_size * recipe.data.calibration_tokens
        return super().peak(recipe, shape, dtype, vocabulary) | {"activated gates of one layer": gates}

    def most_universal(self, profile_sF: Float[Tensor, "s F"]) -> tuple[Int[Tensor, " F"], int]:
        """Return all neurons, those to be shared first, and how many are universal."""
        mean_F = profile_sF.mean(0).abs()
        variation_F = profile_sF.std(0) / mean_F.clamp_min(torch.finfo(mean_F.dtype).tiny)
        universal_F = variation_F <= self.config.threshold
        # stable: the second order decides first, and keeps the first one where it decides nothing
        order_F = torch.where(universal_F, -mean_F, variation_F).argsort(stable=True)
        order_F = order_F[(~universal_F)[order_F].long().argsort(stable=True)]
        return order_F, int(universal_F.sum())

    def always_used(self, universal: float, room: Room) -> int:
        """Count the experts that every token uses, so that the share `universal` of its neurons is shared."""
        if not room.router_bias:
            return 0
        width = room.shared + room.top_k * room.expert_size
        return min(max(0, round((universal * width - room.shared) / room.expert_size)), room.top_k - 1)


def _means(gate_TF: Float[Tensor, "T F"], sequence_T: Int[Tensor, " T"]) -> Float[Tensor, "s F"]:
    """Average over the tokens of each sequence that has any."""
    numbers = sequence_T.unique(return_inverse=True)[1]
    members_Ts = F.one_hot(numbers).to(gate_TF.dtype)
    return (members_Ts / members_Ts.sum(0)).T @ gate_TF


def _mean_gates(
    seen: Activations, expert_F: Int[Tensor, " F"], always: int, room: Room
) -> tuple[Float[Tensor, "N D"], Float[Tensor, " N"]]:
    """Return weight and bias of the mean gate (else up) row of each expert; the first `always` experts always win."""
    gate = seen.mlp.gate or seen.mlp.up
    members_NF = F.one_hot(expert_F + 1, room.num_experts + 1)[:, 1:].T.float() / room.expert_size
    bias_N = torch.zeros_like(members_NF[:, 0])
    if gate.bias is not None and room.router_bias:
        bias_N = members_NF @ gate.bias.float()
    bias_N[:always] += ALWAYS
    return bfloat16_values(members_NF @ gate.weight.float()), bias_N


def _leaving_a_choice(layer: LayerPlan) -> LayerPlan:
    """Return the layer with at least one expert to choose: dense layers leave the others fewer experts than planned."""
    assert layer.router_bias is not None
    too_many = layer.always_used.clone()
    too_many[: layer.top_k - 1] = False
    return replace(layer, router_bias=layer.router_bias - ALWAYS * too_many)
