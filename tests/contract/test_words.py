"""Words that the project used to use for standard concepts, and that no user-facing text may use again.

Looked at: what every command prints as help, every string and comment in the source, README and docs.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from conftest import SOURCE
from pico_files import CommandLine
from tomoe.cli import VERBS

ROOT = SOURCE.parents[1]
# pattern -> what to write instead
OLD = {
    r"\bfidelity\b": "distill, KL",
    r"\battention ?= ?\"?none\b": "attention.pruning = off",
    r"\bdynamic V/O\b": "per_token",
    r"\bblock parameters\b": "decoder parameters",
    r"\bactive blocks\b|\bof the blocks\b": "active params, decoder parameters",
    r"\bblocks? of (text|\d+ tokens)\b|\btoken blocks?\b|\bblock_size\b": "sequence, seq_len",
    r"\bg(o|oes|oing|one) on with(?! --)|\bto go on\b|\bgoes on\b": "resume, continue",
    r"\btry-anyway\b": "--skip-memory-check",
    r"\bcount-only\b": "arithmetic is the default, --trial runs stages",
    r"--stream\b|\bstreamed\b": "--offload",
    r"\bshar(e|es|ed|ing) out\b|\bshares? (it|them) out\b": "shard, split",
    r"\bpacked base\b|\bbnb[48]\b|\btorchao8": "quantization = int8, nf4",
    r"\blearn(s|ed)? on\b(?! (the|a|text|calibration|its|these|your))": "fine-tune",
    r"\bheld against\b|\bhold .{1,40} against\b": "verify, compare",
    r"\banew\b": "again",
    r"\b(is|are|be|not|was) to be had\b|\bcan(not)? be had\b": "found, available",
    r"\basked (for )?were\b|\bwere asked for\b": "requested",
    r"\bpatiently\b": "with retries",
    r"\btomoe (fold|fetch)\b": "tomoe apply, known names",
    r"\bin vain\b": "negative results",
    r"\bat the (very )?least\b|\bat the most\b": "at least, at most",
    r"\bgradient_accumulation\b(?!_steps)|\bmax_bad_steps\b": "gradient_accumulation_steps, max_nonfinite_steps",
    r"\b(normalis|quantis|recognis|initialis)(e|ed|es|ing|ation)\b|\blicence\b|\bcolours?\b": "US spelling",
}
PAGES = [path for name in ("README.md", "CONTRIBUTING.md", "docs/index.md") if (path := ROOT / name).is_file()]
PAGES += sorted(path for folder in ("guide", "reference") for path in (ROOT / "docs" / folder).glob("*.md"))
# keys of files and recipes that older versions wrote are still read, and are no text
KEY = re.compile(r"[a-z0-9_.]+")


def old_words(text: str) -> list[str]:
    """The old words in a text, with what to write instead."""
    flat = " ".join(text.split())
    return [
        f"{match[0]!r} (write {new})" for old, new in OLD.items() for match in re.finditer(old, flat, re.IGNORECASE)
    ]


def strings(path: Path) -> list[tuple[int, str]]:
    """Line and text of every comment and string; the fixed parts of an f-string are joined."""
    source = path.read_text("utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    silent: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            silent |= {id(part) for part in node.values}
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            found.append((node.lineno, text))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            found.append((node.lineno, node.value))
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_old_word_in_a_string(path: Path) -> None:
    texts = [(line, text) for line, text in strings(path) if not KEY.fullmatch(text) and "format 1" not in text]
    found = [f"line {line}: {word}" for line, text in texts for word in old_words(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("verb", ["", *(verb.__name__ for verbs in VERBS.values() for verb in verbs)])
def test_no_old_word_in_the_help(tomoe: CommandLine, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = tomoe(*filter(None, [verb, "--help"]))
    assert shown.code == 0, shown.err
    assert not old_words(shown.out)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_old_word_in_the_docs(page: Path) -> None:
    found = [
        f"line {number}: {word}"
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1)
        for word in old_words(line)
    ]
    assert not found, "\n".join(found)


def test_the_old_words_are_found() -> None:
    """The patterns speak of these, and not of their neighbors."""
    for text in ("fidelity 0.5", "0.700 of the\nblocks are active", "go on with --resume or go on with it", "begin anew",
                 "--stream", "tomoe fold PLAN", "the base is shared out", "at the very least"):  # fmt: skip
        assert old_words(text), text
    for text in ("decoder blocks of code", "on the token's own", "learn on text of your own", "it goes one by one"):
        assert not old_words(text), text
