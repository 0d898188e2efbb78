"""Samples text from the dense model itself, for conversions without text.

Shapes: B rows, H query heads, G key/value heads, T tokens that the cache has room for, C dims of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tomoe import distributed
from tomoe.data.rows import opening_of
from tomoe.errors import UserError
from tomoe.model.shape import ceil_div, head_dim, num_kv_heads, text_config
from tomoe.model.single_query import attend
from tomoe.model.structure import CACHE
from tomoe.progress import StageCallback, no_stage_progress

_ATTENTION = "tomoe_single_query"
ROW_TOKENS = 256  # tokens of a row, unless the text is cut shorter
CACHE_GROWTH = 32  # tokens that the cache grows by
_CACHE_BYTES = 2**30  # keys and values of all rows together; bounds the batch for large models


def sample_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    seed: int,
    batch_size: int = 256,
    length: int = ROW_TOKENS,
    progress: StageCallback = no_stage_progress,
) -> list[list[int]]:
    """Sample documents of at least `tokens` tokens in total from the model at temperature 1.

    A document begins as the tokenizer begins a text, then comes one token drawn uniformly from the ordinary vocabulary; the
    model samples the rest. Rows of `length` tokens are decoded side by side, one document after another in each; `progress`
    counts tokens. Same model, seed and machine: same tokens, however many ranks divide the rounds among them. Raises
    UserError if the model's logits are not finite.
    """
    config = text_config(model.config)
    # longer rows would need a mask
    positions = config.max_position_embeddings
    length = min(length, positions, getattr(config, "sliding_window", None) or positions)
    count = ceil_div(tokens, length)
    row_bytes = 2 * config.num_hidden_layers * num_kv_heads(config) * head_dim(config) * length * model.dtype.itemsize
    rounds = ceil_div(count, max(1, min(batch_size, _CACHE_BYTES // row_bytes)))
    rows = ceil_div(count, rounds)
    vocabulary = ordinary_tokens(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(rounds, rows, length, dtype=torch.long)
    divided = distributed.world_size() > 1 and not distributed.is_sharded(model)
    mine = distributed.rank_indices(rounds) if divided else range(rounds)
    with torch.inference_mode(), _single_query_attention(model):
        for i in range(rounds):

            def report(done: int, before: int = i * rows * length) -> None:
                progress(before + done, ids.numel())

            # drawn for every round: the draws of the next one come after these
            draws = _random_draws(rows, length, vocabulary, generator)
            if i in mine:
                _write_rows(model, tokenizer, ids[i], *draws, report)
    if divided:
        distributed.all_reduce_(ids)
        progress(ids.numel(), ids.numel())
    return [document for row in ids.flatten(0, 1).tolist() for document in _split(row, tokenizer.eos_token_id)]


def ordinary_tokens(tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " n"]:
    """Return the ids of the vocabulary without special and added tokens."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return torch.tensor([token for token in range(len(tokenizer)) if token not in special])


def _random_draws(
    rows: int, length: int, vocabulary: Int[Tensor, " n"], generator: torch.Generator
) -> tuple[Float[Tensor, "T B 1"], Int[Tensor, "T B"]]:
    """Draw all random numbers of one round before the model runs: uniform numbers in [0, 1) to sample with, and ordinary tokens
    to begin documents with."""
    uniforms, first_tokens = torch.zeros(length, rows, 1), torch.zeros(length, rows, dtype=torch.long)
    for step in range(length):
        if step:
            uniforms[step] = torch.rand(rows, 1, generator=generator)
        first_tokens[step] = vocabulary[torch.randint(len(vocabulary), (rows,), generator=generator)]
    return uniforms, first_tokens


