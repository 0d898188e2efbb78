"""Every trainable part of ToMoE: hypernetwork, routers, projections. One call samples the masks of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tomoe.model.shape import ModelShape
from tomoe.pruning.fine_carving import SHARED
from tomoe.pruning.gumbel import gumbel_sigmoid
from tomoe.pruning.hypernetwork import HyperNetwork
from tomoe.pruning.layouts import FineLayout, Layout
from tomoe.pruning.routing import ExpertRouter, Routing, ValueRouter
from tomoe.recipe.conversion import AttentionSection, SamplingSection
from tomoe.seeds import derive_seed


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


def _per_layer(num_layers: int, make: Callable[[], nn.Module]) -> Any:
    return nn.ModuleList(make() for _ in range(num_layers))


class MaskNetwork(nn.Module):
    """Routers, projections and hypernetwork of all layers, in float32."""

    # these are nn.ModuleLists, typed as what they hold
    routers: Sequence[ExpertRouter]
    neurons: Sequence[Projection]
    token_embeddings: Sequence[nn.Linear]
    dims: Sequence[Projection]
    attention_inputs: Tensor
    # of fine-grained experts: [L, F], the expert that each neuron is in, or SHARED; and k of each layer [L]
    expert_of_neuron: Tensor
    experts_per_token: Tensor
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
        n, size, num_layers = layout.num_experts, embedding_size, shape.num_layers
        self.fine = isinstance(layout, FineLayout)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "mask network"))
            self.hypernetwork = HyperNetwork(2 * num_layers, n, size, seed)
            self.routers = _per_layer(num_layers, lambda: ExpertRouter(shape.hidden_size, n, bias=self.fine))
            # of fine-grained experts only the routers are learned
            learned = 0 if self.fine else num_layers
            self.neurons = _per_layer(learned, lambda: Projection(size, torch.zeros(n, shape.mlp_size)))
            self.token_embeddings = _per_layer(num_layers, lambda: nn.Linear(shape.hidden_size, size, bias=False))
            # the first C logits are V/O dims, the rest Q/K choices
            dims = shape.head_dim + shape.num_qk_choices
            self.dims = _per_layer(num_layers, lambda: Projection(size, torch.zeros(dims)))
        if self.fine:
            self.register_buffer("expert_of_neuron", torch.full((num_layers, shape.mlp_size), SHARED))
            self.register_buffer("experts_per_token", torch.ones(num_layers, dtype=torch.long))
        self.rotates_values = attention.rotate_values and attention.pruning != "off"
        if self.rotates_values:
            identity = torch.eye(shape.head_dim).repeat(num_layers, shape.num_kv_heads, 1, 1)
            self.register_buffer("value_rotations", identity)
        self.local = attention.embedding == "local"
        if self.local and attention.pruning == "static":
            generator = torch.Generator().manual_seed(derive_seed(seed, "attention embeddings"))
            self.register_buffer("attention_inputs", torch.randn(num_layers, size, generator=generator))
        for projection, embedding in zip(self.dims, self.token_embeddings, strict=True):
            projection.requires_grad_(attention.pruning != "off")
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

    def value_router(self, i: int, embedding: Float[Tensor, " E"]) -> ValueRouter:
        """Return the module that gives the same logits, as the plan keeps it: embedding and start become biases."""
        projection, c = self.dims[i], self.shape.head_dim
        router = ValueRouter(self.shape.hidden_size, len(embedding), c)
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

    def expert_masks(self, i: int) -> tuple[Bool[Tensor, "N F"], Bool[Tensor, " F"]]:
        """Return the neurons of the fine-grained experts of layer i, and those that every token uses."""
        expert = self.expert_of_neuron[i]
        numbers = torch.arange(self.layout.num_experts, device=expert.device)
        return numbers[:, None] == expert, expert == SHARED

    def fine_width(self, i: int) -> int:
        """Return how many neurons of layer i a token uses, if its experts are fine-grained."""
        expert = self.expert_of_neuron[i]
        return int((expert == SHARED).sum()) + int(self.experts_per_token[i]) * int((expert == 0).sum())

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
        self.shared_mask: Float[Tensor, " F"] | None = None
        if net.fine:
            self.neuron_masks: Float[Tensor, "N F"]
            self.neuron_masks, self.shared_mask = (mask.float() for mask in net.expert_masks(index))
            self.top_k = int(net.experts_per_token[index])
        else:
            self.neuron_masks = self._sample(net.neurons[index](expert_embeddings), "neurons")
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

    @property
    def width(self) -> Float[Tensor, ""]:
        """Neurons that a token uses; of overlapping experts those of the widest (Eq. 8)."""
        if self.shared_mask is not None:
            return torch.tensor(float(self.net.fine_width(self.index)), device=self.shared_mask.device)
        return self.neuron_masks.sum(-1).max()

    def neurons(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        s, router = self.net.sampling, self.net.routers[self.index]
        if self.shared_mask is not None:
            routing = router.choose(x, s.temperature, self.top_k)
        else:
            routing = router.sample(x, s.temperature, derive_seed(self.token_seed, "router"))
        self.routing = routing.select(self.valid)
        neurons = routing.assignment @ self.neuron_masks
        return neurons if self.shared_mask is None else neurons + self.shared_mask

    def qk(self) -> Float[Tensor, " C"] | None:
        return self.qk_mask

    def values(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "*T C"] | None:
        if self.pruning != "per_token":
            return self.static_values
        logits = self.net.value_logits(self.index, x, self.embedding)
        s = self.net.sampling
        masks = ValueRouter.sample(logits, s.temperature, s.keep_bias, derive_seed(self.token_seed, "values"))
        self.value_masks = masks if self.valid is None else masks[self.valid]
        return masks
