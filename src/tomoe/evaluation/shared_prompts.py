"""Log-probabilities of several answers to one prompt, which the model reads once.

lm-eval reads the prompt again with every choice of a question. Here the choices continue one cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from tomoe.model.hooks import own_rows
from tomoe.model.shape import text_config
from tomoe.model.structure import CACHE

Request = tuple[Any, list[int], list[int]]
"""As lm-eval has them: prompt and answer in words, tokens of the prompt, tokens of the answer."""
Score = tuple[float, bool]
"""The log-probability of an answer, and whether a greedy choice writes it."""
Prompt = tuple[list[int], list[int]]
"""Tokens of a prompt, and the positions of its answers among the requests."""


def shared_scores(
    model: Any, requests: Sequence[Request], longest: int, rows: int, dtype: torch.dtype | None = None
) -> Iterator[tuple[int, Score]]:
    """Position and score of every request whose prompt is read once for several, at most `rows` answers at a time.

    `longest` is that of `shared_prompts`. `dtype` is that of the softmax; None: that of the logits, as in lm-eval.
    """
    for batch in batches(shared_prompts(requests, longest), rows):
        yield from score_answers(model, requests, batch, dtype)


def shared_prompts(requests: Sequence[Request], longest: int) -> list[Prompt]:
    """Prompts with more than one answer for which reading them once is less work, longest first.

    Left out are those that would be cut, because with an answer they have more than `longest` tokens, and those with an
    answer longer than they are (windows of a text, which have a single token in common).
    """
    answers: dict[tuple[int, ...], list[int]] = {}
    for n, (_, prompt, _) in enumerate(requests):
        answers.setdefault(tuple(prompt), []).append(n)

    def fits(prompt: tuple[int, ...], found: list[int]) -> bool:
        most = max(len(requests[n][2]) for n in found)
        return len(found) > 1 and most <= len(prompt) and len(prompt) + most <= longest

    shared = [(list(prompt), found) for prompt, found in answers.items() if fits(prompt, found)]
    return sorted(shared, key=lambda prompt: (-len(prompt[0]), prompt[0]))


def batches(prompts: Sequence[Prompt], rows: int) -> Iterator[list[Prompt]]:
    """Prompts of one length that have `rows` answers at most together; one at least."""
    for _, alike in groupby(prompts, key=lambda prompt: len(prompt[0])):
        batch: list[Prompt] = []
        for prompt in alike:
            if batch and sum(len(found) for _, found in [*batch, prompt]) > rows:
                yield batch
                batch = []
            batch.append(prompt)
        yield batch


@torch.no_grad()
def continued(
    model: Any, prompts: Int[Tensor, "P S"], rows: Int[Tensor, " B"], answers: Int[Tensor, "B A"]
) -> Float[Tensor, "B A V"]:
    """Logits of every token of `answers`, each of which continues the prompt that `rows` names. Padding is on the right."""
    cache = DynamicCache(config=text_config(model.config))
    with own_rows(model):
        first = model(prompts, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits[rows]
    if answers.shape[1] == 1:
        return first
    cache.batch_select_indices(rows)
    return torch.cat([first, model(answers[:, :-1], use_cache=True, **{CACHE: cache}).logits], 1)


def score_answers(
    model: Any, requests: Sequence[Request], batch: Sequence[Prompt], dtype: torch.dtype | None
) -> Iterator[tuple[int, Score]]:
    """Position and score of each request of `batch`; `dtype` as in `shared_scores`."""
    order = [n for _, found in batch for n in found]
    rows = [row for row, (_, found) in enumerate(batch) for _ in found]
    answers = [torch.tensor(requests[n][2], device=model.device) for n in order]
    prompts = torch.tensor([prompt for prompt, _ in batch], device=model.device)
    logits = continued(model, prompts, torch.tensor(rows, device=model.device), pad_sequence(answers, batch_first=True))
    log_probs = logits.log_softmax(-1, dtype=dtype)
    for n, answer, own in zip(order, answers, log_probs, strict=True):
        own = own[: len(answer)]
        yield n, (float(own.gather(1, answer[:, None]).sum()), bool((own.argmax(-1) == answer).all()))
