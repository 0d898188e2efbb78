"""The choice that a token makes in pruned attention: its value dims. Float32, whatever the dtype of the model.

Training samples from the logits with noise (`gumbel_sigmoid`); inference keeps the largest (`top_values`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class ValueLogits(nn.Module):
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


def top_values(logits: Float[Tensor, "T C"], top_k: int) -> Float[Tensor, "T C"]:
    """Keep exactly the K dims of each token that have the largest logits (Sec. 3.3)."""
    return torch.zeros_like(logits).scatter_(-1, logits.topk(top_k, dim=-1).indices, 1.0)
