"""MaskNetwork -> Plan: remove the noise, choose widths that meet the budget, record what is kept.

Without noise experts are narrower, so extraction owns the budget: widths follow the trained keep probabilities of every
site, all shifted by one common logit offset that makes the active fraction of the plan the requested one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.budget import BUDGET_TOLERANCE, attention_params, decoder_params
from tomoe.data.corpus import Sequences
from tomoe.model.hooks import hooked, input_of
from tomoe.model.running import family_head, hidden_states
from tomoe.model.structure import layer_parts
from tomoe.plan import LayerPlan, Plan
from tomoe.pruning.allocation import Site, common_offset
from tomoe.pruning.layouts import check_tolerance
from tomoe.pruning.learned.gumbel import keep_probability
from tomoe.pruning.learned.mask_network import MaskNetwork
from tomoe.pruning.masking import masked, planned_masks
from tomoe.pruning.routing import bfloat16_values
from tomoe.training.distillation import distill_loss

Valid = Bool[Tensor, "B S"]


class Extraction:
    """The noise-free logits of one mask network, and the plan that they give."""

    def __init__(self, net: MaskNetwork, model: Any):
        self.net, self.model, self.shape = net, model, net.shape
        embeddings = net.hypernetwork()
        self.embeddings = net.attention_embeddings(embeddings)
        self.experts = net.extract_experts(embeddings)
        # of V/O dims and Q/K choices; none where attention stays whole
        self.dim_logits = [dims(self.embeddings[i]) for i, dims in enumerate(net.dims)]

    def _expected_dims(self, logits: Float[Tensor, "*n size"], offset: float) -> float:
        """Return how many dims sampling keeps with `offset` added to every logit, the mean over experts or tokens."""
        return float(keep_probability(logits + offset, self.net.sampling.keep_bias).sum(-1).mean())

    def _qk_params(self, order: Int[Tensor, " Q"], count: int) -> int:
        return int(attention_params(self.shape, len(self.shape.qk_dims(_first(order, count))), 0))

    def value_logits(self, ids: Int[Tensor, "B S"], valid: Valid, plan: Plan | None) -> list[Float[Tensor, "t C"]]:
        """Return the V/O logits of calibration tokens on dense activations, or on those of a plan's masked model."""
        logits: list[list[Tensor]] = [[] for _ in range(self.shape.num_layers)]

        def hooks() -> Iterator[RemovableHandle]:
            for i, parts in enumerate(layer_parts(self.model)):

                def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], i: int = i) -> None:
                    tokens = input_of(args, kwargs).flatten(0, -2)[row_valid.flatten()]
                    logits[i].append(self.net.value_logits(i, tokens, self.embeddings[i]))

                yield parts.attention.register_forward_pre_hook(record, with_kwargs=True)

        with hooked(hooks()), masked(self.model, planned_masks(plan, ids.device)) if plan else nullcontext():
            for row, row_valid in zip(ids.split(1), valid.split(1), strict=True):
                self.model.base_model(input_ids=row, attention_mask=row_valid.long(), use_cache=False)
        return [torch.cat(layer) for layer in logits]

    def _attention_sites(self, i: int, value_logits: Sequence[Tensor] | None) -> list[Site]:
        """Return the sites of Q/K and V/O of layer i, unless attention stays whole."""
        s, c = self.shape, self.shape.head_dim
        if self.net.attention.pruning == "off":
            return []
        qk, values = self.dim_logits[i][c:], self.dim_logits[i][:c] if value_logits is None else value_logits[i]
        order = qk.argsort(descending=True, stable=True)
        return [
            Site(partial(self._expected_dims, qk), partial(self._qk_params, order), s.num_qk_choices),
            Site(partial(self._expected_dims, values), partial(attention_params, s, 0), c),
        ]

    def plan(self, active: float, value_logits: Sequence[Tensor] | None, tolerance: float) -> Plan:
        """Return the plan whose active fraction is `active`; `value_logits` are the V/O logits of calibration tokens."""
        s, whole = self.shape, self.net.attention.pruning == "off"
        layers = [[*self.experts.sites(i), *self._attention_sites(i, value_logits)] for i in range(s.num_layers)]
        sites = [site for layer in layers for site in layer]
        attention = s.num_layers * attention_params(s, s.head_dim, s.head_dim) if whole else 0
        target = round(active * decoder_params(s)) - s.other_params - attention - self.experts.params
        offset = common_offset(sites, target) if sites else 0.0
        chosen = self.experts.choose(layers, offset, target, round(tolerance * decoder_params(s)))
        planned = tuple(self._layer(i, width, *dims) for i, (width, dims) in enumerate(chosen))
        return Plan(s, planned, notes=self.experts.notes(offset))

    def _layer(self, i: int, width: int, qk_units: int = 0, value_dims: int = 0) -> LayerPlan:
        s = self.shape
        router = bfloat16_values(self.net.routers[i].weight.detach()).cpu()
        c = s.head_dim
        qk = torch.ones(s.num_qk_choices, dtype=torch.bool)
        values, value_router, top_k = torch.ones(c, dtype=torch.bool), {}, c
        if self.net.attention.pruning != "off":
            dims = self.dim_logits[i].cpu()
            qk, top_k = _first(dims[c:].argsort(descending=True, stable=True), qk_units), value_dims
        if self.net.attention.pruning == "static":
            values = _first(dims[:c].argsort(descending=True, stable=True), value_dims)
        if self.net.attention.pruning == "per_token" and top_k < c:
            state = self.net.value_router(i, self.embeddings[i]).state_dict()
            value_router = {name: t.detach().clone().cpu() for name, t in state.items()}
        rotation = self.net.value_rotation(i) if top_k < c else None
        return LayerPlan(
            router_weight=router,
            qk_kept=qk,
            value_kept=values,
            value_top_k=top_k,
            value_router=value_router,
            value_rotation=None if rotation is None else rotation.detach().clone().cpu(),
            **self.experts.fields(i, width),
        )


