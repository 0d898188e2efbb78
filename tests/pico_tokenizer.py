"""A tokenizer of bytes, made on the spot: three special tokens, then one token for each byte."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
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


def make_spaced_tokenizer() -> PreTrainedTokenizerFast:
    """One that writes a space before every text, and leaves it out of whatever it decodes, as that of Llama 2 does."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    bare = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    bare.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bare.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bare.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "b"), ("Ġb", "o"), ("o", "l")]
# what llama.cpp loads: with merges
TOKENIZER = make_tokenizer(opens_with_bos=True, merges=MERGES)
