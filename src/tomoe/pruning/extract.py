"""MaskNetwork -> Plan: remove the noise, choose widths that meet the budget, record what is kept.

Without noise experts are narrower, so extraction owns the budget: widths follow the trained keep probabilities of every
site, all shifted by one common logit offset that makes the active fraction of the plan the requested one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.budget import BUDGET_TOLERANCE, attention_params, decoder_params, mlp_params
from tomoe.errors import UserError
from tomoe.model.hooks import hooked, input_of
from tomoe.model.structure import layer_parts
from tomoe.plan import LayerPlan, Plan
from tomoe.pruning.gumbel import keep_probability
from tomoe.pruning.layouts import OverlappingLayout, check_tolerance
from tomoe.pruning.mask_network import MaskNetwork
from tomoe.pruning.masking import masked, planned_masks
from tomoe.pruning.routing import bfloat16_values

Valid = Bool[Tensor, "B S"]


@dataclass(frozen=True)
class Site:
    """One width that extraction chooses, counted in units (a multiple of neurons, a Q/K choice, a V/O dim)."""

    expected_units: Callable[[float], float]
    """Units that sampling would keep on average at a common logit offset."""
    params: Callable[[int], int]
    """Parameters of a number of units."""
    max_units: int

    def clipped_units(self, offset: float) -> float:
        return min(max(self.expected_units(offset), 1.0), float(self.max_units))

    def expected_params(self, offset: float) -> float:
        """Interpolate `params` between whole units."""
        units = self.clipped_units(offset)
        low = int(units)
        high = min(low + 1, self.max_units)
        return self.params(low) + (self.params(high) - self.params(low)) * (units - low)


def common_offset(sites: Sequence[Site], target: int) -> float:
    """Find the logit offset at which all sites together are expected to have `target` parameters.

    Raises UserError if even the smallest widths cost more than the target.
    """
    least = sum(site.params(1) for site in sites)
    if least > target:
        raise UserError(
            f"the plan needs at least {least:,} active decoder parameters, but the budget allows {target:,}; "
            "set a larger active fraction"
        )
    low, high = -60.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(site.expected_params(middle) for site in sites) < target:
            low = middle
        else:
            high = middle
    return high


def whole_units(sites: Sequence[Site], offset: float, target: int) -> list[int]:
    """Round the expected units of every site at `offset`, so that their parameters come as near to `target` as possible."""
    expected = [site.clipped_units(offset) for site in sites]
    units = [int(n) for n in expected]
    total = sum(site.params(n) for site, n in zip(sites, units, strict=True))
    # round up those with the largest remainder, as long as that comes nearer to the target
    for i in sorted(range(len(sites)), key=lambda i: (units[i] - expected[i], i)):
        if units[i] < sites[i].max_units:
            added = sites[i].params(units[i] + 1) - sites[i].params(units[i])
            if abs(total + added - target) < abs(total - target):
                units[i], total = units[i] + 1, total + added
    return units


class Extraction:
    """The noise-free logits of one mask network, and the plan that they give."""

    def __init__(self, net: MaskNetwork, model: Any):
        self.net, self.model, self.shape = net, model, net.shape
        self.layout = cast(OverlappingLayout, net.layout)
        embeddings = net.hypernetwork()
        self.embeddings = net.attention_embeddings(embeddings)
        self.neuron_logits = [neurons(embeddings[2 * i + 1]) for i, neurons in enumerate(net.neurons)]
        self.dim_logits = [net.dims[i](self.embeddings[i]) for i in range(self.shape.num_layers)]

    def _expected_dims(self, logits: Float[Tensor, "*n size"], offset: float) -> float:
        """Return how many dims sampling keeps with `offset` added to every logit, the mean over experts or tokens."""
        return float(keep_probability(logits + offset, self.net.sampling.keep_bias).sum(-1).mean())

    def _expected_units(self, logits: Float[Tensor, "N F"], offset: float) -> float:
        """Return how many multiples of neurons sampling keeps."""
        return self._expected_dims(logits, offset) / self.layout.width_multiple

    def _mlp_params(self, units: int) -> int:
        width = min(units * self.layout.width_multiple, self.shape.mlp_size)
        return int(mlp_params(self.shape, width))

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
                self.model.model(input_ids=row, attention_mask=row_valid.long(), use_cache=False)
        return [torch.cat(layer) for layer in logits]

    def _sites(self, value_logits: Sequence[Tensor] | None) -> list[list[Site]]:
        """Return the sites of each layer: its MLP, unless its experts are fine-grained (carving set their widths), and
        unless attention stays whole, Q/K and V/O."""
        s, c = self.shape, self.shape.head_dim
        sites = []
        for i in range(s.num_layers):
            layer = []
            if not self.net.fine:
                units = partial(self._expected_units, self.neuron_logits[i])
                layer.append(Site(units, self._mlp_params, -(-s.mlp_size // self.layout.width_multiple)))
            if self.net.attention.pruning != "off":
                qk, values = self.dim_logits[i][c:], self.dim_logits[i][:c] if value_logits is None else value_logits[i]
                order = qk.argsort(descending=True, stable=True)
                layer.append(Site(partial(self._expected_dims, qk), partial(self._qk_params, order), s.num_qk_choices))
                layer.append(Site(partial(self._expected_dims, values), partial(attention_params, s, 0), c))
            sites.append(layer)
        return sites

    def plan(self, active: float, value_logits: Sequence[Tensor] | None, tolerance: float) -> Plan:
        """Return the plan whose active fraction is `active`; `value_logits` are the V/O logits of calibration tokens."""
        s, pruning = self.shape, self.net.attention.pruning
        sites = self._sites(value_logits)
        fixed = s.num_layers * attention_params(s, s.head_dim, s.head_dim) if pruning == "off" else 0
        if self.net.fine:
            fixed += sum(int(mlp_params(s, self.net.fine_width(i))) for i in range(s.num_layers))
        target, all_sites = round(active * decoder_params(s)) - fixed, [site for layer in sites for site in layer]
        if not all_sites:
            return Plan(s, tuple(self._layer(i, {}) for i in range(s.num_layers)))
        offset = common_offset(all_sites, target)
        if self.net.fine:
            units = whole_units(all_sites, offset, target)
            pairs = [units[i : i + 2] for i in range(0, len(units), 2)]
            return Plan(s, tuple(self._layer(i, {}, *pair) for i, pair in enumerate(pairs)))
        if self.layout.uniform:
            slack = round(tolerance * decoder_params(s))
            width, units = self._common_width(sites, offset, target, slack)
            per_layer = [[width, *units[i : i + 2]] for i in range(0, max(len(units), 1), 2)]
            per_layer = per_layer if units else per_layer * s.num_layers
        else:
            units = whole_units(all_sites, offset, target)
            per_layer = [units[i : i + len(sites[0])] for i in range(0, len(units), len(sites[0]))]
            multiple = self.layout.width_multiple
            per_layer = [[min(n * multiple, s.mlp_size), *attention] for n, *attention in per_layer]
        layers = tuple(self._layer(i, self._overlapping(i, width), *dims) for i, (width, *dims) in enumerate(per_layer))
        return Plan(s, layers, notes={"expert_widths": [self._expert_widths(i, offset) for i in range(s.num_layers)]})

    def _expert_widths(self, i: int, offset: float) -> list[int]:
        """Return how many neurons sampling keeps in each expert of a layer; extraction gives them all one width."""
        kept = keep_probability(self.neuron_logits[i] + offset, self.net.sampling.keep_bias).sum(-1)
        return [int(n) for n in kept.round().tolist()]

    def _common_width(
        self, sites: Sequence[Sequence[Site]], offset: float, target: int, slack: int
    ) -> tuple[int, list[int]]:
        """Choose one width for all layers near their mean at `offset`; the attention sites take up the rest.

        Returns the width and the units of the attention sites. The width is a multiple of `common_multiple`, or of its half,
        its quarter and so on: of the largest that meets `target` within `slack` parameters.
        """
        s, multiple = self.shape, self.layout.common_multiple
        attention = [site for layer in sites for site in layer[1:]]
        mean = sum(layer[0].clipped_units(offset) for layer in sites) / len(sites) * self.layout.width_multiple
        best = (target, s.mlp_size, [site.max_units for site in attention])
        while True:
            below = int(mean // multiple) * multiple
            widths = {min(max(w, 1), s.mlp_size) for w in (below, below + multiple)}
            for width in sorted(widths, key=lambda w: abs(w - mean)):
                left = target - s.num_layers * int(mlp_params(s, width))
                if attention and left < sum(site.params(1) for site in attention):
                    continue
                units = whole_units(attention, common_offset(attention, left), left) if attention else []
                miss = abs(left - sum(site.params(n) for site, n in zip(attention, units, strict=True)))
                if miss <= slack:
                    return width, units
                best = min(best, (miss, width, units))
            if multiple == 1:
                return best[1:]
            multiple = multiple // 2

    def _overlapping(self, i: int, width: int) -> dict[str, Tensor]:
        """Return the experts of layer i: of each the neurons with the largest logits."""
        ranks = self.neuron_logits[i].argsort(dim=-1, descending=True, stable=True)
        neurons = torch.zeros(ranks.shape, dtype=torch.bool).scatter_(1, ranks[:, :width].cpu(), True)
        return {"expert_masks": neurons}

    def _fine(self, i: int) -> dict[str, Any]:
        """Return the fine-grained experts of layer i, as carving made them."""
        expert_masks, shared_mask = self.net.expert_masks(i)
        bias = cast(Tensor, self.net.routers[i].bias).detach().float().cpu()
        top_k = int(self.net.experts_per_token[i])
        return {
            "expert_masks": expert_masks.cpu(),
            "shared_mask": shared_mask.cpu(),
            "router_bias": bias,
            "top_k": top_k,
        }

    def _layer(self, i: int, experts: dict[str, Any], qk_units: int = 0, value_dims: int = 0) -> LayerPlan:
        s = self.shape
        router = bfloat16_values(self.net.routers[i].weight.detach()).cpu()
        c, dims = s.head_dim, self.dim_logits[i].cpu()
        qk = torch.ones(s.num_qk_choices, dtype=torch.bool)
        values, value_router, top_k = torch.ones(c, dtype=torch.bool), {}, c
        if self.net.attention.pruning != "off":
            qk, top_k = _first(dims[c:].argsort(descending=True, stable=True), qk_units), value_dims
        if self.net.attention.pruning == "static":
            values = _first(dims[:c].argsort(descending=True, stable=True), value_dims)
        if self.net.attention.pruning == "per_token" and top_k < c:
            state = self.net.value_router(i, self.embeddings[i]).state_dict()
            value_router = {name: t.detach().clone().cpu() for name, t in state.items()}
        rotation = self.net.value_rotation(i) if top_k < c else None
        experts = experts or self._fine(i)
        return LayerPlan(
            **experts, router_weight=router, qk_kept=qk, value_kept=values, value_top_k=top_k, value_router=value_router,
            value_rotation=None if rotation is None else rotation.detach().clone().cpu(),
        )  # fmt: skip


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