def _write_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Int[Tensor, "B T"],
    uniforms: Float[Tensor, "T B 1"],
    first_tokens: Int[Tensor, "T B"],
    report: Callable[[int], None],
) -> None:
    rows, length = ids.shape
    opening = opening_of(tokenizer)
    cache = Cache(layers=[_GrowingLayer() for _ in range(text_config(model.config).num_hidden_layers)])
    # Tokens of each row's current document so far. The first ones are the opening and a random token (-1 here).
    position = torch.zeros(rows, dtype=torch.long)
    beginning = torch.tensor([*opening, -1])
    for step in range(length):
        if step == 0:
            sampled = torch.zeros(rows, dtype=torch.long)
        else:
            logits = model(
                input_ids=ids[:, step - 1 : step].to(model.device),
                attention_mask=_cache_mask(step, model.device),
                logits_to_keep=1,
                **{CACHE: cache},
            ).logits[:, -1, : len(tokenizer)]
            sampled = sample_from_logits(logits, uniforms[step].to(logits.device)).cpu()
        forced = beginning[position.clamp(max=len(opening))]
        forced = torch.where(forced < 0, first_tokens[step], forced)
        ids[:, step] = torch.where(position <= len(opening), forced, sampled)
        position += 1
        if tokenizer.eos_token_id is not None:
            ended = (ids[:, step] == tokenizer.eos_token_id) & (position > len(opening))
            position[ended] = 0
        report(rows * (step + 1))


def sample_from_logits(
    logits: Float[Tensor, "B V"], uniform: Float[Tensor, "B 1"], rows_at_once: int = 32
) -> Int[Tensor, " B"]:
    """Sample one token of softmax(logits) per row, by inverting the distribution function at `uniform` in [0, 1). A few rows at a
    time stay in the processor's cache; `torch.multinomial` would draw a number for every token of the vocabulary."""
    sampled = []
    for rows, level in zip(logits.split(rows_at_once), uniform.split(rows_at_once), strict=True):
        weights = rows.float()
        weights = (weights - weights.amax(-1, keepdim=True)).exp_().cumsum_(-1)
        total = weights[:, -1:].contiguous()
        if not total.isfinite().all():
            raise UserError("the model's logits are not finite, so no text can be sampled; load it in another dtype")
        tokens = torch.searchsorted(weights, level * total, right=True)
        sampled.append(tokens.clamp_(max=weights.shape[-1] - 1).squeeze(-1))
    return torch.cat(sampled)


class _GrowingLayer(DynamicLayer):
    """Keys and values of one layer, allocated some tokens at a time. The complete buffer is returned and masked: matrix products
    would copy a slice of it first, every time."""

    def __init__(self) -> None:
        super().__init__()
        self._used = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        assert self.keys is not None
        assert self.values is not None
        if self._used == self.keys.shape[2]:
            shape = (*key_states.shape[:2], CACHE_GROWTH, key_states.shape[3])
            self.keys = torch.cat([self.keys, key_states.new_zeros(shape)], 2)
            self.values = torch.cat([self.values, value_states.new_zeros(shape)], 2)
        self.keys[:, :, self._used : self._used + 1] = key_states
        self.values[:, :, self._used : self._used + 1] = value_states
        self._used += 1
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._used


def _cache_mask(tokens: int, device: torch.device) -> Float[Tensor, "1 1 1 T"]:
    """Mask added to the scores: 0 for tokens in the cache, -inf for its free space."""
    mask = torch.zeros(1, 1, 1, ceil_div(tokens, CACHE_GROWTH) * CACHE_GROWTH, device=device)
    mask[..., tokens:] = -math.inf
    return mask


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    return attend(query, key, value, attention_mask, scaling), None


@contextmanager
def _single_query_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run the model with `attend`; registering it again changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, lambda *args, **kwargs: None)
    implementation = model.config._attn_implementation
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)


def _split(row: list[int], eos: int | None) -> list[list[int]]:
    documents: list[list[int]] = [[]]
    for token in row:
        documents[-1].append(token)
        if token == eos:
            documents.append([])
    return [document for document in documents if document]
