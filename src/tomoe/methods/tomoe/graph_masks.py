"""The masked student as torch.compile takes it: one graph of a decoder layer serves all layers.

The hooks of `masking.masked` are functions of each layer's own, and a graph is made for the functions that it meets. Here the
modules of a layer are of a class that masks, and read what differs from layer to layer from one object, `LayerTensors`. They
compute what the hooks compute, with the same noise, drawn before.

What torch.compile traces has no shapes in its signature. T tokens, N experts, F neurons, C dims of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tomoe.methods.tomoe.attention import SampledAttention
from tomoe.methods.tomoe.gumbel import sigmoid_sample, softmax_sample, uniform_noise
from tomoe.methods.tomoe.overlapping import SampledOverlapping
from tomoe.methods.tomoe.sampling import SampledLayerMasks
from tomoe.model.attention import rotate_heads
from tomoe.model.hooks import input_of
from tomoe.model.structure import LayerParts, layer_parts
from tomoe.plans.attention_masks import times_heads, value_logits
from tomoe.plans.masking import times
from tomoe.plans.routing import Routing


class LayerTensors:
    """What masks one layer in one step, and what it chose."""

    def __init__(self, sampled: SampledLayerMasks, experts: SampledOverlapping, tokens: int):
        self.sampled, self.temperature = sampled, experts.temperature
        self.router, self.neuron_masks = experts.router.weight, experts.neuron_masks
        self.noise = uniform_noise((tokens, len(self.router)), self.router.device, experts.seed)
        # [T, N] and [T, F] of the last pass
        self.assignment: Tensor | None = None
        self.probs: Tensor | None = None
        self.neurons: Tensor | None = None
        self.attention = None if sampled.attention is None else AttentionTensors(sampled.attention, tokens)

    def choose_(self, hidden: Tensor) -> None:
        x = hidden.flatten(0, -2)
        logits = F.linear(x.float(), self.router)
        self.assignment, self.probs = softmax_sample(logits, self.noise, self.temperature)
        self.neurons = self.assignment @ self.neuron_masks

    def cut(self, hidden: Tensor) -> Tensor:
        """The neurons [.., F] of the MLP, masked."""
        neurons = self.neurons
        assert neurons is not None
        self.neurons = None  # it is not needed until the next pass, and takes 4 bytes a neuron and token
        return times(hidden, neurons)

    def settle_(self) -> None:
        """Tell the losses what the tokens chose."""
        assert self.assignment is not None
        assert self.probs is not None
        self.sampled.routing = Routing(self.assignment, self.probs).select(self.sampled.valid)
        if self.attention is not None:
            self.attention.settle_()


class AttentionTensors:
    """What masks the attention of one layer in one step, and what it chose."""

    def __init__(self, sampled: SampledAttention, tokens: int):
        net, index = sampled.net, sampled.index
        self.sampled, self.embedding = sampled, sampled.embedding
        self.temperature, self.keep_bias = net.sampling.temperature, net.sampling.keep_bias
        self.qk, self.rotation = sampled.qk_mask, sampled.value_rotation
        self.values = sampled.static_values  # of static values the mask, else [T, C] of the last pass
        projection, dims = net.dims[index], net.shape.head_dim
        self.project_in, self.norm = net.token_embeddings[index].weight, projection.norm
        self.project_out, self.start = projection.linear.weight[:dims], projection.start[:dims]
        self.noise = uniform_noise((tokens, dims), self.start.device, sampled.token_seed) if net.per_token else None

    def choose_(self, hidden: Tensor) -> None:
        """The V/O dims of each token (Eq. 5, Sec. 3.3)."""
        if self.noise is None:
            return
        x, out = hidden.flatten(0, -2), (self.project_out, self.start)
        logits = value_logits(x, self.project_in, self.embedding, self.norm, *out)
        self.values = sigmoid_sample(logits, self.noise, self.temperature, self.keep_bias)

    def values_of(self, y: Tensor) -> Tensor:
        """The values [.., G C] that V gave, masked in their basis."""
        assert self.values is not None
        rotated = y if self.rotation is None else rotate_heads(y, self.rotation)
        return times_heads(rotated, self.values)

    def cut(self, y: Tensor) -> Tensor:
        """The mixed values [.., H C], masked, in the model's own basis."""
        assert self.values is not None
        kept = times_heads(y, self.values)
        return kept if self.rotation is None else rotate_heads(kept, self.rotation, inverse=True)

    def settle_(self) -> None:
        if self.noise is not None:
            assert self.values is not None
            self.sampled.note_values(self.values)


class _Chooses:
    tensors: LayerTensors | AttentionTensors

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.tensors.choose_(input_of(args, kwargs))
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class _MasksInput:
    tensors: LayerTensors | AttentionTensors

    def forward(self, hidden: Tensor) -> Any:
        return super().forward(self.tensors.cut(hidden))  # type: ignore[misc]


class _MasksQK:
    tensors: AttentionTensors

    def forward(self, hidden: Tensor) -> Any:
        return times_heads(super().forward(hidden), self.tensors.qk)  # type: ignore[misc]


class _MasksV:
    tensors: AttentionTensors

    def forward(self, hidden: Tensor) -> Any:
        return self.tensors.values_of(super().forward(hidden))  # type: ignore[misc]


@cache
def _masking(role: type, family: Any) -> type:
    """The class of the family that masks in a role; one for all layers, as a graph is of one class."""
    return type(f"{family.__name__}{role.__name__}", (role, family), {})


def _roles(parts: LayerParts, masks: LayerTensors) -> list[tuple[nn.Module, type, Any]]:
    """The modules of a layer that mask, in which role, and what each reads."""
    roles: list[tuple[Any, type, Any]] = [
        (parts.mlp.module, _Chooses, masks),
        (parts.mlp.down.module, _MasksInput, masks),
    ]
    if masks.attention is not None:
        own, dense = masks.attention, parts.attention
        roles += [(dense.module, _Chooses, own), (dense.q.module, _MasksQK, own), (dense.k.module, _MasksQK, own)]
        roles += [(dense.v.module, _MasksV, own), (dense.o.module, _MasksInput, own)]
    return roles


@contextmanager
def masked_in_graphs(
    model: PreTrainedModel, sampled: Sequence[SampledLayerMasks], tokens: int
) -> Iterator[Callable[[], None]]:
    """Apply the masks of a step of T tokens as `masking.masked` does. What it yields is called after the forward pass: then
    the masks know what the tokens chose, as the losses ask."""
    tensors: list[LayerTensors] = []

    def settle() -> None:
        for layer in tensors:
            layer.settle_()

    changed: list[tuple[Any, Any]] = []
    try:
        for parts, masks in zip(layer_parts(model), sampled, strict=True):
            assert isinstance(masks.experts, SampledOverlapping)
            tensors.append(LayerTensors(masks, masks.experts, tokens))
            for module, role, read in _roles(parts, tensors[-1]):
                part: Any = module
                family: Any = type(part)
                changed.append((part, family))
                part.__class__ = _masking(role, family)
                part.tensors = read
        yield settle
    finally:
        for part, family in changed:
            part.__class__ = family
            del part.tensors
