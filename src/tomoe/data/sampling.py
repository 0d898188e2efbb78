"""Text for those who have none: sampled from the dense model itself.

Shapes: B rows, G key/value heads, R query heads of one of them, T tokens that the cache has room for,
C dims of a head, V vocabulary.
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
from tomoe.errors import UserError

_ATTENTION = "tomoe_one_query"
_ROOM = 32  # tokens that the cache grows by
_CACHE_BYTES = 2**30  # keys and values of all rows together; bounds the batch for large models


def sample_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    seed: int,
    batch_size: int = 256,
    length: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Documents of at least `tokens` tokens in all, drawn from the model at temperature 1.

    A document opens as the tokenizer opens a text (with bos where it adds one) and goes on with one token drawn
    uniformly from the ordinary vocabulary; the model writes the rest. Rows of `length` tokens are decoded side by side;
    where a document ends before its row does, the next one opens in its place, and no step is spent on padding.
    `progress(done, total)` hears of tokens. Same model, seed and machine: same tokens, however many processes share the
    rounds of rows out (a base that is itself shared out runs in all of them at once, so these do all rounds together).

    Raises UserError when the model's logits are not finite.
    """
    length = min(length, *_limits(model))
    count = -(-tokens // length)
    rounds = -(-count // max(1, min(batch_size, _CACHE_BYTES // _cache_bytes(model, length))))
    rows = -(-count // rounds)
    opening, vocabulary = _opening(tokenizer), ordinary_tokens(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    written = torch.zeros(rounds, rows, length, dtype=torch.long)
    shared = distributed.size() > 1 and not distributed.shares_out(model)
    own = distributed.share(rounds) if shared else range(rounds)
    with torch.inference_mode(), _one_query_attention(model):
        for done in range(rounds):
            luck = _Luck(rows, length, vocabulary, generator)  # of every round: the next one's comes after it
            if done in own:
                report = None if progress is None else _shifted(progress, done * rows * length, written.numel())
                _write_rows(model, tokenizer, written[done], opening, luck, report)
    if shared:
        distributed.collect_(written)
        if progress is not None:
            progress(written.numel(), written.numel())
    return [document for row in written.flatten(0, 1).tolist() for document in _split(row, tokenizer.eos_token_id)]


def ordinary_tokens(tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " n"]:
    """Ids of the vocabulary without special and added tokens."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return torch.tensor([token for token in range(len(tokenizer)) if token not in special])


class _Luck:
    """All that chance decides in one round, drawn before the model has a say: levels [T, B, 1] in [0, 1) for its tokens
    (the first of a row is none of its), and ordinary tokens [T, B] to open documents with."""

    def __init__(self, rows: int, length: int, vocabulary: Int[Tensor, " n"], generator: torch.Generator):
        self.levels, self.openers = torch.zeros(length, rows, 1), torch.zeros(length, rows, dtype=torch.long)
        for step in range(length):
            if step:
                self.levels[step] = torch.rand(rows, 1, generator=generator)
            self.openers[step] = vocabulary[torch.randint(len(vocabulary), (rows,), generator=generator)]


def _write_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    written: Int[Tensor, "B T"],
    opening: list[int],
    luck: _Luck,
    report: Callable[[int], None] | None,
) -> None:
    """Fill the rows with what the model writes, one token of each at a time."""
    rows, length = written.shape
    cache = Cache(layers=[_GrowingLayer() for _ in range(model.config.num_hidden_layers)])
    # Tokens of the current document of each row so far; an opening and a first random token come before the model's.
    position = torch.zeros(rows, dtype=torch.long)
    starts = torch.tensor([*opening, -1])
    for step in range(length):
        if step == 0:
            drawn = torch.zeros(rows, dtype=torch.long)
        else:
            logits = model(
                input_ids=written[:, step - 1 : step].to(model.device), attention_mask=_filled(step, model.device),
                past_key_values=cache, logits_to_keep=1,
            ).logits[:, -1, : len(tokenizer)]  # fmt: skip
            drawn = draw(logits, luck.levels[step].to(logits.device)).cpu()
        forced = starts[position.clamp(max=len(opening))]
        forced = torch.where(forced < 0, luck.openers[step], forced)
        written[:, step] = torch.where(position <= len(opening), forced, drawn)
        position += 1
        if tokenizer.eos_token_id is not None:
            ended = (written[:, step] == tokenizer.eos_token_id) & (position > len(opening))
            position[ended] = 0
        if report is not None:
            report(rows * (step + 1))


def draw(logits: Float[Tensor, "B V"], uniform: Float[Tensor, "B 1"], rows_at_once: int = 32) -> Int[Tensor, " B"]:
    """One token of softmax(logits) a row by inverting its distribution function at `uniform` in [0, 1).

    A few rows at a time: their float32 copies then stay in the processor's cache. (`torch.multinomial` draws a random
    number for every token of the vocabulary, which costs more than the model's own step.)
    """
    drawn = []
    for some, level in zip(logits.split(rows_at_once), uniform.split(rows_at_once), strict=True):
        weights = some.float()
        weights = (weights - weights.amax(-1, keepdim=True)).exp_().cumsum_(-1)
        total = weights[:, -1:].contiguous()
        if not total.isfinite().all():
            raise UserError("the model's logits are not finite, so no text can be sampled; load it in another dtype")
        drawn.append(
            torch.searchsorted(weights, level * total, right=True).clamp_(max=weights.shape[-1] - 1).squeeze(-1)
        )
    return torch.cat(drawn)


class _GrowingLayer(DynamicLayer):
    """Keys and values of one layer, room for some more tokens taken at a time.

    All of the room is handed out, and a mask tells what is filled: products would copy a part of it first, every time.
    """

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
            shape = (*key_states.shape[:2], _ROOM, key_states.shape[3])
            self.keys = torch.cat([self.keys, key_states.new_zeros(shape)], 2)
            self.values = torch.cat([self.values, value_states.new_zeros(shape)], 2)
        self.keys[:, :, self._used : self._used + 1] = key_states
        self.values[:, :, self._used : self._used + 1] = value_states
        self._used += 1
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._used


def _filled(tokens: int, device: torch.device) -> Float[Tensor, "1 1 1 T"]:
    """What to add to the scores where so many tokens are cached."""
    mask = torch.zeros(1, 1, 1, -(-tokens // _ROOM) * _ROOM, device=device)
    mask[..., tokens:] = -math.inf
    return mask


def _one_query(
    module: torch.nn.Module,
    query: Float[Tensor, "B H 1 C"],
    key: Float[Tensor, "B G T C"],
    value: Float[Tensor, "B G T C"],
    attention_mask: Float[Tensor, "1 1 1 T"],
    scaling: float,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B 1 H C"], None]:
    """Attention of one unpadded query a row: query heads of one key/value head share one matrix product.

    On a CPU the stock kernels take five times as long for one bfloat16 query on grouped heads.
    """
    assert query.shape[2] == 1, "one token at a time"
    grouped = query.view(key.shape[0], key.shape[1], -1, query.shape[3])
    scores = (grouped @ key.transpose(2, 3)).float() * scaling
    weights = (scores + attention_mask).softmax(-1).to(value.dtype)
    return (weights @ value).view(query.shape[0], 1, query.shape[1], -1), None


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _one_query)
ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, lambda *args, **kwargs: None)


@contextmanager
def _one_query_attention(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _limits(model: PreTrainedModel) -> list[int]:
    """Longest rows that need no mask: the positions the model knows, and its sliding window where it has one."""
    config = model.config
    return [config.max_position_embeddings, getattr(config, "sliding_window", None) or config.max_position_embeddings]


def _cache_bytes(model: PreTrainedModel, length: int) -> int:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_dim * length * model.dtype.itemsize)


def _opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer itself puts before a text: bos, or nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and list(tokenizer("a").input_ids[:1]) == [bos] else []


def _split(row: list[int], eos: int | None) -> list[list[int]]:
    documents: list[list[int]] = [[]]
    for token in row:
        documents[-1].append(token)
        if token == eos:
            documents.append([])
    return [document for document in documents if document]


def _shifted(progress: Callable[[int, int], None], before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(before + done, total)
