"""Experts without overlap: from a method's groups of neurons to a plan that meets the budget.

A method says which neurons all tokens share and which form an expert, and may bring a router. Here the router is fitted where it
brings none, the error of every number of experts is measured, the budget is divided among the layers, and the plan is written.

Shapes, and the letters at the ends of names: T tokens, t some of them, D hidden size, F neurons, n routed ones, N experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from tomoe.budget import attention_params, decoder_params, mlp_params, router_params
from tomoe.model.compute_dtype import rounded_products
from tomoe.model.shape import ModelShape
from tomoe.plans.layer import LayerPlan, dense_attention
from tomoe.plans.partition.activations import Activations, visit_layers
from tomoe.plans.partition.allocation import allocate, spread_evenly
from tomoe.plans.partition.layouts import FineLayout, Layout, check_tolerance
from tomoe.plans.partition.routers import fit_router
from tomoe.plans.plan import Plan
from tomoe.plans.routing import bfloat16_values
from tomoe.progress import StageCallback, no_stage_progress
from tomoe.seeds import derive_seed

SHARED = -1  # number of the expert of neurons that every token uses
COMPARED_TOKENS = 4096  # tokens that a method compares neurons on
ERROR_TOKENS = 2048  # tokens that the error of a choice is measured on
FLOAT32 = 4  # bytes
ERROR_POINTS = 12  # numbers of experts per token at which the error is measured; between them it is interpolated


@dataclass(frozen=True)
class Room:
    """The space for the experts of one layer: shared + num_experts * expert_size neurons are all of the layer's."""

    layer: int
    """The number of the layer among those that are converted, from 0."""
    num_layers: int
    num_experts: int
    expert_size: int
    """Neurons of an expert."""
    shared: int
    """Neurons that every token uses beside its experts."""
    top_k: int
    """Experts of a token, if all layers used equally many; the error decides how many each layer gets."""
    router_bias: bool
    """Whether the target has a place for a bias of the router."""
    seed: int
    """For random numbers of this layer alone."""


@dataclass(frozen=True)
class Experts:
    """The groups that a method makes of the F neurons of a layer."""

    expert_of_neuron: Int[Tensor, " F"]
    """The expert of each neuron, from 0, or SHARED (-1): `Room` says how many neurons each has."""
    router: tuple[Float[Tensor, "N D"], Float[Tensor, " N"]] | None = None
    """Weight and bias of a router whose largest logits choose the experts of a token; None: fitted by least squares."""

    def check(self, room: Room) -> None:
        """Raise ValueError if the groups do not fit the room."""
        sizes = torch.bincount(self.expert_of_neuron + 1, minlength=room.num_experts + 1).tolist()
        wanted = [room.shared, *[room.expert_size] * room.num_experts]
        if sizes != wanted:
            raise ValueError(
                f"layer {room.layer} has {sizes[0]} shared neurons and experts of {sorted(set(sizes[1:]))}, but there is room "
                f"for {room.shared} and {room.num_experts} experts of {room.expert_size}"
            )


MakeExperts = Callable[[Activations, Room], Experts]


@dataclass(frozen=True)
class FineLayer:
    """The experts of one layer, before the number of experts per token is known."""

    router_weight: Float[Tensor, "N D"]
    router_bias: Float[Tensor, " N"]
    expert_of_neuron: Int[Tensor, " F"]  # the expert of each neuron, or SHARED
    loss: Float[Tensor, " N1"]
    """Relative squared error of the MLP's output, summed over tokens, with 0, 1, .. N experts per token (float64), convex."""

    @classmethod
    def empty(cls, shape: ModelShape, layout: FineLayout, device: torch.device) -> FineLayer:
        """Make tensors of the right shapes, without values."""
        n = layout.num_experts
        router = torch.empty(n, shape.hidden_size, device=device), torch.empty(n, device=device)
        expert = torch.empty(shape.mlp_size, dtype=torch.long, device=device)
        return cls(*router, expert, torch.empty(n + 1, dtype=torch.float64))


def room_of(layout: FineLayout, layer: int, num_layers: int, seed: int) -> Room:
    """Return the room of one layer; `seed` is the recipe's."""
    return Room(
        layer=layer,
        num_layers=num_layers,
        num_experts=layout.num_experts,
        expert_size=layout.expert_size,
        shared=layout.shared,
        top_k=layout.top_k,
        router_bias=layout.router_bias,
        seed=derive_seed(seed, "clusters", layer),
    )


def fine_layer(make: MakeExperts, seen: Activations, room: Room) -> FineLayer:
    """Make the experts of a layer by `make`, with their router and their errors."""
    with rounded_products(seen.h_TF.dtype):
        made = make(seen, room)
        made.check(room)
        expert_F = made.expert_of_neuron
        router_ND, bias_N = made.router or fit_router(seen, expert_F, room.num_experts, room.router_bias)
        generator = torch.Generator(seen.x_TD.device).manual_seed(room.seed)
        few_t = torch.randperm(len(seen.x_TD), generator=generator, device=seen.x_TD.device)[:ERROR_TOKENS]
        logits_TN = seen.x_TD @ router_ND.T + bias_N
        routed_n = (expert_F != SHARED).nonzero().squeeze(1)
        h_tn = seen.h_TF[few_t][:, routed_n].float() * seen.weight_T[few_t, None].sqrt()
        loss_N1 = error_curve(logits_TN[few_t], h_tn, seen.down_DF[:, routed_n], expert_F[routed_n])
        return FineLayer(router_ND, bias_N, expert_F, loss_N1 * len(seen.x_TD) / len(few_t))


