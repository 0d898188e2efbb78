"""A tokenizer of bytes, made on the spot: three special tokens, then one token for each byte."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>"]


def make_tokenizer(opens_with_bos: bool = False, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """Ids: 0 padding, 1 bos, 2 eos, then bytes; 259 in all, then one for each of `merges`.

    With `opens_with_bos` it puts bos before a text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    bare = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    if opens_with_bos:
        bare.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, name_or_path="pico", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
