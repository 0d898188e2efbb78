"""Greedy continuations of many prompts in batches; finished ones leave the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase, StoppingCriteriaList

from tomoe.model.generation import plain
from tomoe.model.hooks import own_rows
from tomoe.model.shape import max_positions, text_config
from tomoe.model.structure import CACHE
from tomoe.model.tokens import continuation_text
from tomoe.progress import StageCallback, no_stage_progress

ROWS = 32
LOOK = 8  # tokens between two looks at whether a text has ended

Ended = Callable[[Sequence[int], Sequence[int]], bool]
"""Whether what was written after a prompt is complete; both in tokens."""


def continuations(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    most: int,
    ended: Callable[[str], bool] = lambda _: False,
    rows: int = ROWS,
    progress: StageCallback = no_stage_progress,
) -> list[list[int]]:
    """Return the most likely tokens after each prompt, at most `most`, in the order of the prompts. A text ends before an
    end-of-text token, when `ended` says so, which is asked every few tokens, or at the end of the context. `rows` prompts of
    similar length are continued at a time; `progress` counts tokens, all `most` of a finished text."""
    written: list[list[int]] = [[] for _ in prompts]
    total = most * len(prompts)

    def over(prompt: Sequence[int], ids: Sequence[int]) -> bool:
        return ended(continuation_text(tokenizer, prompt, ids))

    if not batchable(model):
        for n, prompt in enumerate(prompts):
            written[n] = _alone(model, prompt, most, over)
            progress(most * (n + 1), total)
        return written
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        texts = [written[n] for n in batch]

        def report(done: int, start: int = start) -> None:
            progress(most * start + done, total)

        _continue(model, [prompts[n] for n in batch], texts, most, over, report)
    return written


def batchable(model: Any) -> bool:
    """Whether rows can be padded and can leave the batch: layers cache only keys and values of single tokens."""
    kinds = getattr(text_config(model.config), "layer_types", None) or ()
    plain = all(kind in ("full_attention", "sliding_attention", "chunked_attention") for kind in kinds)
    takes = inspect.signature(model.forward).parameters
    return plain and not getattr(model, "_is_stateful", False) and "logits_to_keep" in takes


@torch.no_grad()
def _alone(model: Any, prompt: Sequence[int], most: int, ended: Ended) -> list[int]:
    positions = max_positions(model.config) or len(prompt) + most
    if (most := min(most, positions - len(prompt))) < 1:
        return []
    ids = torch.tensor([list(prompt)], device=model.device)

    def stop(given: Tensor, *_: Any, **__: Any) -> Tensor:
        written = given[0, len(prompt) :].tolist()
        over = len(written) % LOOK == 0 and ended(prompt, written)
        return torch.tensor([over], device=given.device)

    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=most,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        stopping_criteria=StoppingCriteriaList([stop]),
        pad_token_id=0,
        **plain() | {"stop_strings": None},
    )
    ends = end_tokens(model)
    return [token for token in out[0, len(prompt) :].tolist() if token not in ends]


def end_tokens(model: Any) -> set[int]:
    """Return the end-of-text tokens; chat models have several."""
    given: Any = getattr(model.generation_config, "eos_token_id", None)
    return set(given if isinstance(given, list | tuple) else [given])


@torch.no_grad()
def _continue(
    model: Any,
    prompts: Sequence[Sequence[int]],
    written: Sequence[list[int]],
    most: int,
    ended: Ended,
    report: Callable[[int], None],
) -> None:
    """Generate all rows in one batch until each has ended. Padding is on the left, and masked."""
    width = max(map(len, prompts))
    ends = end_tokens(model)
    positions = max_positions(model.config) or width + most
    numbered = "position_ids" in inspect.signature(model.forward).parameters
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    cache = DynamicCache(config=text_config(model.config))
    alive = list(range(len(prompts)))
    for count in range(1, min(most, positions - width) + 1):
        options: dict[str, Any] = {CACHE: cache}
        if numbered:
            options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        with own_rows(model):
            out = model(tokens, attention_mask=mask, use_cache=True, logits_to_keep=1, **options)
        chosen = out.logits[:, -1].argmax(-1)
        going = []
        for place, (row, token) in enumerate(zip(alive, chosen.tolist(), strict=True)):
            if token in ends:
                continue
            written[row].append(token)
            if count % LOOK or not ended(prompts[row], written[row]):
                going.append(place)
        report(most * (len(prompts) - len(going)) + count * len(going))
        if len(going) < len(alive):
            if not going:
                return
            kept = torch.tensor(going, device=model.device)
            cache.batch_select_indices(kept)
            alive, chosen, mask = [alive[place] for place in going], chosen[kept], mask[kept]
        tokens, mask = chosen[:, None], torch.nn.functional.pad(mask, (0, 1), value=1)
    report(most * len(prompts))