def units_of_layers(
    losses: Sequence[Float[Tensor, " u"]], layout: Layout, shape: ModelShape, left: float
) -> list[int] | None:
    """Allocate units (experts per token, or width steps) to layers so that all MLPs have `left` parameters.

    None if the layout makes all layers alike. Otherwise layers that the lowest total error would give every unit stay dense, and
    the others get equally many, up to one: a layer's own error is not what the model loses (docs/lab/log.md). In a layout for a
    GPU no layer stays dense.
    """
    if layout.uniform:
        return None
    params = [int(mlp_params(shape, width)) for width in layout.widths(shape.mlp_size)]
    # one more than a dense layer has: then none is left out
    most = len(params) - 1 if layout.allows_dense else len(params)
    return spread_evenly(allocate(losses, params, left), most)


def budget_of_mlps(shape: ModelShape, active: float, num_experts: int) -> float:
    """Count the parameters of all MLPs that may be active beside dense attention and routers of so many experts per layer."""
    attention = int(attention_params(shape, shape.head_dim, shape.head_dim))
    beside = shape.num_layers * (attention + router_params(shape, num_experts)) + shape.other_params
    return active * decoder_params(shape) - beside


@torch.no_grad()
def plan_fine(
    make: MakeExperts,
    model: PreTrainedModel,
    shape: ModelShape,
    layout: FineLayout,
    text: tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"]],
    active: float,
    tolerance: float,
    seed: int,
    progress: StageCallback = no_stage_progress,
) -> Plan:
    """Plan the experts that `make` gives each layer, with the fraction `active` of the decoder parameters.

    `text` are calibration tokens and the mask of real ones. Raises UserError if no number of experts meets the budget within
    `tolerance` (absolute, a fraction of the decoder parameters).
    """

    def visit(i: int, seen: Activations) -> FineLayer:
        return fine_layer(make, seen, room_of(layout, i, shape.num_layers, seed))

    layers = visit_layers(model, *text, visit, lambda device: FineLayer.empty(shape, layout, device), progress)
    left = budget_of_mlps(shape, active, layout.num_experts)
    units = units_of_layers([layer.loss for layer in layers], layout, shape, left)
    top_ks = layout.top_ks(shape.num_layers) if units is None else units
    plan = Plan(shape, tuple(planned(shape, layer, top_k) for layer, top_k in zip(layers, top_ks, strict=True)))
    check_tolerance(plan.active_fraction(), active, tolerance, layout)
    return plan


def planned(shape: ModelShape, layer: FineLayer, top_k: int) -> LayerPlan:
    """Plan a layer in which a token uses `top_k` experts; its attention stays dense."""
    numbers = torch.arange(len(layer.router_weight), device=layer.expert_of_neuron.device)
    return LayerPlan(
        expert_masks=(numbers[:, None] == layer.expert_of_neuron).cpu(),
        shared_mask=(layer.expert_of_neuron == SHARED).cpu(),
        router_weight=bfloat16_values(layer.router_weight).cpu(),
        router_bias=layer.router_bias.float().cpu(),
        top_k=top_k,
        **dense_attention(shape),
    )


def fine_bytes(shape: ModelShape, layout: FineLayout, dtype: torch.dtype, tokens: int) -> int:
    """Count the bytes that grouping one layer's neurons holds for so many calibration tokens, with activations of `dtype`."""
    own, hidden, size, routed = dtype.itemsize, shape.hidden_size, shape.mlp_size, shape.mlp_size - layout.shared
    # the layer's input, the input and output of the MLP; before it is visited, three matrices of activations
    rest, running = 3 * hidden * own, 3 * size * own
    # its activations, its input in float32, the energy of routed neurons, the router's regression
    held = (
        size * own + (FLOAT32 * hidden if own < FLOAT32 else 0) + FLOAT32 * (routed + hidden + 3 * layout.num_experts)
    )
    # the tokens that neurons are compared on, three times
    beside = 3 * FLOAT32 * routed * min(tokens, COMPARED_TOKENS)
    return tokens * rest + max(tokens * running, tokens * held + beside)


def fine_operations(shape: ModelShape, layout: FineLayout, tokens: int) -> float:
    """Count operations of one layer's router and of its error with different numbers of experts, except the layer's own pass."""
    hidden, routed, experts = shape.hidden_size, shape.mlp_size - layout.shared, layout.num_experts
    # an exact factor counts twice
    router = 2 * tokens * hidden**2 + 2 * hidden**3 / 3 + 2 * tokens * experts * (routed + 2 * hidden)
    return router + ERROR_POINTS * 2 * min(tokens, ERROR_TOKENS) * routed * hidden


def error_curve(
    logits_tN: Float[Tensor, "t N"],
    h_tn: Float[Tensor, "t n"],
    down_Dn: Float[Tensor, "D n"],
    expert_n: Int[Tensor, " n"],
) -> Float[Tensor, " N1"]:
    """Return the squared error of h down^T, summed over tokens, with 0, 1, .. N experts per token, as a convex function.

    Shared neurons cause none. It is measured at some numbers of experts; between them it falls by equal factors.
    """
    n = logits_tN.shape[1]
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
