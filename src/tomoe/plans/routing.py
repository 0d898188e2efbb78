"""How a token chooses experts.

`choose` is the choice in training, with a gradient; `route` is the same choice at inference. They stand side by side and read
the same logits, so the model that learns is the model that is shipped. Everything is float32, whatever the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn


@dataclass(frozen=True)
class Routing:
    """The experts of T tokens.

    `assignment` is G: 1 for the experts of a token, 0 for the others, with a straight-through gradient to `probs`: with one
    expert a token, the softmax of the logits (Eqs. 3, 14; Sec. 3.2, App. A.3); with several, numbers from 0 to 1 that add up
    to about `top_k`.
    """

    assignment: Float[Tensor, "T N"]
    probs: Float[Tensor, "T N"]
    top_k: int = 1

    def select(self, valid: Bool[Tensor, " T"] | None) -> Routing:
        """Select the routing of some tokens; None selects all."""
        return self if valid is None else Routing(self.assignment[valid], self.probs[valid], self.top_k)


def largest(logits: Float[Tensor, "T n"], k: int) -> Float[Tensor, "T n"]:
    """Mask with 1 at the k largest entries of each token."""
    return torch.zeros_like(logits).scatter_(-1, logits.topk(k, dim=-1).indices, 1.0)


def _top_k(logits: Float[Tensor, "T N"], top_k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the choice of the `top_k` largest logits, 0/1, and sigmoid((z - threshold) / temperature) of all experts [T, N].

    The threshold is halfway between the last logit that is chosen and the first that is not.
    """
    if top_k == logits.shape[-1]:
        return torch.ones_like(logits), torch.ones_like(logits)
    chosen = logits.topk(top_k + 1, dim=-1)
    threshold = chosen.values[:, -2:].mean(-1, keepdim=True).detach()
    hard = torch.zeros_like(logits).scatter_(-1, chosen.indices[:, :-1], 1.0)
    return hard, torch.sigmoid((logits - threshold) / temperature)


def route(logits: Float[Tensor, "T N"], top_k: int | None = None) -> Routing:
    """Route as inference does, without noise: to one overlapping expert (`top_k` None), or to `top_k` fine-grained ones.

    The weight of a chosen expert is 1 + P - stop_gradient(P): exactly 1, with the gradient of its probability P.
    """
    if top_k is None:
        probs = logits.softmax(-1)
        hard = F.one_hot(logits.argmax(-1), logits.shape[-1]).to(probs.dtype)
    else:
        hard, probs = _top_k(logits, top_k, 1.0)
    return Routing(hard * (1 + (probs - probs.detach())), probs, top_k or 1)


def straight_through(logits: Float[Tensor, "T N"], top_k: int, temperature: float) -> Routing:
    """Choose the `top_k` largest logits, with the gradient of sigmoid((z - threshold) / temperature) to all of them."""
    hard, soft = _top_k(logits, top_k, temperature)
    return Routing(hard + (soft - soft.detach()), soft, top_k)


def bfloat16_values(weight: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Round to bfloat16: router weights with such values are exact in every export format."""
    return weight.bfloat16().float()


class ExpertRouter(nn.Module):
    """Gives one logit per expert: Linear(D, N), without a bias for overlapping experts (Table 8, App. A.1)."""

    def __init__(self, hidden_size: int, num_experts: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)
        self.bias = nn.Parameter(torch.zeros(num_experts)) if bias else None

    @classmethod
    def of(cls, weight: Float[Tensor, "N D"], bias: Float[Tensor, " N"] | None = None) -> ExpertRouter:
        num_experts, hidden_size = weight.shape
        router = cls(hidden_size, num_experts, bias is not None)
        router.weight.data = weight
        if router.bias is not None and bias is not None:
            router.bias.data = bias
        return router

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T N"]:
        if self.bias is None:
            return F.linear(x.float(), self.weight)
        # what a plan holds, so that the bias is learned for these values
        rounded = self.weight + (bfloat16_values(self.weight) - self.weight).detach()
        return F.linear(x.float(), rounded, self.bias)

    def choose(self, x: Float[Tensor, "T D"], temperature: float, top_k: int) -> Routing:
        """Route to fine-grained experts as in training: without noise, with a gradient to experts not chosen, too."""
        return straight_through(self(x), top_k, temperature)


def balance_penalty(routings: Sequence[Routing | None]) -> Float[Tensor, ""]:
    """Return R_L (Eq. 9, Sec. 3.4) without its factor N: sum_i F_i P_i, at least 1/N; mean over layers. With k experts per token,
    F and P are divided by k."""
    seen = [routing for routing in routings if routing is not None]
    assert len(seen) == len(routings), "the masks have seen no tokens yet"
    shares = torch.stack([routing.assignment.detach().mean(0) for routing in seen])
    probs = torch.stack([routing.probs.mean(0) for routing in seen])
    squares = torch.tensor([float(routing.top_k**2) for routing in seen], device=probs.device)
    return ((shares * probs).sum(-1) / squares).mean()
