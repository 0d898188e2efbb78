"""Pruned attention: its masks in learning, its carved start, and what a plan records of it. Q/K dims are the same for all
tokens; V/O dims may be chosen by each (Sec. 3.3).

In a carved start every layer keeps the same fraction of dims, those with the most energy. The error at its own output says
little about what the model loses, so attention does not compete with the MLPs for parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.budget import attention_params
from tomoe.methods.tomoe.gumbel import gumbel_sigmoid, keep_probability
from tomoe.methods.tomoe.network import per_layer
from tomoe.methods.tomoe.projection import Projection, initial_logits
from tomoe.methods.tomoe.rotation import head_rotations
from tomoe.model.attention import rotate_heads
from tomoe.model.hooks import hooked, input_of
from tomoe.model.mlp import WeightMatrix
from tomoe.model.shape import ModelShape
from tomoe.model.structure import layer_parts
from tomoe.plans import Plan
from tomoe.plans.attention_masks import value_logits
from tomoe.plans.masking import masked, planned_masks
from tomoe.plans.partition.activations import real_tokens
from tomoe.plans.partition.allocation import Site
from tomoe.plans.partition.layouts import attention_units
from tomoe.recipe.conversion import AttentionSection, SamplingSection
from tomoe.seeds import derive_seed


class PrunedAttention(nn.Module):
    """The trainable part of the attention of all layers, in float32."""

    # these are nn.ModuleLists, typed as what they hold
    token_embeddings: Sequence[nn.Linear]
    dims: Sequence[Projection]  # the first C logits are V/O dims, the rest Q/K choices
    inputs: Tensor
    value_rotations: Tensor
    """[L, G, C, C], if the recipe rotates values; the model's own basis until the start sets another."""

    def __init__(
        self, shape: ModelShape, section: AttentionSection, sampling: SamplingSection, embedding_size: int, seed: int
    ):
        super().__init__()
        self.shape, self.section, self.sampling = shape, section, sampling
        num_layers = shape.num_layers
        dims = shape.head_dim + shape.num_qk_choices
        self.per_token = section.pruning == "per_token"
        self.token_embedding_size = embedding_size if self.per_token else 0
        self.token_embeddings = per_layer(num_layers, lambda: nn.Linear(shape.hidden_size, embedding_size, bias=False))
        self.dims = per_layer(num_layers, lambda: Projection(embedding_size, torch.zeros(dims)))
        if section.rotate_values:
            identity = torch.eye(shape.head_dim).repeat(num_layers, shape.num_kv_heads, 1, 1)
            self.register_buffer("value_rotations", identity)
        self.local = section.embedding == "local"
        if self.local and not self.per_token:
            generator = torch.Generator().manual_seed(derive_seed(seed, "attention embeddings"))
            self.register_buffer("inputs", torch.randn(num_layers, embedding_size, generator=generator))
        for embedding in self.token_embeddings:
            embedding.requires_grad_(self.per_token)

    def embeddings(self, of_experts: Float[Tensor, "sites N E"]) -> Float[Tensor, "L E"]:
        """Return the mean expert embedding of every attention site.

        In the `local` ablation nothing comes from the hypernetwork: the result is zero if every token adds its own
        embedding, else a fixed random vector per site (from zero a carved start would get no gradient, because its
        weights are zero too).
        """
        if self.local and not self.per_token:
            return self.inputs
        mean = of_experts[0::2].mean(1)
        return torch.zeros_like(mean) if self.local else mean

    def value_logits(self, i: int, x: Float[Tensor, "T D"], embedding: Float[Tensor, " E"]) -> Float[Tensor, "T C"]:
        """Return the logits of the V/O dims of each token (Eq. 5, Sec. 3.3)."""
        projection = self.dims[i]
        c = self.shape.head_dim
        out = projection.linear.weight[:c], projection.start[:c]
        return value_logits(x, self.token_embeddings[i].weight, embedding, projection.norm, *out)

    def value_router(self, i: int, embedding: Float[Tensor, " E"]) -> dict[str, Tensor]:
        """Return the tensors that give the same logits, as the plan keeps them: embedding and start become biases."""
        projection, c = self.dims[i], self.shape.head_dim
        state = {
            "project_in.weight": self.token_embeddings[i].weight,
            "project_in.bias": embedding,
            "norm.weight": projection.norm.weight,
            "norm.bias": projection.norm.bias,
            "project_out.weight": projection.linear.weight[:c],
            "project_out.bias": projection.start[:c],
        }
        return {name: t.detach().clone().cpu() for name, t in state.items()}

    def value_rotation(self, i: int) -> Float[Tensor, "G C C"] | None:
        """Return the basis that the V/O masks of layer i act in; None: the model's own."""
        return self.value_rotations[i] if self.section.rotate_values else None


