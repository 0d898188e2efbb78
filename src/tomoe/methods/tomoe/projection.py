"""Embeddings of experts, mask logits computed from them, and the logits of a carved start."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tomoe.methods.tomoe.gumbel import keep_logit, keep_probability
from tomoe.plans.partition.allocation import bisected
from tomoe.seeds import derive_seed

LOGIT_SCALE = 4.0  # mask logits per standard deviation of the rank: decided at both ends, open in the middle


class HyperNetwork(nn.Module):
    """HN (Eq. 1, Sec. 3.1), z [2L, N, E/4] -> E [2L, N, E]: one embedding per expert and site, which the plan does not keep.

    A bidirectional GRU over the sites in model order (attention 0, MLP 0, ...) lets neighboring layers decide together. z is a
    buffer: it is drawn once and never trained.
    """

    inputs: Tensor

    def __init__(self, num_sites: int, num_experts: int, embedding_size: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(derive_seed(seed, "hypernetwork"))
        self.register_buffer("inputs", torch.randn(num_sites, num_experts, embedding_size // 4, generator=generator))
        self.gru = nn.GRU(embedding_size // 4, embedding_size // 2, bidirectional=True)

    def forward(self) -> Float[Tensor, "sites N E"]:
        return self.gru(self.inputs)[0]


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

    def initialize_(self, start: Float[Tensor, "*n size"]) -> None:
        """Set the start and a learned difference of zero, so that step 0 is the carved plan itself."""
        self.start.copy_(start)
        self.linear.weight.zero_()


def initial_logits(ranks: Int[Tensor, "*n size"], width: int, keep_bias: float) -> Float[Tensor, "*n size"]:
    """Return mask logits: LOGIT_SCALE x normal score of the rank, shifted so that sampling keeps `width` dims on average."""
    size = ranks.shape[-1]
    quantile = 1 - (torch.arange(size, dtype=torch.float64) + 0.5) / size
    scores = LOGIT_SCALE * torch.special.ndtri(quantile)
    if width >= size:
        whole = keep_logit(torch.tensor(1 - 1e-6, dtype=torch.float64), keep_bias)
        return torch.full(ranks.shape, float(whole))
    shift = bisected(-200.0, 200.0, 80, lambda x: float(keep_probability(scores + x, keep_bias).sum()) < width)
    return (scores + shift).float()[ranks.cpu()]
