"""The two choices that a token makes: its expert (MLP) and its value dims (attention).

`sample` is the choice in training, with noise and a gradient; `route` (experts) and `decide` (value dims) are the same
choices at inference. They stand side by side and read the same logits, so the model that learns is the model that is
shipped. Everything is float32, whatever the dtype of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tomoe.pruning.gumbel import Noise, gumbel_sigmoid, gumbel_softmax


@dataclass(frozen=True)
class Routing:
    """The experts of T tokens.

    `assignment` is G: 1 for a token's expert, 0 for the others, with a straight-through gradient to `probs`, the softmax
    of the logits (Eqs. 3, 14; Sec. 3.2, App. A.3).
    """

    assignment: Float[Tensor, "T N"]
    probs: Float[Tensor, "T N"]

    def select(self, valid: Bool[Tensor, " T"] | None) -> Routing:
        """Select the routing of some tokens; None selects all."""
        return self if valid is None else Routing(self.assignment[valid], self.probs[valid])


def route(logits: Float[Tensor, "T N"]) -> Routing:
    """Route as inference does: top-1, without noise.

    The weight of the chosen expert is 1 + P - stop_gradient(P): exactly 1, with the gradient of its probability P.
    """
    probs = logits.softmax(-1)
    hard = F.one_hot(logits.argmax(-1), logits.shape[-1]).to(probs.dtype)
    return Routing(hard * (1 + (probs - probs.detach())), probs)


class ExpertRouter(nn.Module):
    """Gives one logit per expert: Linear(D, N) without a bias, as in every stock MoE architecture (Table 8, App. A.1)."""

    def __init__(self, hidden_size: int, num_experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T N"]:
        return F.linear(x.float(), self.weight)

    def sample(self, x: Float[Tensor, "T D"], temperature: float, seed: int) -> Routing:
        """Route as training does: one-hot samples of a Gumbel-softmax (Eq. 3, Sec. 3.2)."""
        return Routing(*gumbel_softmax(self(x), temperature, seed))

    def route(self, x: Float[Tensor, "T D"]) -> Routing:
        """Route as inference does."""
        return route(self(x))


class ValueRouter(nn.Module):
    """Gives one logit per value dim of a head, the same for all heads (Eq. 5, Sec. 3.3).

    `project_in` is Proj_E, and its bias is the mean expert embedding of the site; `norm` and `project_out` are the V/O part
    of Proj_D, and their bias is the start.
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
        """Keep exactly the K dims of each token that have the largest logits (Sec. 3.3)."""
        return torch.zeros_like(logits).scatter_(-1, logits.topk(top_k, dim=-1).indices, 1.0)