class SampledAttention:
    """The masks of one layer in one step. The forward pass fills in what depends on tokens; the losses read it."""

    def __init__(
        self,
        net: PrunedAttention,
        index: int,
        embedding: Float[Tensor, " E"],
        seed: int,
        token_seed: int,
        valid: Bool[Tensor, " T"] | None = None,
    ):
        self.net, self.index, self.embedding, self.valid = net, index, embedding, valid
        self.value_rotation = net.value_rotation(index)
        s, c = net.sampling, net.shape.head_dim
        self.sample = partial(gumbel_sigmoid, temperature=s.temperature, keep_bias=s.keep_bias)
        self.token_seed = derive_seed(token_seed, "values")
        logits = net.dims[index](embedding)
        self.qk_mask: Float[Tensor, " C"] = net.shape.expand_qk(self.sample(logits[c:], seed=derive_seed(seed, "qk")))
        self.static_values: Float[Tensor, " C"] | None = None
        if not net.per_token:
            self.static_values = self.sample(logits[:c], seed=derive_seed(seed, "values"))
        self.value_masks: Float[Tensor, "T C"] | None = None  # of the real tokens, filled in by the forward pass

    def values(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "*T C"]:
        if self.static_values is not None:
            return self.static_values
        masks = self.sample(self.net.value_logits(self.index, x, self.embedding), seed=self.token_seed)
        self.value_masks = masks if self.valid is None else masks[self.valid]
        return masks


