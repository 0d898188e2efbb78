"""Mask network -> Plan: remove the noise, choose widths that meet the budget, record what is kept.

Carved fine-grained experts have their widths already. Masks that were learned have none: without noise experts are narrower, so
extraction owns the budget. Widths then follow the trained keep probabilities of every site, all shifted by one common logit
offset that makes the active fraction of the plan the requested one.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tomoe.budget import BUDGET_TOLERANCE, attention_params, decoder_params
from tomoe.errors import UserError
from tomoe.methods.tomoe.attention import ExtractedAttention
from tomoe.methods.tomoe.networks import AnyNetwork
from tomoe.model.shape import ModelShape
from tomoe.plans.layer import LayerPlan, dense_attention
from tomoe.plans.partition.allocation import common_offset
from tomoe.plans.partition.layouts import check_tolerance
from tomoe.plans.plan import Plan
from tomoe.plans.routing import ExpertRouter, bfloat16_values


@torch.no_grad()
def extract_plan(
    net: AnyNetwork,
    model: Any,
    active: float,
    calibration: tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"]],
    tolerance: float = BUDGET_TOLERANCE,
) -> Plan:
    """Return the noise-free plan with the fraction `active` of the decoder parameters.

    Only the per-token choice of V/O dims needs the calibration text: K follows the logits of its tokens, first on dense
    activations and then on those of the plan that these give. Raises UserError if integer units cannot meet the budget within
    `tolerance` (absolute, a fraction of the decoder parameters).
    """
    extraction = Extraction(net)
    attention = extraction.attention
    if attention is not None and attention.net.per_token:
        attention.token_logits = attention.value_logits(model, *calibration, None)
        attention.token_logits = attention.value_logits(model, *calibration, extraction.plan(active, tolerance))
    plan = extraction.plan(active, tolerance)
    check_tolerance(plan.active_fraction(net.layout.counts_routers), active, tolerance, net.layout)
    return plan


class Extraction:
    """One mask network without noise, and the plan extracted from it."""

    def __init__(self, net: AnyNetwork):
        self.shape: ModelShape = net.shape
        self.counts_routers = net.layout.counts_routers
        # without those of V/O dims, and with them in every layer
        self.fewest_routers, self.most_routers = net.counted_routers(value_routers=False), net.counted_routers()
        self.routers: list[ExpertRouter] = list(net.routers)
        embeddings = net.embeddings()
        self.experts = net.extract_experts(embeddings)
        self.attention: ExtractedAttention | None = None
        if net.attention is not None:
            assert embeddings is not None
            self.attention = ExtractedAttention(net.attention, embeddings)

    def plan(self, active: float, tolerance: float) -> Plan:
        """Return the plan whose active fraction is `active`.

        A layer that keeps all V/O dims has no router for them, which leaves more for the others, so how many have one is looked
        for from above. Raises UserError if even the smallest widths cost more.
        """
        routers = self.most_routers
        while True:
            try:
                plan = self._plan(active, tolerance, routers)
            except UserError:
                if routers == self.fewest_routers:
                    raise
                routers -= (self.most_routers - self.fewest_routers) // self.shape.num_layers
                continue
            found = plan.router_params if self.counts_routers else 0
            if found >= routers:
                return plan
            routers = found

    def _plan(self, active: float, tolerance: float, routers: int) -> Plan:
        """Make the plan for which this many router parameters leave room."""
        s = self.shape
        attention = self.attention
        of_attention = [[] if attention is None else attention.sites(i) for i in range(s.num_layers)]
        layers = [[*self.experts.sites(i), *of_attention[i]] for i in range(s.num_layers)]
        sites = [site for layer in layers for site in layer]
        unpruned = s.num_layers * attention_params(s, s.head_dim, s.head_dim) if attention is None else 0
        target = round(active * decoder_params(s)) - s.other_params - unpruned - self.experts.params - routers
        # carved experts with dense attention leave nothing to choose
        offset = common_offset(sites, target) if sites else 0.0
        chosen = self.experts.choose(layers, offset, target, round(tolerance * decoder_params(s)))
        planned = tuple(self._layer(i, width, *dims) for i, (width, dims) in enumerate(chosen))
        return Plan(s, planned, notes=self.experts.notes(offset))

    def _layer(self, i: int, width: int, *dims: int) -> LayerPlan:
        attention = dense_attention(self.shape) if self.attention is None else self.attention.fields(i, *dims)
        router = bfloat16_values(self.routers[i].weight.detach()).cpu()
        return LayerPlan(router_weight=router, **attention, **self.experts.fields(i, width))
