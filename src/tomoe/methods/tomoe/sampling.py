"""The masks of one step of learning: drawn with noise, so that what is dropped can come back."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from tomoe.methods.tomoe.attention import SampledAttention
from tomoe.methods.tomoe.fine_grained import SampledFine
from tomoe.methods.tomoe.networks import AnyNetwork
from tomoe.methods.tomoe.overlapping import SampledOverlapping
from tomoe.plans.routing import Routing
from tomoe.seeds import derive_seed


def sampled_masks(
    net: AnyNetwork, seed: int, token_seed: int | None = None, valid: Bool[Tensor, " T"] | None = None
) -> list[SampledLayerMasks]:
    """Sample the masks of one step.

    `seed` decides what all tokens share, `token_seed` (default: the same) what each token chooses. `valid`: which tokens are
    no padding, which the losses read; None: all.
    """
    token_seed = seed if token_seed is None else token_seed
    embeddings = net.embeddings()
    of_attention = None
    if net.attention is not None:
        assert embeddings is not None
        of_attention = net.attention.embeddings(embeddings)
    sampled = []
    for i in range(net.shape.num_layers):
        own, own_tokens = derive_seed(seed, i), derive_seed(token_seed, i)
        attention = None
        if net.attention is not None and of_attention is not None:
            attention = SampledAttention(net.attention, i, of_attention[i], own, own_tokens, valid)
        sampled.append(SampledLayerMasks(net.sample_experts(i, embeddings, own, own_tokens), attention, valid))
    return sampled


@dataclass(eq=False)
class SampledLayerMasks:
    """The masks of one layer in one step."""

    experts: SampledFine | SampledOverlapping
    attention: SampledAttention | None = None
    valid: Bool[Tensor, " T"] | None = None
    routing: Routing | None = None  # of the real tokens, filled in by the forward pass

    def neurons(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        routing, neurons = self.experts.choose(x_TD)
        self.routing = routing.select(self.valid)
        return neurons
