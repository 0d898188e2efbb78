"""Every trainable part of ToMoE: hypernetwork, routers, projections. One call samples the masks of one step.

What differs between the forms of experts stands in `overlapping` and `fine_grained`; `forms.mask_network` makes the right one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tomoe.model.shape import ModelShape
from tomoe.pruning.form import ExtractedExperts, SampledExperts
from tomoe.pruning.layouts import Layout
from tomoe.pruning.learned.gumbel import gumbel_sigmoid, keep_logit, keep_probability
from tomoe.pruning.learned.hypernetwork import HyperNetwork
from tomoe.pruning.learned.value_logits import ValueLogits
from tomoe.pruning.routing import ExpertRouter, Routing
from tomoe.recipe.conversion import AttentionSection, SamplingSection
from tomoe.seeds import derive_seed

LOGIT_SCALE = 4.0
"""Mask logits per standard deviation of the rank: decided at both ends, open in the middle."""


class Projection(nn.Module):
    """Proj_D: LayerNorm -> GELU -> Linear (no bias), plus the logits of the start (Table 8, App. A.1).

    `start` is a buffer [.., size], not a parameter: zero for the paper's random start, logits from the importance ranks
    for a carved one. Training learns the difference to it.
    """

    start: Tensor

    def __init__(self, embedding_size: int, start: Float[Tensor, "*n size"]):
        super().__init__()
        self.norm = nn.LayerNorm(embedding_size)
        self.linear = nn.Linear(embedding_size, start.shape[-1], bias=False)
        self.register_buffer("start", start)

    def forward(self, embedding: Float[Tensor, "*m E"]) -> Float[Tensor, "*m size"]:
        return self.linear(F.gelu(self.norm(embedding))) + self.start

    def start_at_(self, start: Float[Tensor, "*n size"]) -> None:
        """Set the start; the learned difference to it is zero, so that step 0 is the carved plan itself."""
        self.start.copy_(start)
        self.linear.weight.zero_()


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


def per_layer(num_layers: int, make: Callable[[], nn.Module]) -> Any:
    return nn.ModuleList(make() for _ in range(num_layers))


class MaskNetwork(nn.Module, ABC):
    """Routers, projections and hypernetwork of all layers, in float32."""

    # these are nn.ModuleLists, typed as what they hold
    routers: Sequence[ExpertRouter]
    token_embeddings: Sequence[nn.Linear]
    dims: Sequence[Projection]
    attention_inputs: Tensor
    # [L, G, C, C], if the recipe rotates values; the model's own basis until the start sets another
    value_rotations: Tensor

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        embedding_size: int,
        attention: AttentionSection,
        sampling: SamplingSection,
        seed: int,
    ):
        super().__init__()
        self.shape, self.layout, self.attention, self.sampling = shape, layout, attention, sampling
        size, num_layers = embedding_size, shape.num_layers
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "mask network"))
            self.hypernetwork = HyperNetwork(2 * num_layers, layout.num_experts, size, seed)
            self.add_experts(size)
            pruned = 0 if attention.pruning == "off" else num_layers
            self.token_embeddings = per_layer(pruned, lambda: nn.Linear(shape.hidden_size, size, bias=False))
            # the first C logits are V/O dims, the rest Q/K choices
            dims = shape.head_dim + shape.num_qk_choices
            self.dims = per_layer(pruned, lambda: Projection(size, torch.zeros(dims)))
        self.rotates_values = attention.rotate_values and attention.pruning != "off"
        if self.rotates_values:
            identity = torch.eye(shape.head_dim).repeat(num_layers, shape.num_kv_heads, 1, 1)
            self.register_buffer("value_rotations", identity)
        self.local = attention.embedding == "local"
        if self.local and attention.pruning == "static":
            generator = torch.Generator().manual_seed(derive_seed(seed, "attention embeddings"))
            self.register_buffer("attention_inputs", torch.randn(num_layers, size, generator=generator))
        for embedding in self.token_embeddings:
            embedding.requires_grad_(attention.pruning == "per_token")

    def attention_embeddings(self, embeddings: Float[Tensor, "sites N E"]) -> Float[Tensor, "L E"]:
        """Return the mean expert embedding of every attention site.

        In the `local` ablation nothing comes from the hypernetwork: the result is zero if every token adds its own
        embedding, else a fixed random vector per site (from zero a carved start would get no gradient, because its
        weights are zero too).
        """
        if self.local and self.attention.pruning == "static":
            return self.attention_inputs
        mean = embeddings[0::2].mean(1)
        return torch.zeros_like(mean) if self.local else mean

    def value_logits(self, i: int, x: Float[Tensor, "T D"], embedding: Float[Tensor, " E"]) -> Float[Tensor, "T C"]:
        """Return the logits of the V/O dims of each token (Eq. 5, Sec. 3.3)."""
        projection, c = self.dims[i], self.shape.head_dim
        hidden = F.gelu(projection.norm(F.linear(x.float(), self.token_embeddings[i].weight, embedding)))
        return F.linear(hidden, projection.linear.weight[:c], projection.start[:c])

    def value_router(self, i: int, embedding: Float[Tensor, " E"]) -> ValueLogits:
        """Return the module that gives the same logits, as the plan keeps it: embedding and start become biases."""
        projection, c = self.dims[i], self.shape.head_dim
        router = ValueLogits(self.shape.hidden_size, len(embedding), c)
        router.load_state_dict(
            {
                "project_in.weight": self.token_embeddings[i].weight,
                "project_in.bias": embedding,
                "norm.weight": projection.norm.weight,
                "norm.bias": projection.norm.bias,
                "project_out.weight": projection.linear.weight[:c],
                "project_out.bias": projection.start[:c],
            }
        )
        return router.requires_grad_(False)

    def value_rotation(self, i: int) -> Float[Tensor, "G C C"] | None:
        """Return the basis that the V/O masks of layer i act in; None: the model's own."""
        return self.value_rotations[i] if self.rotates_values else None

    @abstractmethod
    def add_experts(self, embedding_size: int) -> None:
        """Make the trainable parts of the experts: `routers`, and whatever else the form has."""

    @abstractmethod
    def carve(
        self, i: int, x: Float[Tensor, "T D"], h: Float[Tensor, "T F"], weight: Float[Tensor, " T"],
        down: Float[Tensor, "D F"], seed: int,
    ) -> Any:  # fmt: skip
        """Carve the experts of layer i: a dataclass of tensors, among them `loss` with 0, 1, .. units of the layout.

        x, h: the inputs of the MLP and of its down projection; `weight` is 1 / |residual|^2 of a token.
        """

    @abstractmethod
    def blank_start(self, device: torch.device) -> Any:
        """Return what `carve` returns, with tensors that have no values yet."""

    @abstractmethod
    def start_experts_(self, starts: Sequence[Any], units: Sequence[int] | None, left: float) -> None:
        """Start from carved experts with so many units in each layer; None: all layers share `left` parameters alike."""

    @abstractmethod
    def sample_experts(self, i: int, embeddings: Float[Tensor, "N E"], seed: int, token_seed: int) -> SampledExperts:
        """Sample the experts of layer i for one step; both seeds are the layer's own."""

    @abstractmethod
    def extract_experts(self, embeddings: Float[Tensor, "sites N E"]) -> ExtractedExperts:
        """Return the experts without noise."""

    def forward(self, seed: int, token_seed: int | None = None) -> list[SampledLayerMasks]:
        """Sample the masks of one step.

        `seed` decides what all tokens share, `token_seed` (default: the same) what each token chooses.
        """
        embeddings = self.hypernetwork()
        attention = self.attention_embeddings(embeddings)
        token_seed = seed if token_seed is None else token_seed
        return [
            SampledLayerMasks(
                self, i, attention[i], embeddings[2 * i + 1], derive_seed(seed, i), derive_seed(token_seed, i)
            )
            for i in range(self.shape.num_layers)
        ]


