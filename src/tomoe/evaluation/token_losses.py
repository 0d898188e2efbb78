"""Two models token by token: what each token cost in both, and which tokens the experts get."""

from __future__ import annotations

from collections import Counter
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
from tomoe.evaluation.routing_trace import RoutingTrace, pieces
from tomoe.moe.modeling_tomoe import choosing_all

# times that an expert must get a token to be known for it, and tokens that are named
OFTEN, TYPICAL = 3, 6


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


def typical_tokens(traces: Sequence[RoutingTrace]) -> list[list[list[str]]]:
    """[layer][expert]: the tokens that most often go to the expert rather than to the others, the clearest first.

    Ranked by count times the share of the token's occurrences that the expert got. A token that it got less than three
    times is left out. Layers in which every token uses the same experts have none.
    """
    first = traces[0]
    found: list[list[list[str]]] = []
    for layer in range(len(first.experts)):
        if not first.has_choice(layer):
            found.append([[] for _ in range(first.num_experts)])
            continue
        pairs = Counter(
            (expert, token.strip())
            for trace in traces
            for token, expert in zip(trace.tokens, trace.experts[layer], strict=True)
        )
        totals = Counter[str]()
        for (_, token), count in pairs.items():
            totals[token] += count
        ranked = sorted(pairs.items(), key=lambda item: (-(item[1] ** 2) / totals[item[0][1]], item[0][1]))
        often = [key for key, count in ranked if count >= OFTEN and key[1]]
        found.append([[t for e, t in often if e == expert][:TYPICAL] for expert in range(first.num_experts)])
    return found
