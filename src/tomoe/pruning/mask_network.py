"""Every trainable part of ToMoE: hypernetwork, routers, projections. One call draws the masks of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tomoe.model.structure import ModelShape
from tomoe.pruning.gumbel import derive_seed, gumbel_sigmoid
from tomoe.pruning.hypernetwork import HyperNetwork
from tomoe.pruning.routing import ExpertRouter, ValueRouter
from tomoe.recipe.conversion import ExpertsSection, SamplingSection


class Projection(nn.Module):
    """Proj_D: LayerNorm -> GELU -> Linear (no bias), plus the logits that the start gives (tab. modules).

    `start` is a buffer [.., size], not a parameter: zero for the paper's random start, the importance ranks for a
    carved one. What is learned is the difference to it.
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

    # nn.ModuleLists, said to be what they hold
    routers: Sequence[ExpertRouter]
    neurons: Sequence[Projection]
    token_embeddings: Sequence[nn.Linear]
    dims: Sequence[Projection]
    attention_inputs: Tensor

    def __init__(self, shape: ModelShape, experts: ExpertsSection, sampling: SamplingSection, seed: int):
        super().__init__()
        self.shape, self.experts, self.sampling = shape, experts, sampling
        n, size, num_layers = experts.num_experts, experts.embedding_size, shape.num_layers
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "mask network"))
            self.hypernetwork = HyperNetwork(2 * num_layers, n, size, seed)
            self.routers = _per_layer(num_layers, lambda: ExpertRouter(shape.hidden_size, n))
            self.neurons = _per_layer(num_layers, lambda: Projection(size, torch.zeros(n, shape.mlp_size)))
            self.token_embeddings = _per_layer(num_layers, lambda: nn.Linear(shape.hidden_size, size, bias=False))
            # the first C logits are V/O dims, the rest Q/K choices
            dims = shape.head_dim + shape.num_qk_choices
            self.dims = _per_layer(num_layers, lambda: Projection(size, torch.zeros(dims)))
        self.local = experts.attention_embedding == "local"
        if self.local and experts.attention == "static":
            generator = torch.Generator().manual_seed(derive_seed(seed, "attention embeddings"))
            self.register_buffer("attention_inputs", torch.randn(num_layers, size, generator=generator))
        for projection, embedding in zip(self.dims, self.token_embeddings, strict=True):
            projection.requires_grad_(experts.attention != "none")
            embedding.requires_grad_(experts.attention == "dynamic")

    def attention_embeddings(self, embeddings: Float[Tensor, "sites N E"]) -> Float[Tensor, "L E"]:
        """The mean expert embedding of every attention site.

        In the `local` ablation nothing comes from the hypernetwork: zeros where tokens have embeddings of their own, else
        what was drawn once for each site (from zeros a carved start gets no gradient, because its weights are zero too).
        """
        if self.local and self.experts.attention == "static":
            return self.attention_inputs
        mean = embeddings[0::2].mean(1)
        return torch.zeros_like(mean) if self.local else mean

    def value_logits(self, i: int, x: Float[Tensor, "T D"], embedding: Float[Tensor, " E"]) -> Float[Tensor, "T C"]:
        """Logits of the V/O dims of each token (eq. MHA-STGS)."""
        p = self.dims[i]
        hidden = F.gelu(p.norm(F.linear(x.float(), self.token_embeddings[i].weight, embedding)))
        c = self.shape.head_dim
        return F.linear(hidden, p.linear.weight[:c], p.start[:c])

    def value_router(self, i: int, embedding: Float[Tensor, " E"]) -> ValueRouter:
        """The same logits as a module of its own, as the plan keeps it: embedding and start become biases."""
        p, c = self.dims[i], self.shape.head_dim
        router = ValueRouter(self.shape.hidden_size, self.experts.embedding_size, c)
        router.load_state_dict(
            {
                "project_in.weight": self.token_embeddings[i].weight,
                "project_in.bias": embedding,
                "norm.weight": p.norm.weight,
                "norm.bias": p.norm.bias,
                "project_out.weight": p.linear.weight[:c],
                "project_out.bias": p.start[:c],
            }
        )
        return router.requires_grad_(False)

    def forward(self, seed: int, token_seed: int | None = None) -> list[SampledLayerMasks]:
        """The masks of one step: `seed` decides what all tokens share, `token_seed` (default: the same) their own choices."""
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
    """One layer's draw for one step. The forward pass fills in what depended on tokens; the losses read it."""

    def __init__(
        self, net: MaskNetwork, index: int, embedding: Tensor, expert_embeddings: Tensor, seed: int, token_seed: int
    ):
        self.net, self.index, self.embedding, self.seed, self.token_seed = net, index, embedding, seed, token_seed
        self.neuron_masks: Float[Tensor, "N F"] = self._sample(net.neurons[index](expert_embeddings), "neurons")
        self.attention = net.experts.attention
        self.qk_mask: Float[Tensor, " C"] | None = None
        self.static_values: Float[Tensor, " C"] | None = None
        if self.attention != "none":
            logits, c = net.dims[index](embedding), net.shape.head_dim
            self.qk_mask = net.shape.expand_qk(self._sample(logits[c:], "qk"))
            if self.attention == "static":
                self.static_values = self._sample(logits[:c], "values")
        self.valid: Bool[Tensor, " T"] | None = None  # real tokens, set by the training step
        self.assignment: Float[Tensor, "T N"] | None = None
        self.route_probs: Float[Tensor, "T N"] | None = None
        self.value_masks: Float[Tensor, "T C"] | None = None

    def _sample(self, logits: Float[Tensor, "*n"], name: str) -> Float[Tensor, "*n"]:
        s = self.net.sampling
        return gumbel_sigmoid(logits, s.temperature, s.keep_bias, derive_seed(self.seed, name), s.noise)

    def _real(self, t: Float[Tensor, "T n"]) -> Float[Tensor, "t n"]:
        return t if self.valid is None else t[self.valid]

    def neurons(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        s = self.net.sampling
        assignment, probs = self.net.routers[self.index].sample(
            x, s.temperature, derive_seed(self.token_seed, "router")
        )
        self.assignment, self.route_probs = self._real(assignment), self._real(probs)
        return assignment @ self.neuron_masks

    def qk(self) -> Float[Tensor, " C"] | None:
        return self.qk_mask

    def values(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "*T C"] | None:
        if self.attention != "dynamic":
            return self.static_values
        logits = self.net.value_logits(self.index, x, self.embedding)
        s = self.net.sampling
        masks = ValueRouter.sample(logits, s.temperature, s.keep_bias, derive_seed(self.token_seed, "values"), s.noise)
        self.value_masks = self._real(masks)
        return masks
