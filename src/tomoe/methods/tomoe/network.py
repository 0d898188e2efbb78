"""What the networks of both forms of experts, `overlapping` and `fine_grained`, share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor, nn

from tomoe.budget import router_params
from tomoe.model.shape import ModelShape
from tomoe.plans.partition.layouts import Layout
from tomoe.plans.routing import ExpertRouter
from tomoe.recipe.conversion import SamplingSection

if TYPE_CHECKING:
    from tomoe.methods.tomoe.attention import PrunedAttention
    from tomoe.methods.tomoe.projection import HyperNetwork


def per_layer(num_layers: int, make: Callable[[], nn.Module]) -> Any:
    return nn.ModuleList(make() for _ in range(num_layers))


class MaskNetwork(nn.Module):
    """Routers and experts of all layers, in float32: what is trained as parameters, what the start fixes as buffers.

    A form adds `carve` (of one layer), `blank_start` (what that returns, without values), `initialize_experts_`,
    `sample_experts` (of one layer in one step) and `extract_experts` (without noise).
    """

    # an nn.ModuleList, typed as what it holds
    routers: Sequence[ExpertRouter]
    hypernetwork: HyperNetwork | None  # gives embeddings to the masks that are learned; None if none are, as by default
    attention: PrunedAttention | None  # the dims of attention that a token uses, if it is pruned, too

    def __init__(self, shape: ModelShape, layout: Layout, sampling: SamplingSection):
        super().__init__()
        self.shape, self.layout, self.sampling = shape, layout, sampling
        # its place among the parameters is the first
        self.register_module("hypernetwork", None)
        self.attention = None

    def counted_routers(self, value_routers: bool = True) -> int:
        """Weights of all routers that the budget counts; with `value_routers` those of V/O dims, too, if tokens choose these."""
        if not self.layout.counts_routers:
            return 0
        embedding = self.attention.token_embedding_size if value_routers and self.attention is not None else 0
        return self.shape.num_layers * router_params(self.shape, self.layout.num_experts, embedding)

    def embeddings(self) -> Float[Tensor, "sites N E"] | None:
        """Return the embedding of every expert at the attention (even rows) and the MLP (odd rows) of every layer."""
        return None if self.hypernetwork is None else self.hypernetwork()
