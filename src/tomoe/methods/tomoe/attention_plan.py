"""Pruned attention without noise: the widths that a plan can give it, and what it records of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.budget import attention_params
from tomoe.methods.tomoe.attention import PrunedAttention
from tomoe.methods.tomoe.gumbel import keep_probability
from tomoe.model.hooks import hooked, input_of
from tomoe.model.structure import layer_parts
from tomoe.plans import Plan
from tomoe.plans.masking import masked, planned_masks
from tomoe.plans.partition.allocation import Site


class ExtractedAttention:
    """The attention of all layers, as extraction needs it."""

    def __init__(self, net: PrunedAttention, of_experts: Float[Tensor, "sites N E"]):
        self.net, self.shape = net, net.shape
        self.embeddings = net.embeddings(of_experts)
        self.dim_logits = [dims(self.embeddings[i]) for i, dims in enumerate(net.dims)]  # of V/O dims and Q/K choices
        # V/O logits of calibration tokens, if each token chooses
        self.token_logits: list[Float[Tensor, "t C"]] | None = None

    def value_logits(
        self, model: Any, ids: Int[Tensor, "B S"], valid: Bool[Tensor, "B S"], plan: Plan | None
    ) -> list[Float[Tensor, "t C"]]:
        """The V/O logits of real tokens in every layer, on dense activations, or on those of a plan's masked model."""
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
        """Return how many dims sampling keeps with `offset` added to every logit, the mean over tokens."""
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
        """The fields of a LayerPlan that hold the attention of layer i."""
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
