"""What each token of a passage costs in two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from tomoe.evaluation.perplexity import evaluating
from tomoe.evaluation.results import Number
from tomoe.moe.modeling_tomoe import choosing_all


@dataclass(frozen=True)
class TokenLosses:
    """The loss of every token after the first, in nats, in the dense model and in the MoE."""

    dense: Annotated[list[Number], Field(min_length=1)]
    moe: list[Number]

    def __post_init__(self) -> None:
        """Raises ValueError unless there are two losses for each token; a file may hold anything."""
        if len(self.dense) != len(self.moe):
            raise ValueError("a token does not have one loss in each model")


def token_losses(dense: nn.Module, moe: nn.Module, ids: Sequence[int]) -> TokenLosses | None:
    """Run the tokens through both models once; None for fewer than two tokens."""
    if len(ids) < 2:
        return None
    return TokenLosses(*(_losses(model, ids).tolist() for model in (dense, moe)))


def _losses(model: Any, ids: Sequence[int]) -> Float[Tensor, " T"]:
    tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
    with torch.no_grad(), evaluating(model), choosing_all(model):
        logits = model(tokens, use_cache=False).logits[0, :-1].float()
    return F.cross_entropy(logits, tokens[0, 1:].to(logits.device), reduction="none")
