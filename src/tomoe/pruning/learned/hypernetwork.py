"""HN (Eq. 1, Sec. 3.1): one embedding per expert and site, from a fixed random input. The plan does not keep it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tomoe.seeds import derive_seed


class HyperNetwork(nn.Module):
    """z [2L, N, E/4] -> E [2L, N, E]: a bidirectional GRU over the sites in model order (attention 0, MLP 0, ...).

    Running over sites lets neighboring layers decide together. z is a buffer: it is drawn once and never trained.
    """

    inputs: Tensor

    def __init__(self, num_sites: int, num_experts: int, embedding_size: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(derive_seed(seed, "hypernetwork"))
        self.register_buffer("inputs", torch.randn(num_sites, num_experts, embedding_size // 4, generator=generator))
        self.gru = nn.GRU(embedding_size // 4, embedding_size // 2, bidirectional=True)

    def forward(self) -> Float[Tensor, "sites N E"]:
        return self.gru(self.inputs)[0]
