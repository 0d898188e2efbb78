"""Whether models mean one text by the same tokens: what they predict is compared token by token."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from tomoe.data.evaluation_text import EvaluationText
from tomoe.errors import Note, UserError, shortened
from tomoe.model.loading import load_tokenizer

READ_AGAIN = 4096  # tokens of the text that each tokenizer divides anew


def check_readers(names: Sequence[str], text: EvaluationText) -> None:
    """Raises UserError if the tokenizer of a model has other words for the tokens of the text than the one that made them.
    A Note warns of one that would divide the text otherwise, or that cannot be loaded."""
    others = [name for name in dict.fromkeys(names) if name != text.reader]
    if not text.reader or not others:
        return
    ids = text.sequences.input_ids[text.sequences.mask]
    first = load_tokenizer(text.reader)
    for name in others:
        try:
            tokenizer = load_tokenizer(name)
        except UserError as error:
            # weights alone can be measured in the tokens of another model
            warnings.warn(f"{name} reads the text in the tokens of {text.reader}: {error.wrong}", Note, stacklevel=2)
            continue
        _check(name, tokenizer, text.reader, first, ids.unique().tolist(), ids[:READ_AGAIN].tolist())


def _check(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    reader: str,
    first: PreTrainedTokenizerBase,
    used: list[int],
    beginning: list[int],
) -> None:
    special = {*first.all_special_ids, *tokenizer.all_special_ids}
    plain = [token for token in used if token not in special]
    pairs = zip(plain, *(each.convert_ids_to_tokens(plain) for each in (first, tokenizer)), strict=True)
    differ = next((pair for pair in pairs if pair[1] != pair[2]), None)
    if differ:
        token, one, other = differ
        raise UserError(
            f"the tokenizers of {reader} and {name} differ: the token {token} is {shortened(repr(one))} in the one and "
            f"{shortened(repr(other))} in the other, so the same tokens are not the same text; measure {name} by itself"
        )
    again = first.decode(beginning, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    one, other = (each(again, add_special_tokens=False, verbose=False)["input_ids"] for each in (first, tokenizer))
    if one != other:
        warnings.warn(
            f"{name} reads the text in the tokens of {reader}; its own tokenizer divides it otherwise",
            Note,
            stacklevel=3,
        )
