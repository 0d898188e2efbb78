"""A tokenizer as the key-value pairs of a GGUF file.

llama.cpp splits text by its own rules, chosen by name. So a tokenizer whose rules are not recognized here is refused: a
file with the wrong rule would load, and read text as other tokens than the model was trained on.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

from gguf import GGUFWriter, TokenType
from transformers import PreTrainedTokenizerBase

from tomoe.errors import Note, UserError

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
# Its merges count for tokens of the vocabulary, too; the other name has the same rule and takes such tokens whole.
_BY_MERGES = {"llama-bpe": "smaug-bpe"}
SPACE = "▁"
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def check_merges(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for a byte-level tokenizer without merges: llama.cpp fails to load it without saying why."""
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
    UserError if llama.cpp would tokenize text differently."""
    rules = _rules(tokenizer)
    model = rules["model"]
    if model["type"] != "BPE":
        raise UserError(
            f"GGUF cannot hold this tokenizer: it is {model['type']}, and only byte-pair encoding is known here"
        )
    for problem in (*_model_problems(model), *_reading_problems(rules), *_template_problems(tokenizer)):
        raise UserError(f"GGUF cannot hold this tokenizer: {problem}; export to a stock architecture")
    if differences := list(_differences(rules)):
        message = f"llama.cpp reads some text as other tokens than this tokenizer: {'; '.join(differences)}"
        warnings.warn(message, Note, stacklevel=2)
    writer.add_tokenizer_model("llama" if model.get("byte_fallback") else "gpt2")
    tokens, types = _tokens(tokenizer, rules, vocab_size)
    if model.get("byte_fallback"):
        # merges are done in the order of their ids, which is how SentencePiece numbers them
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_add_space_prefix("".join(tokenizer.tokenize("a")).startswith("▁"))
    else:
        rule = splitting_rule(rules.get("pre_tokenizer"))
        writer.add_tokenizer_pre(rule if model.get("ignore_merges") else _BY_MERGES.get(rule, rule))
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


def _model_problems(model: dict[str, Any]) -> Iterator[str]:
    """List what llama.cpp does not support in merging bytes or characters."""
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            yield f"its byte-pair encoding has a {name}"


def _reading_problems(rules: dict[str, Any]) -> Iterator[str]:
    """List what llama.cpp does not support in normalizing text before merging."""
    steps = _steps(rules.get("normalizer"), "normalizers")
    if not rules["model"].get("byte_fallback"):
        yield from (f"it normalizes text ({step['type']})" for step in steps if step["type"] != "NFC")
        merged = {"".join(m.split(" ") if isinstance(m, str) else m) for m in rules["model"]["merges"]}
        known = {entry["content"] for entry in rules.get("added_tokens", ())} | merged
        unmerged = [t for t in rules["model"]["vocab"] if len(t) > 1 and t not in known]
        if (
            rules["model"].get("ignore_merges")
            and unmerged
            and splitting_rule(rules.get("pre_tokenizer")) not in _BY_MERGES
        ):
            yield f"it takes tokens that no merge makes ({unmerged[0]!r} is one), which llama.cpp does not"
        return
    spaced = False
    for step in (*steps, *_steps(rules.get("pre_tokenizer"), "pretokenizers")):
        replaces = step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": " "}, SPACE)
        metaspace = step["type"] == "Metaspace" and step["replacement"] == SPACE
        # nothing is left to split at when spaces were replaced
        splits = step["type"] == "Split" and step["pattern"] == {"String": " "} and spaced
        prepends = step["type"] == "Prepend" and step["prepend"] == SPACE
        spaced |= replaces or metaspace
        if not (replaces or metaspace or splits or prepends):
            yield f"it changes or splits text before it merges ({step['type']})"
    if not spaced:
        yield f"it does not read spaces as {SPACE}"


def _steps(part: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[several]) if part["type"] == "Sequence" else [part]


def _template_problems(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """List what is added before and after a text besides one bos and one eos token."""
    ids, bare = (tokenizer("a", add_special_tokens=special).input_ids for special in (True, False))
    begins = [tokenizer.bos_token_id] if ids and ids[0] == tokenizer.bos_token_id else []
    ends = [tokenizer.eos_token_id] if ids and ids[-1] == tokenizer.eos_token_id else []
    if ids != [*begins, *bare, *ends]:
        yield f"it reads 'a' as {tokenizer.convert_ids_to_tokens(ids)}, with other tokens around a text than bos and eos"


def _differences(rules: dict[str, Any]) -> Iterator[str]:
    """List what the tokenizer does to rare text and llama.cpp does not, as half sentences."""
    if any(step["type"] == "NFC" for step in _steps(rules.get("normalizer"), "normalizers")):
        yield "it composes letters and accents that are characters of their own (NFC)"
    for setting, what in (("lstrip", "spaces before"), ("rstrip", "spaces behind")):
        if tokens := [entry["content"] for entry in rules.get("added_tokens", ()) if entry.get(setting)]:
            yield f"it drops {what} {' '.join(tokens[:3])}{' ...' if tokens[3:] else ''}"
    if tokens := [entry["content"] for entry in rules.get("added_tokens", ()) if entry.get("single_word")]:
        yield f"it reads {tokens[0]} only where it is a word of its own"


def _rules(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError("GGUF cannot hold this tokenizer: it has no tokenizer.json (no fast tokenizer)")
    return json.loads(backend.to_str())


def splitting_rule(pre: dict[str, Any] | None) -> str:
    """Return llama.cpp's name for a byte-level tokenizer's pre-tokenization. Raises UserError if it has none."""
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
    """Return text and type of every row of the embedding matrix; rows beyond the vocabulary are marked as unused."""
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
