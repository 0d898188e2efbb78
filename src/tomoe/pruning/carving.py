"""The carved start: routers, neuron sets and widths from calibration tokens alone, with the budget met at step 0.

Every layer is ranked once, on dense activations. Router: spherical k-means of the MLP's inputs, so a router row is a
centroid and needs no bias. Experts: backward elimination, which drops one neuron after another, always the one that adds
least to the squared error of the MLP's output on the tokens of the expert, correlations between neurons included. Widths:
the same error, relative to the residual stream, at equal marginal cost per parameter across all layers.
Attention, if it is pruned at all, keeps the same fraction of dims in every layer, those with the most energy: the error at
its own output says little about what the model loses, so it does not compete with the MLPs for parameters.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe import distributed
from tomoe.budget import attention_params, decoder_params, mlp_params
from tomoe.model.heads import rotate_heads
from tomoe.model.hooks import hooked, input_of
from tomoe.model.shape import ModelShape
from tomoe.model.structure import decoder_layers, layer_parts, run_model
from tomoe.progress import StageCallback, no_stage_progress
from tomoe.pruning.fine_carving import carve_fine
from tomoe.pruning.gumbel import keep_logit, keep_probability
from tomoe.pruning.layouts import FineLayout, attention_units
from tomoe.pruning.mask_network import MaskNetwork, Projection
from tomoe.pruning.rotation import head_rotations
from tomoe.seeds import derive_seed

KMEANS_STEPS = 20
ROUTER_CONFIDENCE = 0.9
"""Mean probability of the expert that a token chooses: high enough that noise seldom sends it elsewhere."""
LOGIT_SCALE = 4.0
"""Mask logits per standard deviation of the rank: decided at both ends, open in the middle."""


@dataclass(frozen=True)
class Ranking:
    """The dims of one site in order of importance, and what it costs to keep only the first of them."""

    ranks: Int[Tensor, "n size"]
    """0 is dropped last. Of fine-grained experts: the expert of each neuron [1, F], of which a token uses as many as there
    are units."""
    loss: Float[Tensor, " n1"]
    """Relative squared error, summed, with 0, 1, .. units kept (float64); units as in `params`."""
    params: list[int]
    """Parameters with 0, 1, .. units kept."""


def spherical_kmeans(x: Float[Tensor, "T D"], num_clusters: int, seed: int) -> Float[Tensor, "N D"]:
    """Cluster by cosine from a k-means++ start; returns unit centroids. A cluster without tokens keeps its centroid."""
    generator = torch.Generator(x.device).manual_seed(seed)
    x = F.normalize(x.float(), dim=-1)
    centroids = x[torch.randint(len(x), (1,), generator=generator, device=x.device)]
    while len(centroids) < num_clusters:
        distance = (1 - x @ centroids.T).amin(1).clamp_min(1e-9)
        centroids = torch.cat([centroids, x[torch.multinomial(distance, 1, generator=generator)]])
    for _ in range(KMEANS_STEPS):
        members = F.one_hot((x @ centroids.T).argmax(-1), num_clusters).to(x.dtype)
        sums = members.T @ x
        centroids = torch.where(members.sum(0)[:, None] > 0, F.normalize(sums, dim=-1), centroids)
    return centroids


def confident_scale(logits: Float[Tensor, "T N"]) -> float:
    """Find the factor that makes the mean largest probability ROUTER_CONFIDENCE; noise-free decisions stay the same.

    Cosines differ by hundredths, Gumbel noise by ones: without the factor, sampling would route at random.
    """
    low, high = 0.0, 1e4
    for _ in range(50):
        middle = (low + high) / 2
        confidence = float((middle * logits).softmax(-1).amax(-1).mean())
        low, high = (middle, high) if confidence < ROUTER_CONFIDENCE else (low, middle)
    return high


def backward_elimination(error: Float[Tensor, "F F"]) -> tuple[Int[Tensor, " F"], Float[Tensor, " F1"]]:
    """Order dims whose joint loss is the quadratic form s^T `error` s of the dropped set s.

    Returns ranks (0 is dropped last) and the loss with 0, 1, .. F dims kept.
    """
    size = len(error)
    marginal = error.diagonal().clone()
    ranks, loss = torch.zeros(size, dtype=torch.long, device=error.device), error.new_zeros(size + 1)
    for kept in range(size - 1, -1, -1):
        dropped = marginal.argmin()
        ranks[dropped] = kept
        loss[kept] = marginal[dropped]
        marginal.add_(error[dropped], alpha=2)
        marginal[dropped] = torch.inf
    return ranks, loss.flip(0).cumsum(0).flip(0)


def carve_mlp(
    h: Float[Tensor, "T F"],
    expert_ids: Int[Tensor, " T"],
    weight: Float[Tensor, " T"],
    down: Float[Tensor, "D F"],
    num_experts: int,
    units: Sequence[int],
    params: list[int],
) -> Ranking:
    """Rank the neurons of every expert. `weight` is 1 / |residual|^2 of a token, which makes losses of layers comparable."""
    down_gram = down.T @ down
    ranks, total = [], torch.zeros(len(units), dtype=torch.float64)
    for n in range(num_experts):
        expert_h = h[expert_ids == n] * weight[expert_ids == n].sqrt()[:, None]
        # in place and freed before the next expert: with 11,008 neurons such a matrix takes half a GB
        expert_ranks, loss = backward_elimination((expert_h.T @ expert_h).mul_(down_gram).div_(len(h)))
        ranks.append(expert_ranks)
        total = total + loss[list(units)].double().cpu()
    return Ranking(torch.stack(ranks), total, params)


def allocate(sites: Sequence[Ranking], budget: float) -> list[int]:
    """Return units per site: each unit goes to the site that saves most error per parameter, until the budget is spent."""
    units, losses = [1] * len(sites), [site.loss.tolist() for site in sites]
    spent = sum(site.params[1] for site in sites)

    def gain(i: int) -> float:
        n, loss, params = units[i], losses[i], sites[i].params
        return -max(0.0, loss[n] - loss[n + 1]) / (params[n + 1] - params[n])

    heap = [(gain(i), i) for i, site in enumerate(sites) if len(site.params) > 2]
    heapq.heapify(heap)
    while heap:
        _, i = heapq.heappop(heap)
        added = sites[i].params[units[i] + 1] - sites[i].params[units[i]]
        if spent + added > budget + added / 2:
            continue
        units[i], spent = units[i] + 1, spent + added
        if units[i] + 1 < len(sites[i].params):
            heapq.heappush(heap, (gain(i), i))
    return units


def evened(units: Sequence[int], most: int) -> list[int]:
    """Return as many units in all, equally many, up to one, for the sites that have fewer than `most`; the first get it."""
    others = [i for i, n in enumerate(units) if n < most]
    if not others:
        return list(units)
    each, left = divmod(sum(units[i] for i in others), len(others))
    even = dict(zip(others, [each + 1] * left + [each] * (len(others) - left), strict=True))
    return [even.get(i, n) for i, n in enumerate(units)]


def start_logits(ranks: Int[Tensor, "*n size"], width: int, keep_bias: float) -> Float[Tensor, "*n size"]:
    """Return mask logits: LOGIT_SCALE x normal score of the rank, shifted so that sampling keeps `width` dims on average."""
    size = ranks.shape[-1]
    quantile = 1 - (torch.arange(size, dtype=torch.float64) + 0.5) / size
    scores = LOGIT_SCALE * torch.special.ndtri(quantile)
    whole = keep_logit(torch.tensor(1 - 1e-6, dtype=torch.float64), keep_bias)
    low, high = -200.0, 200.0
    for _ in range(80):
        middle = (low + high) / 2
        kept = float(keep_probability(scores + middle, keep_bias).sum())
        low, high = (middle, high) if kept < width else (low, middle)
    if width >= size:
        return torch.full(ranks.shape, float(whole))
    return (scores + high).float()[ranks.cpu()]


class _Carving:
    """One pass over the calibration text: every layer is ranked as soon as it has run, then its activations are freed."""

    def __init__(self, net: MaskNetwork, model: nn.Module, seed: int, progress: StageCallback):
        self.net, self.shape, self.layout, self.seed, self.progress = net, net.shape, net.layout, seed, progress
        self.parts, self.layers = layer_parts(model), decoder_layers(model)
        # [N, D], and for fine-grained experts [N, D + 1] with the bias in the last column
        self.routers: list[Tensor] = []
        self.mlps: list[Ranking] = []
        self.attention: list[tuple[Tensor, Tensor]] = []
        # of every layer, if values are rotated
        self.rotations: list[Tensor] = []

    @torch.no_grad()
    def run(self, model: Any, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> None:
        with hooked(handle for i in range(self.shape.num_layers) for handle in self._hooks(i, mask)):
            run_model(model, ids, mask)
        for i, (router, mlp) in enumerate(zip(self.routers, self.mlps, strict=True)):
            distributed.broadcast_((router, mlp.ranks, mlp.loss), self._owner(i))

    def _owner(self, i: int) -> int:
        """Return the process that ranks layer i: all of them run the text, but ranking takes long, so they divide it."""
        return i % distributed.world_size()

    def _hooks(self, i: int, mask: Bool[Tensor, "B S"]) -> Iterator[RemovableHandle]:
        """Record what the parts of layer i read and write, and rank its dims as soon as it has run."""
        parts, valid = self.parts[i], mask.flatten()
        activations: dict[str, Tensor] = {}

        def record_input(module: nn.Module, name: str) -> RemovableHandle:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                activations[name] = input_of(args, kwargs).flatten(0, -2)[valid]

            return module.register_forward_pre_hook(hook, with_kwargs=True)

        def record_output(module: nn.Module, name: str) -> RemovableHandle:
            def hook(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> None:
                activations[name] = y.flatten(0, -2)[valid]

            return module.register_forward_hook(hook)

        def carve(*_: Any) -> None:
            x, residual = activations["x"].float(), activations["residual"].float()
            q, k, o = (activations[name] for name in ("q", "k", "o"))
            self._carve_mlp(i, x, activations["h"], residual)
            self._rank_attention(q, k, o, parts.o.weight)
            activations.clear()
            self.progress(i + 1, self.shape.num_layers)

        yield record_input(self.layers[i], "residual")
        yield record_input(parts.mlp, "x")
        yield record_input(parts.down, "h")
        yield record_output(parts.q, "q")
        yield record_output(parts.k, "k")
        yield record_input(parts.o, "o")
        # the MLP is the last part of a layer; an offloaded layer has no weights any more after it has run
        yield parts.mlp.register_forward_hook(carve)

    def _rank_attention(self, q: Tensor, k: Tensor, o: Tensor, weight: Tensor) -> None:
        if self.net.rotates_values:
            rotation = head_rotations(o, weight, self.shape.num_kv_heads, self.shape.head_dim)
            self.rotations.append(rotation)
            o, weight = rotate_heads(o, rotation), rotate_heads(weight, rotation)
        self.attention.append(attention_importance(q, k, o, weight, self.shape))

    def _carve_mlp(self, i: int, x: Tensor, h: Tensor, residual: Tensor) -> None:
        s, layout = self.shape, self.layout
        n, widths, fine = layout.num_experts, layout.widths(s.mlp_size), isinstance(layout, FineLayout)
        params = [int(mlp_params(s, width)) for width in widths]
        # empty tensors, which the process that ranks the layer fills in
        if self._owner(i) != distributed.rank():
            self.routers.append(x.new_empty(n, s.hidden_size + fine))
            ranks = torch.empty(1 if fine else n, s.mlp_size, dtype=torch.long, device=x.device)
            self.mlps.append(Ranking(ranks, torch.empty(len(params), dtype=torch.float64), params))
            return
        weight = 1 / residual.square().sum(-1).clamp_min(1e-6)
        down = self.parts[i].down.weight.float()
        if isinstance(layout, FineLayout):
            start = carve_fine(x, h, weight, down, layout, derive_seed(self.seed, "clusters", i))
            self.routers.append(torch.cat([start.router_weight, start.router_bias[:, None]], 1))
            self.mlps.append(Ranking(start.expert_of_neuron[None], start.loss, params))
            return
        router = spherical_kmeans(x, n, derive_seed(self.seed, "k-means", i))
        logits = x @ router.T
        self.routers.append(router * confident_scale(logits))
        self.mlps.append(carve_mlp(h.float(), logits.argmax(-1), weight, down, n, widths, params))


def attention_importance(
    q: Float[Tensor, "t HC"],
    k: Float[Tensor, "t GC"],
    o: Float[Tensor, "t HC"],
    weight: Float[Tensor, "D HC"],
    s: ModelShape,
) -> tuple[Float[Tensor, " Q"], Float[Tensor, " C"]]:
    """Return the importance of Q/K choices and of V/O dims, from q, k and the input `o` of the output projection.

    A Q/K choice has the root of the sum over heads of E|q|^2 E|k|^2 of its dims, a V/O dim the root of the sum over heads
    of E(o^2) |column|^2 of the output projection. (RoPE turns a pair without changing its length, so q and k are those
    before it.)
    """
    q_energy, k_energy, o_energy = (t.float().square().mean(0).view(-1, s.head_dim) for t in (q, k, o))
    pairs = s.rotary_size // 2

    def choices(energy: Float[Tensor, "h C"]) -> Float[Tensor, "h Q"]:
        return torch.cat([energy[:, :pairs] + energy[:, pairs : 2 * pairs], energy[:, 2 * pairs :]], 1)

    groups = s.num_heads // s.num_kv_heads
    qk = (choices(q_energy) * choices(k_energy).repeat_interleave(groups, 0)).sum(0).sqrt()
    columns = weight.float().square().sum(0).view_as(o_energy)
    return qk, (o_energy * columns).sum(0).sqrt()


@torch.no_grad()
def carve_(
    net: MaskNetwork,
    model: Any,
    ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    active: float,
    seed: int,
    progress: StageCallback = no_stage_progress,
    allocation: Literal["equal", "by_error"] = "equal",
) -> None:
    """Give `net` a carved start: its noise-free plan meets the active fraction `active`, and so does sampling on average.

    A uniform layout makes all layers exactly equally wide; otherwise `allocation` decides.
    """
    s, layout, pruned = net.shape, net.layout, net.attention.pruning != "off"
    choices, dims = attention_units(s, net.attention, active)
    carving = _Carving(net, model, seed, progress)
    carving.run(model, ids, mask)
    if net.rotates_values:
        net.value_rotations.copy_(torch.stack(carving.rotations))
    spent = 0
    for i, (qk, values) in enumerate(carving.attention):
        order = qk.argsort(descending=True, stable=True)
        chosen = torch.zeros(len(qk), dtype=torch.bool).scatter_(0, order[:choices].cpu(), True)
        spent += int(attention_params(s, len(s.qk_dims(chosen)), dims))
        if pruned:
            starts = [start_logits(_ranks(t), n, net.sampling.keep_bias) for t, n in ((values, dims), (qk, choices))]
            _set_start_(net.dims[i], torch.cat(starts))
    left = active * decoder_params(s) - spent
    units = [] if layout.uniform else allocate(carving.mlps, left)
    if allocation == "equal":
        units = evened(units, len(carving.mlps[0].params) - 1)
    if isinstance(layout, FineLayout):
        _set_fine_start_(net, carving, units or layout.top_ks(s.num_layers))
        return
    if layout.uniform:
        widths = [max(1, round(left / (s.num_layers * mlp_params(s, 1))))] * s.num_layers
    else:
        widths = [n * layout.width_multiple for n in units]
    for i, (router, mlp) in enumerate(zip(carving.routers, carving.mlps, strict=True)):
        width = min(widths[i], s.mlp_size)
        net.routers[i].weight.copy_(router)
        _set_start_(net.neurons[i], start_logits(mlp.ranks, width, net.sampling.keep_bias))


def _set_fine_start_(net: MaskNetwork, carving: _Carving, top_ks: Sequence[int]) -> None:
    for i, (router, mlp) in enumerate(zip(carving.routers, carving.mlps, strict=True)):
        net.routers[i].weight.copy_(router[:, :-1])
        net.routers[i].bias.copy_(router[:, -1])  # type: ignore[union-attr]
        net.expert_of_neuron[i] = mlp.ranks[0]
        net.experts_per_token[i] = top_ks[i]


def _ranks(importance: Float[Tensor, " size"]) -> Int[Tensor, " size"]:
    return importance.argsort(descending=True, stable=True).argsort()


def _set_start_(projection: Projection, start: Float[Tensor, "*n size"]) -> None:
    """Set the start; the learned difference to it is zero, so that step 0 is the carved plan itself."""
    projection.start.copy_(start)
    projection.linear.weight.zero_()