class SampledLayerMasks:
    """The masks of one layer in one step. The forward pass fills in what depends on tokens; the losses read it."""

    def __init__(
        self, net: MaskNetwork, index: int, embedding: Tensor, expert_embeddings: Tensor, seed: int, token_seed: int
    ):
        self.net, self.index, self.embedding, self.seed, self.token_seed = net, index, embedding, seed, token_seed
        self.experts = net.sample_experts(index, expert_embeddings, seed, token_seed)
        self.pruning, self.value_rotation = net.attention.pruning, net.value_rotation(index)
        self.qk_mask: Float[Tensor, " C"] | None = None
        self.static_values: Float[Tensor, " C"] | None = None
        if self.pruning != "off":
            logits, c = net.dims[index](embedding), net.shape.head_dim
            self.qk_mask = net.shape.expand_qk(self._sample(logits[c:], "qk"))
            if self.pruning == "static":
                self.static_values = self._sample(logits[:c], "values")
        # which tokens are no padding, set by the training step; None: all
        self.valid: Bool[Tensor, " T"] | None = None
        # of the real tokens, filled in by the forward pass
        self.routing: Routing | None = None
        self.value_masks: Float[Tensor, "T C"] | None = None

    def _sample(self, logits: Float[Tensor, "*n"], name: str) -> Float[Tensor, "*n"]:
        s = self.net.sampling
        return gumbel_sigmoid(logits, s.temperature, s.keep_bias, derive_seed(self.seed, name))

    def neurons(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        routing, neurons = self.experts.choose(x)
        self.routing = routing.select(self.valid)
        return neurons

    def qk(self) -> Float[Tensor, " C"] | None:
        return self.qk_mask

    def values(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "*T C"] | None:
        if self.pruning != "per_token":
            return self.static_values
        logits = self.net.value_logits(self.index, x, self.embedding)
        s = self.net.sampling
        masks = gumbel_sigmoid(logits, s.temperature, s.keep_bias, derive_seed(self.token_seed, "values"))
        self.value_masks = masks if self.valid is None else masks[self.valid]
        return masks
