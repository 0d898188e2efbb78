"""MaskNetwork -> Plan: take the noise away, write down what is left, inside the budget.

Taking the noise away makes experts narrower, so extraction owns the budget: widths follow the trained keep-probabilities
of every site, all shifted by one common logit offset that makes the plan's active fraction the asked one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tomoe.budget import attention_params, block_total, mlp_params
from tomoe.errors import UserError
from tomoe.model.structure import ModelShape, layer_parts
from tomoe.plan import LayerPlan, Plan
from tomoe.pruning.gumbel import keep_probability
from tomoe.pruning.mask_network import MaskNetwork
from tomoe.pruning.masking import masked, planned_masks

BUDGET_TOLERANCE = 0.002
Valid = Bool[Tensor, "B S"]


@dataclass(frozen=True)
class Site:
    """One width that extraction chooses, counted in units (a multiple of neurons, a Q/K choice, a V/O dim)."""

    wanted: Callable[[float], float]  # units that training would keep on average, at a common logit offset
    params: Callable[[int], int]  # parameters of so many units
    most: int

    def clipped(self, offset: float) -> float:
        return min(max(self.wanted(offset), 1.0), float(self.most))

    def expected_params(self, offset: float) -> float:
        """`params` between whole units, linearly."""
        units = self.clipped(offset)
        low = int(units)
        high = min(low + 1, self.most)
        return self.params(low) + (self.params(high) - self.params(low)) * (units - low)


def common_offset(sites: Sequence[Site], target: int) -> float:
    """The logit offset at which all sites together are expected to have `target` parameters.

    Raises UserError where even the smallest widths cost more than the target.
    """
    least = sum(site.params(1) for site in sites)
    if least > target:
        raise UserError(
            f"the plan needs at least {least:,} active block parameters, but the budget allows {target:,}; ask for more"
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
    """Units of every site near what it wants at `offset`, their parameters as near to `target` as whole units allow."""
    wanted = [site.clipped(offset) for site in sites]
    units = [int(w) for w in wanted]
    total = sum(site.params(n) for site, n in zip(sites, units, strict=True))
    # whole units: round up where the remainder is largest, as long as that comes nearer to the target
    for i in sorted(range(len(sites)), key=lambda i: (units[i] - wanted[i], i)):
        if units[i] < sites[i].most:
            added = sites[i].params(units[i] + 1) - sites[i].params(units[i])
            if abs(total + added - target) < abs(total - target):
                units[i], total = units[i] + 1, total + added
    return units


class Extraction:
    """The noise-free logits of one mask network, and the plan they make."""

    def __init__(self, net: MaskNetwork, model: Any):
        self.net, self.model, self.shape = net, model, net.shape
        embeddings = net.hypernetwork()
        self.embeddings = net.attention_embeddings(embeddings)
        self.neuron_logits = [net.neurons[i](embeddings[2 * i + 1]) for i in range(self.shape.num_layers)]
        self.dim_logits = [net.dims[i](self.embeddings[i]) for i in range(self.shape.num_layers)]

    def _wanted(self, logits: Float[Tensor, "*n size"], offset: float) -> float:
        """Dims that sampling would keep with `offset` added to every logit, mean over experts or tokens."""
        s = self.net.sampling
        return float(keep_probability(logits + offset, s.keep_bias, s.noise).sum(-1).mean())

    def _mlp_params(self, units: int) -> int:
        width = min(units * self.net.experts.width_multiple, self.shape.mlp_size)
        return int(mlp_params(self.shape, width))

    def _qk_params(self, order: Int[Tensor, " Q"], count: int) -> int:
        return int(attention_params(self.shape, len(self.shape.qk_dims(_chosen(order, count))), 0))

    def value_logits(self, ids: Int[Tensor, "B S"], valid: Valid, plan: Plan | None) -> list[Float[Tensor, "t C"]]:
        """V/O logits of calibration tokens, on the dense model's activations or on those of a plan's masked model."""
        found: list[list[Tensor]] = [[] for _ in range(self.shape.num_layers)]
        handles = []
        for i, parts in enumerate(layer_parts(self.model)):

            def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], i: int = i) -> None:
                x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                tokens = x.flatten(0, -2)[keep.flatten()]
                found[i].append(self.net.value_logits(i, tokens, self.embeddings[i]))

            handles.append(parts.attention.register_forward_pre_hook(record, with_kwargs=True))
        try:
            with masked(self.model, planned_masks(plan, ids.device)) if plan else nullcontext():
                for row, keep in zip(ids.split(1), valid.split(1), strict=True):
                    self.model.model(input_ids=row, attention_mask=keep.long(), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return [torch.cat(layer) for layer in found]

    def _sites(self, value_logits: Sequence[Tensor] | None) -> list[list[Site]]:
        """Per layer: MLP, and unless attention stays whole, Q/K and V/O."""
        s, experts = self.shape, self.net.experts
        multiple, c = experts.width_multiple, s.head_dim
        sites = []
        for i in range(s.num_layers):
            wanted = partial(self._wanted, self.neuron_logits[i])
            layer = [Site(lambda o, f=wanted: f(o) / multiple, self._mlp_params, -(-s.mlp_size // multiple))]  # type: ignore[misc]
            if experts.attention != "none":
                qk, values = self.dim_logits[i][c:], self.dim_logits[i][:c] if value_logits is None else value_logits[i]
                order = qk.argsort(descending=True, stable=True)
                layer.append(Site(partial(self._wanted, qk), partial(self._qk_params, order), s.num_qk_choices))
                layer.append(Site(partial(self._wanted, values), partial(attention_params, s, 0), c))
            sites.append(layer)
        return sites

    def plan(
        self, active: float, value_logits: Sequence[Tensor] | None, common_multiple: int, tolerance: float
    ) -> Plan:
        """The plan whose active fraction is `active`, from logits on this network and V/O logits of tokens."""
        s, attention = self.shape, self.net.experts.attention
        sites = self._sites(value_logits)
        kept_whole = s.num_layers * attention_params(s, s.head_dim, s.head_dim) if attention == "none" else 0
        target, every = round(active * block_total(s)) - kept_whole, [site for layer in sites for site in layer]
        offset = common_offset(every, target)
        if common_multiple:
            width, units = self._one_width(sites, offset, target, common_multiple, round(tolerance * block_total(s)))
            per_layer = [[width, *units[i : i + 2]] for i in range(0, max(len(units), 1), 2)]
            per_layer = per_layer if units else per_layer * s.num_layers
        else:
            units = whole_units(every, offset, target)
            per_layer = [units[i : i + len(sites[0])] for i in range(0, len(units), len(sites[0]))]
            multiple = self.net.experts.width_multiple
            per_layer = [[min(n * multiple, s.mlp_size), *attention] for n, *attention in per_layer]
        layers = tuple(self._layer(i, *n) for i, n in enumerate(per_layer))
        return Plan(s, layers, notes={"expert_widths": [self._expert_widths(i, offset) for i in range(s.num_layers)]})

    def _expert_widths(self, i: int, offset: float) -> list[int]:
        """Neurons that training would keep in each expert of a layer; extraction gives them all one width."""
        s = self.net.sampling
        kept = keep_probability(self.neuron_logits[i] + offset, s.keep_bias, s.noise).sum(-1)
        return [int(n) for n in kept.round().tolist()]

    def _one_width(
        self, sites: Sequence[Sequence[Site]], offset: float, target: int, multiple: int, slack: int
    ) -> tuple[int, list[int]]:
        """One width for all layers near their mean at `offset`, and units of the attention sites, which take up the rest.

        The width is a multiple of `multiple`, or of its half, or of a quarter ..: of the most that meets `target` within
        `slack` parameters.
        """
        s = self.shape
        attention = [site for layer in sites for site in layer[1:]]
        wanted = sum(layer[0].clipped(offset) for layer in sites) / len(sites) * self.net.experts.width_multiple
        best = (target, s.mlp_size, [site.most for site in attention])
        while True:
            below = int(wanted // multiple) * multiple
            widths = {min(max(w, 1), s.mlp_size) for w in (below, below + multiple)}
            for width in sorted(widths, key=lambda w: abs(w - wanted)):
                left = target - s.num_layers * int(mlp_params(s, width))
                if attention and left < sum(site.params(1) for site in attention):
                    continue
                units = whole_units(attention, common_offset(attention, left), left) if attention else []
                off = abs(left - sum(site.params(n) for site, n in zip(attention, units, strict=True)))
                if off <= slack:
                    return width, units
                best = min(best, (off, width, units))
            if multiple == 1:
                return best[1:]
            multiple = multiple // 2

    def _layer(self, i: int, width: int, qk_units: int = 0, value_dims: int = 0) -> LayerPlan:
        s, experts = self.shape, self.net.experts
        ranks = self.neuron_logits[i].argsort(dim=-1, descending=True, stable=True)
        neurons = torch.zeros(ranks.shape, dtype=torch.bool).scatter_(1, ranks[:, :width].cpu(), True)
        # bfloat16 values: every carrier of the router can hold them exactly
        router = self.net.routers[i].weight.detach().bfloat16().float().cpu()
        c, dims = s.head_dim, self.dim_logits[i].cpu()
        qk = torch.ones(s.num_qk_choices, dtype=torch.bool)
        values, value_router, top_k = torch.ones(c, dtype=torch.bool), {}, c
        if experts.attention != "none":
            qk, top_k = _chosen(dims[c:].argsort(descending=True, stable=True), qk_units), value_dims
        if experts.attention == "static":
            values = _chosen(dims[:c].argsort(descending=True, stable=True), value_dims)
        if experts.attention == "dynamic" and top_k < c:
            state = self.net.value_router(i, self.embeddings[i]).state_dict()
            value_router = {name: t.detach().clone().cpu() for name, t in state.items()}
        return LayerPlan(neurons, router, qk, values, top_k, value_router)


def _chosen(order: Int[Tensor, " n"], count: int) -> Bool[Tensor, " n"]:
    """The first `count` of an order, as a mask."""
    return torch.zeros(len(order), dtype=torch.bool).scatter_(0, order[:count].cpu(), True)


@torch.no_grad()
def extract_plan(
    net: MaskNetwork,
    model: Any,
    active: float,
    calibration: tuple[Int[Tensor, "B S"], Valid],
    tolerance: float = BUDGET_TOLERANCE,
    common_multiple: int = 0,
) -> Plan:
    """The noise-free plan at `active` of the block parameters.

    Only per-token V/O choice needs the calibration text: its K follows the logits of real tokens, seen first on dense
    activations and then on those of the plan that these give. Raises UserError where whole units cannot meet the budget
    within `tolerance` (absolute, as a fraction of the block parameters). `common_multiple` above 0: all layers get experts of
    one width, a multiple of it as far as the budget allows.
    """
    extraction = Extraction(net, model)
    logits = None
    if net.experts.attention == "dynamic":
        ids, valid = calibration
        first = extraction.plan(active, extraction.value_logits(ids, valid, None), common_multiple, tolerance)
        logits = extraction.value_logits(ids, valid, first)
    plan = extraction.plan(active, logits, common_multiple, tolerance)
    if abs(plan.active_fraction() - active) > tolerance:
        raise UserError(
            f"the nearest plan has {plan.active_fraction():.4f} of the blocks active, asked were {active:.4f}; "
            f"widths are multiples of experts.width_multiple = {net.experts.width_multiple}: choose a smaller one"
        )
    return plan


def least_active(shape: ModelShape, width_multiple: int, attention: str) -> float:
    """The smallest active fraction that any plan can have: one unit at every site."""
    smallest_qk = 2 if shape.rotary_size == shape.head_dim else 1
    dims = (shape.head_dim, shape.head_dim) if attention == "none" else (smallest_qk, 1)
    layer = mlp_params(shape, min(width_multiple, shape.mlp_size)) + attention_params(shape, *dims)
    return float(layer * shape.num_layers) / block_total(shape)
