"""Two models token by token: what each token cost in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tomoe.evaluation.perplexity import evaluating
from tomoe.evaluation.results import Number
from tomoe.evaluation.routing_trace import pieces
from tomoe.moe.modeling_tomoe import choosing_all


@dataclass(frozen=True)
class TokenLosses:
    """The loss of every token after the first, in nats, in the dense model and in the MoE."""

    tokens: Annotated[list[str], Field(min_length=2)]
    dense: list[Number]
    moe: list[Number]

    def __post_init__(self) -> None:
        """Raises ValueError unless there are two losses for each token but the first; a file may hold anything."""
        if not len(self.tokens) - 1 == len(self.dense) == len(self.moe):
            raise ValueError("a token does not have one loss in each model")


def token_losses(
    dense: nn.Module, moe: nn.Module, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]
) -> TokenLosses | None:
    """Run the tokens through both models once; None for fewer than two tokens."""
    if len(ids) < 2:
        return None
    losses = [_losses(model, ids).tolist() for model in (dense, moe)]
    return TokenLosses(pieces(tokenizer, ids), *losses)


def _losses(model: Any, ids: Sequence[int]) -> Float[Tensor, " T"]:
    tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
    with torch.no_grad(), evaluating(model), choosing_all(model):
        logits = model(tokens, use_cache=False).logits[0, :-1].float()
    return F.cross_entropy(logits, tokens[0, 1:].to(logits.device), reduction="none")
