"""The carved start of fine-grained experts: which neurons all tokens use, which form an expert, and a linear router.

Per layer, on dense activations. Shared part: the neurons whose contributions a_f = |h_f| |down column f| have the most
energy, weighted by 1 / |residual|^2 of the token. Experts: clusters of one size of the other neurons by the cosine of their
contributions over tokens. Router: ridge regression with a bias from the MLP's input to the root of each expert's share of a
token's energy. Then in turn neurons move to the expert whose tokens need them most, and the router is fitted again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tomoe.budget import mlp_params
from tomoe.errors import UserError
from tomoe.model.shape import ModelShape
from tomoe.pruning.routing import bfloat16_values
from tomoe.recipe.conversion import FINE_MULTIPLE, MOST_USED, ExpertsSection

SHARED = -1
"""Number of the expert of neurons that every token uses."""
CLUSTER_STEPS, REASSIGNMENTS = 8, 2
CLUSTER_TOKENS, ERROR_TOKENS = 4096, 2048
"""Tokens that neurons are compared on, and that the error of a choice is measured on."""
PIECE_TOKENS = 4096
"""Tokens whose activations are held in float32 at once."""
ERROR_POINTS = 12
"""Numbers of experts per token at which the error is measured; between them it is interpolated."""
ROUTER_RIDGE = 1e-3
"""Relative to the mean of the diagonal of the inputs' covariance."""
SHARED_SLACK = 0.25
"""How far the shared part may be from the wanted one, as a share of a token's neurons, to get a rounder expert size."""
STORED_ZEROS = 0.02
"""Neurons of zeros that a stock form may hold, as a share of a layer's, if another layout needs no more than that."""


@dataclass(frozen=True)
class FineLayout:
    """How fine-grained experts divide the F neurons of a layer: shared + num_experts * expert_size = F."""

    num_experts: int
    expert_size: int
    shared: int
    top_k: int
    """Experts of a token if all layers use equally many."""

    @property
    def width(self) -> int:
        """Neurons of a token."""
        return self.shared + self.top_k * self.expert_size


def fine_layout(
    mlp_size: int, width: float, slack: float, experts: ExpertsSection, layers: int, fewest: int | None = None
) -> FineLayout:
    """Choose the layout that gives a token about `width` neurons.

    The expert size is a multiple of `experts.width_multiple`, or of its half, its quarter and so on: of the largest that
    leaves a shared part near `experts.shared`, and that meets `width` within `slack` neurons, in the mean over `layers` that
    may use different numbers of experts (1: all use equally many).
    With `fewest`, for a stock form: there may be so many experts or more, up to `experts.num_experts`, if only that meets the
    width, or if the form has to hold more than STORED_ZEROS of zeros otherwise; and fewer, if a token would use more than
    MOST_USED. Raises UserError if no layout does.
    """
    n, wanted = experts.num_experts, experts.shared * width
    most_used = n if fewest is None else MOST_USED

    def layouts(counts: range, multiple: int) -> list[FineLayout]:
        every = (_layouts(mlp_size, width, slack, experts, layers, multiple, count) for count in counts)
        return [layout for layout in itertools.chain.from_iterable(every) if layout.top_k <= most_used]

    def roundest(counts: range, most_zeros: float) -> FineLayout | None:
        multiple = experts.width_multiple
        while multiple:
            found = [layout for layout in layouts(counts, multiple) if stored_zeros(layout) <= most_zeros]
            if found:
                return min(found, key=lambda layout: abs(layout.shared - wanted))
            multiple //= 2
        return None

    if fewest is None:
        chosen = roundest(range(n, n + 1), math.inf)
    else:
        counts, few_zeros = range(n, fewest - 1, -1), STORED_ZEROS * mlp_size
        chosen = roundest(range(n, n + 1), few_zeros) or roundest(counts, few_zeros)
        for more in (counts, range(fewest - 1, MOST_USED - 1, -1)):
            if chosen is None:
                chosen = min(
                    layouts(more, 1),
                    key=lambda layout: (stored_zeros(layout), abs(layout.shared - wanted)),
                    default=None,
                )
    if chosen is not None:
        return chosen
    given_size = "" if not experts.expert_size else f" of {experts.expert_size} neurons"
    raise UserError(
        f"{n} fine-grained experts{given_size} cannot divide {mlp_size:,} neurons so that a token uses {width:,.0f} of them"
        f"{'' if math.isinf(slack) else f' (to {slack:,.1f} exactly)'}; "
        "change experts.num_experts, experts.expert_size or active"
    )


