"""Which expert each token of a text uses, in every layer, in color or in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tomoe.errors import UserError
from tomoe.evaluation.perplexity import evaluating, forward_sequences
from tomoe.evaluation.results import Count
from tomoe.evaluation.usage import routers
from tomoe.model.hooks import hooked
from tomoe.model.tokens import UNKNOWN, check_ids, prompt_ids
from tomoe.moe.modeling_tomoe import Router, route
from tomoe.plans import always_used

WINDOW = 8  # tokens before one that say how it is written: some tokenizers drop or add spaces at the very beginning


@dataclass(frozen=True)
class RoutingTrace:
    """`experts[layer][token]`, the strongest of a token's experts, for the `tokens`, which joined are the text. A token without
    letters of its own is ""."""

    tokens: list[str]
    experts: list[list[Count]]
    num_experts: Count
    chosen: list[list[list[Count]]] = field(default_factory=list)
    """Of fine-grained experts all that a token chooses, strongest first, [layer][token][k]; a layer in which every token
    uses the same ones, all of them for example, has an empty list. Empty for overlapping experts."""

    def has_choice(self, layer: int) -> bool:
        """Whether tokens of a layer can use different experts."""
        return not self.chosen or bool(self.chosen[layer])

    def shares(self, layer: int) -> list[float]:
        """Return the share of the tokens of each expert of a layer."""
        row = self.experts[layer]
        return [row.count(n) / len(row) for n in range(self.num_experts)]


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. If one character is several tokens, the last has it and the others are "". Unprintable bytes
    become U+FFFD."""
    texts: list[str] = []
    pending = False
    for i in range(len(ids)):
        start = max(0, i - WINDOW)
        before, after = (str(tokenizer.decode(list(ids[start:end]))) for end in (i, i + 1))
        # perhaps a part of a character
        if after.endswith(UNKNOWN) and i + 1 < len(ids):
            texts.append("")
            pending = True
            continue
        piece = after[len(before.rstrip(UNKNOWN) if pending else before) :]
        texts.append("".join(c if c.isprintable() or c in "\n\t" else UNKNOWN for c in piece))
        pending = False
    return texts


def trace_text(model: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> RoutingTrace:
    """Run the first `most` tokens of a text through the model. Raises UserError as `trace_ids`, and for half a character."""
    return trace_ids(model, tokenizer, prompt_ids(tokenizer, text)[:most])


def trace_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> RoutingTrace:
    """Run the tokens through the model once. Raises UserError without tokens, or for a model without routers."""
    if not ids:
        raise UserError("there is no text to route: it has no token")
    top_ks = routers(model)
    if not top_ks:
        raise UserError(
            "this model has no routers: it is dense, its tokens choose inputs, or all of them use the same neurons; give a "
            "folder that `tomoe convert` wrote with experts"
        )
    rows: list[list[int]] = []
    chosen: list[list[list[int]]] = []

    def record(router: Router, _args: Any, logits: Tensor) -> None:
        top_k = top_ks[router]
        if top_k is None:
            rows.append(route(logits)[0][:, 0].tolist())
            return
        # an expert that every token uses says nothing of a token
        always = always_used(router.bias)
        logits = logits.masked_fill(always, -torch.inf)
        free, others = top_k - int(always.sum()), int((~always).sum())
        chooses = 0 < free < others
        ids = route(logits, free if chooses else None)[0]
        ids = ids.gather(1, logits.gather(1, ids).argsort(1, descending=True))
        chosen.append(ids.tolist() if chooses else [])
        rows.append(ids[:, 0].tolist())

    hooks = hooked(router.register_forward_hook(record) for router in top_ks)
    with hooks, torch.no_grad(), evaluating(model):
        tokens = torch.tensor([list(ids)])
        check_ids(tokens, model)
        forward_sequences(model, tokens, torch.ones_like(tokens, dtype=torch.bool), inner=True)
    return RoutingTrace(pieces(tokenizer, ids), rows, next(iter(top_ks)).out_features, chosen)