def _first(order: Int[Tensor, " n"], count: int) -> Bool[Tensor, " n"]:
    """Return the first `count` of an order as a mask."""
    return torch.zeros(len(order), dtype=torch.bool).scatter_(0, order[:count].cpu(), True)


@torch.no_grad()
def extract_plan(
    net: MaskNetwork,
    model: Any,
    active: float,
    calibration: tuple[Int[Tensor, "B S"], Valid],
    tolerance: float = BUDGET_TOLERANCE,
) -> Plan:
    """Return the noise-free plan with the fraction `active` of the decoder parameters.

    Only the per-token choice of V/O dims needs the calibration text: K follows the logits of its tokens, first on dense
    activations and then on those of the plan that these give. Raises UserError if whole units cannot meet the budget within
    `tolerance` (absolute, a fraction of the decoder parameters).
    """
    extraction = Extraction(net, model)
    logits = None
    if net.attention.pruning == "per_token":
        ids, valid = calibration
        first = extraction.plan(active, extraction.value_logits(ids, valid, None), tolerance)
        logits = extraction.value_logits(ids, valid, first)
    plan = extraction.plan(active, logits, tolerance)
    check_tolerance(plan.active_fraction(), active, tolerance, net.layout)
    return plan


@torch.no_grad()
def planned_loss(model: Any, plan: Plan, text: Sequences, objective: str) -> float:
    """Return what the dense model loses under a plan's masks, in nats a token of `text`: the KL to itself, or the
    language-modeling loss if that is the objective.

    Every process reads all of the text: a sharded model runs in all of them or in none.
    """
    masks, total = planned_masks(plan, model.device), 0.0
    for ids, mask in zip(text.input_ids.split(1), text.mask.split(1), strict=True):
        ids, mask = ids.to(model.device), mask.to(model.device)
        teacher = hidden_states(model, ids, mask) if objective == "kl" else None
        with masked(model, masks):
            student = hidden_states(model, ids, mask)
        total += distill_loss(student, teacher, ids, mask, family_head(model)).item() * int(mask.sum())
    return total / text.tokens
