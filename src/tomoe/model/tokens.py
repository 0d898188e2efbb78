"""Compares a tokenizer and a text with the rows of the embeddings: a token without a row would end in an index error."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tomoe.errors import Advice, Note, UserError, shortened
from tomoe.files import is_whole
from tomoe.model.shape import max_positions, text_config

_ROWS = "_tomoe_rows"  # a name of ours on a tokenizer: rows of the embeddings of its model
UNKNOWN = "\ufffd"  # how a part of a character is decoded


def fit_tokenizer_(tokenizer: PreTrainedTokenizerBase, rows: int, model: str) -> None:
    """Set the padding token to one that has a row; padding is masked, so any will do. Raises UserError if another token has none,
    unless it is a special one that no text contains (of images, say); `check_text` finds those."""
    setattr(tokenizer, _ROWS, rows)
    padding = tokenizer.pad_token_id
    if padding is not None and padding >= rows:
        warnings.warn(
            f"{model}: the tokenizer pads with {tokenizer.pad_token!r} ({padding}), for which the embeddings have no row; "
            f"its place is taken by {tokenizer.eos_token!r}",
            Note,
            stacklevel=3,
        )
        tokenizer.pad_token = tokenizer.eos_token
    always = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    rare = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} - always
    outside = {i: token for token, i in tokenizer.get_vocab().items() if i >= rows and i not in rare}
    if outside:
        first = min(outside)
        raise UserError(
            f"the tokenizer of {model} has {len(outside)} tokens for which its embeddings of {rows} rows have none, for "
            f"example {shortened(repr(outside[first]))} ({first}); take the tokenizer that belongs to the weights, or "
            "resize the embeddings (resize_token_embeddings) and train them"
        )


def continuation_text(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], written: Sequence[int]) -> str:
    """Return the generated text after a prompt, without special tokens: decoded after the prompt and cut, because many tokenizers
    drop the first space of what they decode."""
    shown = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    # a question that is asked after every few tokens, so the long way is taken only if there is one
    written = list(written)
    if shown(written) != shown(written, skip_special_tokens=True):
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= set(tokenizer.all_special_ids)
        written = [token for token in written if token not in special]
    before, whole = str(shown(list(prompt))), str(shown([*prompt, *written]))
    # a prompt may end within a character, which then looks otherwise in the whole
    return whole[len(os.path.commonprefix([before, whole])) :]  # noqa: RUF071 (texts, not paths)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize a text to be continued: opened as the tokenizer opens a text, but not closed, because some tokenizers append an
    end-of-text token to every text. Raises UserError for half a character."""
    if not is_whole(text):
        raise UserError(f"the text {shortened(ascii(text))} holds half a character: its bytes are not UTF-8")
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    return ids[: len(ids) - _closing(tokenizer)]


def _closing(tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the tokens that the tokenizer itself appends to a text."""
    bare, whole = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    ends = range(len(whole), len(bare) - 1, -1)
    return next((len(whole) - end for end in ends if whole[end - len(bare) : end] == bare), 0)


def check_text(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if a text has a token for which the tokenizer's model has no row."""
    rows = getattr(tokenizer, _ROWS, None)
    if rows is not None and (highest := max(ids, default=0)) >= rows:
        raise _no_row(highest, rows)


def check_ids(ids: Int[Tensor, "*text"], model: torch.nn.Module, more: int = 0) -> None:
    """Raise UserError if a text [..., S], which may grow by `more` tokens, has a token or position without a row in the model's
    embeddings. A Note warns of positions that the model was not made for."""
    rows = getattr(text_config(getattr(model, "config", None)), "vocab_size", None)
    if rows is not None and ids.numel() and (highest := int(ids.max())) >= rows:
        raise _no_row(highest, rows)
    check_length(ids.shape[-1] + more, model)


def check_length(tokens: int, model: torch.nn.Module) -> None:
    """Raise UserError if a text of so many tokens exceeds a model's table of positions, if it has one. Otherwise a Note warns of
    positions that the model was not trained on."""
    highest = max_positions(getattr(model, "config", None))
    if not isinstance(highest, int) or tokens <= highest:
        return
    for name, table in itertools.chain(model.named_parameters(), model.named_buffers()):
        # Some families leave the first rows of their table to padding.
        if ("pos" in name or "wpe" in name) and table.dim() == 2 and 0 <= len(table) - highest <= 2:
            raise UserError(
                f"a text of {tokens:,} tokens is longer than the {highest:,} positions that the model has learned",
                *(Advice(name, "for a shorter one", "N") for name in ("context", "max_new_tokens", "data.seq_len")),
            )
    if tokens > _stretched(model.config, highest):
        warnings.warn(
            f"a text of {tokens:,} tokens is longer than the {highest:,} positions that the model was made for "
            "(max_position_embeddings); what it predicts beyond them is unreliable",
            Note,
            stacklevel=3,
        )


def _stretched(config: Any, positions: int) -> float:
    """Return the positions that a model reaches by scaling rotary embeddings."""
    rope = getattr(text_config(config), "rope_parameters", None) or {}
    # some families have several, by the kind of layer
    found = [rope, *(values for values in rope.values() if isinstance(values, dict))]
    reached = [(r.get("original_max_position_embeddings") or positions) * (r.get("factor") or 1) for r in found]
    return max(positions, *reached)


def _no_row(token: int, rows: int) -> UserError:
    return UserError(
        f"the text holds the token {token}, but the embeddings have {rows} rows; remove it from the text, or prepare the "
        "text with the tokenizer that belongs to the weights"
    )
