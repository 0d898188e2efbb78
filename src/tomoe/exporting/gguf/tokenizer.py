"""A tokenizer as the key-value pairs of a GGUF file.

llama.cpp splits text by its own rules, chosen by name. So a tokenizer whose rules are not recognized here is refused: a
file with the wrong rule would load, and read text as other tokens than the model was trained on.
"""

from __future__ import annotations

import json
import re
from typing import Any

from gguf import GGUFWriter, TokenType
from transformers import PreTrainedTokenizerBase

from tomoe.errors import UserError

# Contractions, words, numbers, other signs, line ends, spaces. Families differ in how they split numbers, and in whether marks
# of letters (accents that are signs of their own) belong to words.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PLAIN, _MARKED = {"letters": r"\p{L}", "marks": ""}, {"letters": r"[\p{L}\p{M}]", "marks": r"\p{M}"}
SPLITS = {
    _WORDS.format(digits="", **_PLAIN): "qwen2",
    _WORDS.format(digits="{1,3}", **_PLAIN): "llama-bpe",
    _WORDS.format(digits="", **_MARKED): "qwen35",
}
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def check_merges(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError for a byte-level tokenizer without merges: llama.cpp loads no file of one, and does not say why."""
    rules = _rules(tokenizer)
    model = rules["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or model["merges"]:
        return
    # another way to split is the deeper reason
    splitting_rule(rules.get("pre_tokenizer"))
    raise UserError(
        "GGUF cannot hold this tokenizer: it has no merges (it reads every byte as a token), and llama.cpp loads none "
        "without; export to a stock architecture"
    )


def write_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Write tokens, merges or scores, special tokens and chat template, for an embedding matrix of `vocab_size` rows. Raises
    UserError if llama.cpp would read text otherwise than the tokenizer does."""
    rules = _rules(tokenizer)
    model = rules["model"]
    if model["type"] != "BPE":
        raise UserError(
            f"GGUF cannot hold this tokenizer: it is {model['type']}, and only byte-pair encoding is known here"
        )
    writer.add_tokenizer_model("llama" if model.get("byte_fallback") else "gpt2")
    tokens, types = _tokens(tokenizer, rules, vocab_size)
    if model.get("byte_fallback"):
        # merges are done in the order of their ids, which is how SentencePiece numbers them
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_add_space_prefix("".join(tokenizer.tokenize("a")).startswith("▁"))
    else:
        writer.add_tokenizer_pre(splitting_rule(rules.get("pre_tokenizer")))
        writer.add_token_list(tokens)
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    writer.add_token_types(types)
    for name in ("bos", "eos", "unk", "pad"):
        token = getattr(tokenizer, f"{name}_token_id", None)
        if token is not None:
            getattr(writer, f"add_{name}_token_id")(int(token))
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(ids) and ids[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _rules(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError("GGUF cannot hold this tokenizer: it has no tokenizer.json (no fast tokenizer)")
    return json.loads(backend.to_str())


def splitting_rule(pre: dict[str, Any] | None) -> str:
    """llama.cpp's name for what a byte-level tokenizer does before it merges. Raises UserError if it has none."""
    steps = pre["pretokenizers"] if pre and pre["type"] == "Sequence" else [pre or {"type": "none"}]
    kinds = [step["type"] for step in steps]
    if kinds[-1] == "ByteLevel" and not steps[-1].get("add_prefix_space"):
        if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
            pattern = steps[0]["pattern"].get("Regex")
            if pattern in SPLITS and steps[0]["behavior"] == "Isolated" and not steps[0]["invert"]:
                return SPLITS[pattern]
    raise UserError(
        f"GGUF cannot hold this tokenizer: llama.cpp is not known to split text as it does ({', '.join(kinds)}); export to a "
        "stock architecture and convert that with a llama.cpp that knows the tokenizer"
    )


def _tokens(tokenizer: Any, rules: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Text and type of every row of the embedding matrix; rows beyond the vocabulary are marked as unused."""
    names = {i: token for token, i in tokenizer.get_vocab().items()}
    added = {entry["id"]: entry for entry in rules.get("added_tokens", ())}
    falls_back = rules["model"].get("byte_fallback")
    tokens, types = [], []
    for i in range(vocab_size):
        token = names.get(i)
        kind = TokenType.NORMAL
        if token is None:
            token, kind = f"[PAD{i}]", TokenType.UNUSED
        elif i in added:
            kind = TokenType.CONTROL if added[i]["special"] else TokenType.USER_DEFINED
            if i == tokenizer.unk_token_id and falls_back:
                kind = TokenType.UNKNOWN
        elif falls_back and BYTE_TOKEN.fullmatch(token):
            kind = TokenType.BYTE
        tokens.append(token)
        types.append(int(kind))
    return tokens, types