def _layouts(
    mlp_size: int, width: float, slack: float, experts: ExpertsSection, layers: int, multiple: int, n: int
) -> Iterator[FineLayout]:
    """Layouts with n experts of a multiple of neurons, or of the given size, that meet the width."""
    given, wanted = experts.expert_size > 0, experts.shared * width
    # more than is wanted only up to half of the layer: beyond, there is too little left to choose from
    most = max(wanted, mlp_size / 2)
    for size in [experts.expert_size] if given else range(multiple, mlp_size // n + 1, multiple):
        shared = mlp_size - n * size
        near = given or (abs(shared - wanted) <= SHARED_SLACK * width and shared <= most)
        all_experts = min(round(layers * (width - shared) / size), layers * n)
        met = abs(shared + all_experts / layers * size - width) <= slack
        if shared >= 0 and shared + size <= width and near and met:
            yield FineLayout(n, size, shared, min(max(1, round((width - shared) / size)), n))


def stored_zeros(layout: FineLayout) -> int:
    """Neurons of zeros with which a stock form fills up the experts of a layer, and its shared part to a multiple of them."""
    size = -(-layout.expert_size // FINE_MULTIPLE) * FINE_MULTIPLE
    return layout.num_experts * (size - layout.expert_size) + -layout.shared % size


def balanced_assignment(scores: Float[Tensor, "n N"], size: int) -> Int[Tensor, " n"]:
    """Assign each row to a column of high score, `size` rows to a column; those that lose most by another go first."""
    best = scores.topk(min(2, scores.shape[1]), dim=1).values
    order = (best[:, 0] - best[:, -1]).argsort(descending=True, stable=True).tolist()
    preferences = scores.argsort(dim=1, descending=True, stable=True).tolist()
    free, assigned = [size] * scores.shape[1], [0] * len(scores)
    for row in order:
        column = next(c for c in preferences[row] if free[c])
        assigned[row], free[column] = column, free[column] - 1
    return torch.tensor(assigned, device=scores.device)


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
    """Linear functions of x [T, D], with a bias, by least squares with a ridge; one factorization for many targets."""

    def __init__(self, x: Float[Tensor, "T D"]):
        self.mean = x.mean(0)
        self.x = x - self.mean
        gram = self.x.T @ self.x
        ridge = ROUTER_RIDGE * gram.diagonal().mean().clamp_min(1e-12)
        self.factor = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), device=x.device))

    def fit(self, y: Float[Tensor, "T N"]) -> tuple[Float[Tensor, "N D"], Float[Tensor, " N"]]:
        """Return weight and bias of a router, scaled so that its logits vary by 1 around their means.

        One size in all layers gives the temperature of learning one meaning. The weight holds bfloat16 values, and the bias
        belongs to these: inputs have dims with a large mean, which would turn rounding into a preference for some experts.
        """
        mean = y.mean(0)
        weight = torch.cholesky_solve(self.x.T @ (y - mean), self.factor).T
        scale = 1 / (self.x @ weight.T).std().clamp_min(1e-12)
        weight = bfloat16_values(scale * weight)
        return weight, scale * mean - weight @ self.mean


@dataclass(frozen=True)
class FineStart:
    """The carved start of one layer."""

    router_weight: Float[Tensor, "N D"]
    router_bias: Float[Tensor, " N"]
    expert_of_neuron: Int[Tensor, " F"]
    """The expert of each neuron, or SHARED."""
    loss: Float[Tensor, " N1"]
    """Relative squared error of the MLP's output, summed over tokens, with 0, 1, .. N experts per token (float64), convex."""


def carve_fine(
    x: Float[Tensor, "T D"],
    h: Float[Tensor, "T F"],
    weight: Float[Tensor, " T"],
    down: Float[Tensor, "D F"],
    layout: FineLayout,
    seed: int,
) -> FineStart:
    """Carve the experts of one layer. `weight` is 1 / |residual|^2 of a token; `h` may be of any dtype."""
    norms = down.norm(dim=0)
    # a piece at a time: of many tokens the activations in float32 are the largest matrix there is
    pieces = zip(h.split(PIECE_TOKENS), weight.split(PIECE_TOKENS), strict=True)
    energy = norms.square() * sum(w @ part.float().square() for part, w in pieces)
    order = energy.argsort(descending=True, stable=True)
    routed = order[layout.shared :].sort().values
    generator = torch.Generator(x.device).manual_seed(seed)
    some = torch.randperm(len(x), generator=generator, device=x.device)
    routed_energy = (h[:, routed] * norms[routed]).square_().mul_(weight[:, None])
    regression = RidgeRegression(x)
    assigned = balanced_clusters(
        F.normalize(routed_energy[some[:CLUSTER_TOKENS]].sqrt().T, dim=1), layout.num_experts, seed
    )
    for step in range(REASSIGNMENTS + 1):
        shares = routed_energy @ F.one_hot(assigned, layout.num_experts).to(x.dtype)
        router_weight, router_bias = regression.fit(F.normalize(shares.sqrt(), dim=1))
        logits = x @ router_weight.T + router_bias
        if step < REASSIGNMENTS:
            chosen = torch.zeros_like(logits).scatter_(1, logits.topk(layout.top_k, dim=1).indices, 1.0)
            assigned = balanced_assignment(routed_energy.T @ chosen, layout.expert_size)
    expert = torch.full((h.shape[1],), SHARED, device=x.device)
    expert[routed] = assigned
    tokens = some[:ERROR_TOKENS]
    loss = error_curve(logits[tokens], h[tokens].float() * weight[tokens, None].sqrt(), down, expert, layout)
    return FineStart(router_weight, router_bias, expert, loss * len(x) / len(tokens))


def error_curve(
    logits: Float[Tensor, "t N"],
    h: Float[Tensor, "t F"],
    down: Float[Tensor, "D F"],
    expert: Int[Tensor, " F"],
    layout: FineLayout,
) -> Float[Tensor, " N1"]:
    """Return the squared error of h down^T, summed over tokens, with 0, 1, .. N experts a token, as a convex function.

    It is measured at some numbers of experts; between them it falls by equal factors.
    """
    n = layout.num_experts
    rank = logits.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    # shared neurons (-1) have a rank that is always chosen
    rank = F.pad(rank, (0, 1), value=-1)[:, expert]
    points = sorted({round(n * i / ERROR_POINTS) for i in range(ERROR_POINTS)})
    losses = [max(float((((rank >= k) * h) @ down.T).square().sum()), 1e-30) for k in points]
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


def fine_params(shape: ModelShape, layout: FineLayout) -> list[int]:
    """Return the MLP parameters of a token with 0, 1, .. N experts."""
    widths = [layout.shared + k * layout.expert_size for k in range(layout.num_experts + 1)]
    return [int(mlp_params(shape, width)) for width in widths]
