"""What decides which weights a token uses: what every form of experts can do.

`learned.overlapping` and `fine_grained` are the two forms, and `forms.mask_network` chooses between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tomoe.model.shape import ModelShape
from tomoe.pruning.allocation import Site
from tomoe.pruning.layouts import Layout
from tomoe.pruning.routing import ExpertRouter, Routing
from tomoe.recipe.conversion import SamplingSection

if TYPE_CHECKING:
    from tomoe.pruning.learned.attention import PrunedAttention
    from tomoe.pruning.learned.projection import HyperNetwork


class Experts(ABC):
    """The experts of one layer that a token chooses from: of a step of learning, or of a plan."""

    router: ExpertRouter

    @abstractmethod
    def choose(self, x_TD: Float[Tensor, "T D"]) -> tuple[Routing, Float[Tensor, "T F"]]:
        """Route tokens; returns their experts and the mask of their neurons."""


class SampledExperts(Experts):
    """Those of a step of learning."""

    neuron_masks: Float[Tensor, "N F"] | None
    """Masks of experts that together have to cover the layer; None: every neuron has its place already."""
    neurons: int
    """Neurons that a token uses (Eq. 8), if there are no such masks."""


class ExtractedExperts(ABC):
    """The experts of all layers without noise, as extraction needs them."""

    params: int = 0  # parameters of MLPs whose width is settled already

    @abstractmethod
    def sites(self, i: int) -> list[Site]:
        """The width of layer i, if extraction chooses it."""

    @abstractmethod
    def choose(
        self, layers: Sequence[Sequence[Site]], offset: float, target: int, slack: int
    ) -> list[tuple[int, list[int]]]:
        """Choose the MLP width of every layer, and the units of all others of its sites: all together have `target` parameters
        as nearly as units allow; a uniform layout is content within `slack`."""

    @abstractmethod
    def fields(self, i: int, width: int) -> dict[str, Any]:
        """The fields of a LayerPlan that hold the experts of layer i."""

    def notes(self, offset: float) -> dict[str, Any]:
        """What the plan should remember of the choice."""
        return {}


@dataclass(frozen=True)
class Activations:
    """What the MLP of one layer reads and gives on calibration tokens, with its down projection."""

    x_TD: Float[Tensor, "T D"]
    h_TF: Float[Tensor, "T F"]  # of the down projection, in any dtype
    weight_T: Float[Tensor, " T"]  # 1 / |residual|^2 of a token
    down_DF: Float[Tensor, "D F"]


def real_tokens(t: Float[Tensor, "*BS n"], valid: Bool[Tensor, " BS"] | None) -> Float[Tensor, "T n"]:
    """Flatten over tokens and leave padding out; without any (None) nothing is copied."""
    tokens = t.flatten(0, -2)
    return tokens if valid is None else tokens[valid]


def per_layer(num_layers: int, make: Callable[[], nn.Module]) -> Any:
    return nn.ModuleList(make() for _ in range(num_layers))


class MaskNetwork(nn.Module, ABC):
    """Routers and experts of all layers, in float32: what learning changes as parameters, what the start settles as buffers."""

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

    def embeddings(self) -> Float[Tensor, "sites N E"] | None:
        """The embedding of every expert at the attention (even rows) and the MLP (odd rows) of every layer."""
        return None if self.hypernetwork is None else self.hypernetwork()

    @abstractmethod
    def carve(self, i: int, seen: Activations, seed: int) -> Any:
        """Carve the experts of layer i: a dataclass of tensors, among them `loss` with 0, 1, .. units of the layout."""

    @abstractmethod
    def blank_start(self, device: torch.device) -> Any:
        """Return what `carve` returns, with tensors that have no values yet."""

    @abstractmethod
    def start_experts_(self, starts: Sequence[Any], units: Sequence[int] | None, left: float) -> None:
        """Start from carved experts with so many units in each layer; None: all layers share `left` parameters alike."""

    @abstractmethod
    def sample_experts(
        self, i: int, embeddings: Float[Tensor, "sites N E"] | None, seed: int, token_seed: int
    ) -> SampledExperts:
        """Sample the experts of layer i for one step; both seeds are the layer's own."""

    @abstractmethod
    def extract_experts(self, embeddings: Float[Tensor, "sites N E"] | None) -> ExtractedExperts:
        """Return the experts without noise."""