class AttentionRanking:
    """The importance of every layer's attention dims on calibration text, once it has run with the `hooks`."""

    def __init__(self, net: PrunedAttention, model: nn.Module):
        self.net, self.shape, self.parts = net, net.shape, layer_parts(model)
        self.importance: list[tuple[Tensor, Tensor]] = []  # of Q/K choices and of V/O dims
        self.rotations: list[Tensor] = []  # if values are rotated

    def hooks(self, i: int, valid: Bool[Tensor, " BS"] | None) -> Iterator[RemovableHandle]:
        """Record the outputs of the projections of layer i, and rank its dims before the last of them runs."""
        parts = self.parts[i]
        activations: dict[str, Tensor] = {}

        def record(module: WeightMatrix, name: str) -> RemovableHandle:
            def hook(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> None:
                # some families clip these in place
                activations[name] = y.flatten(0, -2).clone() if valid is None else real_tokens(y, valid)

            return module.register_forward_hook(hook)

        def rank(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            attended = real_tokens(input_of(args, kwargs), valid)
            self._rank(activations["q"], activations["k"], attended, parts.attention.o.weight)
            activations.clear()

        yield record(parts.attention.q, "q")
        yield record(parts.attention.k, "k")
        yield parts.attention.o.register_forward_pre_hook(rank, with_kwargs=True)

    def _rank(self, q: Tensor, k: Tensor, o: Tensor, weight: Tensor) -> None:
        if self.net.section.rotate_values:
            rotation = head_rotations(o, weight, self.shape.num_kv_heads, self.shape.head_dim)
            self.rotations.append(rotation)
            o, weight = rotate_heads(o, rotation), rotate_heads(weight, rotation)
        self.importance.append(attention_importance(q, k, o, weight, self.shape))

    def initialize_(self, active: float) -> tuple[int, bool]:
        """Start from the most important Q/K choices and V/O dims of every layer; return their parameters, and whether V/O dims
        are left out."""
        s = self.shape
        keep_bias = self.net.sampling.keep_bias
        if self.rotations:
            self.net.value_rotations.copy_(torch.stack(self.rotations))
        spent = 0
        choices, dims = attention_units(s, self.net.section, active)
        for i, (qk, values) in enumerate(self.importance):
            value_ranks, qk_ranks = (t.argsort(descending=True, stable=True).argsort() for t in (values, qk))
            spent += int(attention_params(s, len(s.qk_dims((qk_ranks < choices).cpu())), dims))
            starts = initial_logits(value_ranks, dims, keep_bias), initial_logits(qk_ranks, choices, keep_bias)
            self.net.dims[i].initialize_(torch.cat(starts))
        return spent, dims < s.head_dim


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


class ExtractedAttention:
    """The attention of all layers without noise: the widths that a plan can give it, and its fields in a plan."""

    def __init__(self, net: PrunedAttention, of_experts: Float[Tensor, "sites N E"]):
        self.net, self.shape = net, net.shape
        self.embeddings = net.embeddings(of_experts)
        self.dim_logits = [dims(self.embeddings[i]) for i, dims in enumerate(net.dims)]  # of V/O dims and Q/K choices
        # V/O logits of calibration tokens, if each token chooses
        self.token_logits: list[Float[Tensor, "t C"]] | None = None

    def value_logits(
        self, model: Any, ids: Int[Tensor, "B S"], valid: Bool[Tensor, "B S"], plan: Plan | None
    ) -> list[Float[Tensor, "t C"]]:
        """Return the V/O logits of real tokens in every layer, on dense activations or on those of a plan's masked model."""
        logits: list[list[Tensor]] = [[] for _ in range(self.shape.num_layers)]

        def hooks() -> Iterator[RemovableHandle]:
            for i, parts in enumerate(layer_parts(model)):

                def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], i: int = i) -> None:
                    tokens = input_of(args, kwargs).flatten(0, -2)[row_valid.flatten()]
                    logits[i].append(self.net.value_logits(i, tokens, self.embeddings[i]))

                yield parts.attention.module.register_forward_pre_hook(record, with_kwargs=True)

        with hooked(hooks()), masked(model, planned_masks(plan, ids.device)) if plan else nullcontext():
            for row, row_valid in zip(ids.split(1), valid.split(1), strict=True):
                model.base_model(input_ids=row, attention_mask=row_valid.long(), use_cache=False)
        return [torch.cat(layer) for layer in logits]

    def _expected_dims(self, logits: Float[Tensor, "*n size"], offset: float) -> float:
        """Return how many dims sampling keeps with `offset` added to every logit, averaged over tokens."""
        return float(keep_probability(logits + offset, self.net.sampling.keep_bias).sum(-1).mean())

    def _qk_params(self, order: Int[Tensor, " Q"], count: int) -> int:
        return int(attention_params(self.shape, len(self.shape.qk_dims(_first(order, count))), 0))

    def sites(self, i: int) -> list[Site]:
        """Return the widths of Q/K and V/O of layer i, which extraction chooses."""
        s, c = self.shape, self.shape.head_dim
        qk, values = self.dim_logits[i][c:], self.dim_logits[i][:c]
        if self.token_logits is not None:
            values = self.token_logits[i]
        order = qk.argsort(descending=True, stable=True)
        return [
            # the search for the common offset asks for the same few counts a hundred times
            Site(partial(self._expected_dims, qk), cache(partial(self._qk_params, order)), s.num_qk_choices),
            Site(partial(self._expected_dims, values), partial(attention_params, s, 0), c),
        ]

    def fields(self, i: int, qk_units: int, value_dims: int) -> dict[str, Any]:
        """Return the fields of a LayerPlan with the attention of layer i."""
        c = self.shape.head_dim
        dims = self.dim_logits[i].cpu()
        values = torch.ones(c, dtype=torch.bool)
        router: dict[str, Tensor] = {}
        if not self.net.per_token:
            values = _first(dims[:c].argsort(descending=True, stable=True), value_dims)
        elif value_dims < c:
            router = self.net.value_router(i, self.embeddings[i])
        rotation = self.net.value_rotation(i) if value_dims < c else None
        return {
            "qk_kept": _first(dims[c:].argsort(descending=True, stable=True), qk_units),
            "value_kept": values,
            "value_top_k": value_dims,
            "value_router": router,
            "value_rotation": None if rotation is None else rotation.detach().clone().cpu(),
        }


def _first(order: Int[Tensor, " n"], count: int) -> Bool[Tensor, " n"]:
    """Return the first `count` of an order as a mask."""
    return torch.zeros(len(order), dtype=torch.bool).scatter_(0, order[:count].cpu(), True)
