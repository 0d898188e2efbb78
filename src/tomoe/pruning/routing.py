"""The two choices a token makes: which expert (MLP), which value dims (attention).

`sample` is the choice as training makes it, with noise and a gradient; `decide` is the same choice at inference. They
stand side by side, on the same logits, so that the model we train is the model we ship. Everything is float32, whatever
the dtype of the model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tomoe.pruning.gumbel import Noise, gumbel_sigmoid, gumbel_softmax


class ExpertRouter(nn.Module):
    """One logit per expert: Linear(D, N), no bias, which every stock MoE architecture can hold (tab. modules)."""

    def __init__(self, hidden_size: int, num_experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T N"]:
        return F.linear(x.float(), self.weight)

    def sample(
        self, x: Float[Tensor, "T D"], temperature: float, seed: int
    ) -> tuple[Float[Tensor, "T N"], Float[Tensor, "T N"]]:
        """One-hot assignment with a straight-through gradient, and the probabilities behind it (eq. mlp)."""
        return gumbel_softmax(self(x), temperature, seed)

    def decide(self, x: Float[Tensor, "T D"]) -> Int[Tensor, " T"]:
        """Expert ids: one a token."""
        return self(x).argmax(-1)


class ValueRouter(nn.Module):
    """One logit per value dim of a head, the same for all heads (eq. MHA-STGS).

    `project_in` is Proj_E, its bias the site's mean expert embedding; `norm` and `project_out` are the V/O part of
    Proj_D, whose bias carries the carved start.
    """

    def __init__(self, hidden_size: int, embedding_size: int, head_dim: int):
        super().__init__()
        self.project_in = nn.Linear(hidden_size, embedding_size)
        self.norm = nn.LayerNorm(embedding_size)
        self.project_out = nn.Linear(embedding_size, head_dim)

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T C"]:
        return self.project_out(F.gelu(self.norm(self.project_in(x.float()))))

    @staticmethod
    def sample(
        logits: Float[Tensor, "T C"], temperature: float, keep_bias: float, seed: int, noise: Noise
    ) -> Float[Tensor, "T C"]:
        return gumbel_sigmoid(logits, temperature, keep_bias, seed, noise)

    @staticmethod
    def decide(logits: Float[Tensor, "T C"], top_k: int) -> Float[Tensor, "T C"]:
        """True top-K: every token keeps exactly K dims."""
        return torch.zeros_like(logits).scatter_(-1, logits.topk(top_k, dim=-1).indices, 1.0)
