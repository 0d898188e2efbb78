"""Pruned attention: its masks in learning. Q/K dims are the same for all tokens; V/O dims may be chosen by each (Sec. 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tomoe.methods.tomoe.gumbel import gumbel_sigmoid
from tomoe.methods.tomoe.network import per_layer
from tomoe.methods.tomoe.projection import Projection
from tomoe.model.shape import ModelShape
from tomoe.plans.attention_masks import value_logits
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
        """The tensors that give the same logits, as the plan keeps them: embedding and start become biases."""
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
