"""What every form of experts can do; `learned.overlapping` and `fine_grained` are the two, and `forms` chooses between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tomoe.pruning.allocation import Site
from tomoe.pruning.routing import ExpertRouter, Routing


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

    @property
    @abstractmethod
    def width(self) -> Float[Tensor, ""]:
        """Neurons that a token uses (Eq. 8)."""


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
