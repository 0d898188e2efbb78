"""Tokenizers that llama.cpp would read otherwise are refused, or their rare differences named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from conftest import make_pico, make_plan
from pico_tokenizer import MERGES, make_spaced_tokenizer, make_tokenizer
from stored_models import write_gguf
from tomoe.data.corpus import Sequences
from tomoe.data.evaluation_text import EvaluationText
from tomoe.errors import Note, UserError
from tomoe.exporting.gguf import tokenizer as gguf_tokenizer
from tomoe.exporting.gguf.llama_cpp import LlamaCpp
from tomoe.exporting.gguf.tokenizer import SPLITS
from tomoe.exporting.gguf.verify import Comparison
from tomoe.exporting.verify import Check
from tomoe.moe.fold import fold
from tomoe.progress import no_progress

pytestmark = pytest.mark.slow

Change = Callable[[PreTrainedTokenizerFast], object]


def by_bytes() -> PreTrainedTokenizerFast:
    return make_tokenizer(opens_with_bos=True, merges=MERGES)


def write(tokenizer: PreTrainedTokenizerFast, path: Path) -> Path:
    write_gguf(make_pico("llama", vocab_size=len(tokenizer) + 5), path, tokenizer)
    return path


def normalizing(step: normalizers.Normalizer) -> Change:
    return lambda tokenizer: setattr(tokenizer.backend_tokenizer, "normalizer", step)


def with_model(**changes: object) -> Change:
    """Other settings of the byte-pair encoding."""

    def change(tokenizer: PreTrainedTokenizerFast) -> None:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        rules["model"] |= changes
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(rules))

    return change


def surrounded(tokenizer: PreTrainedTokenizerFast) -> None:
    template = processors.TemplateProcessing(single="<pad> <bos> $A", special_tokens=[("<bos>", 1), ("<pad>", 0)])
    tokenizer.backend_tokenizer.post_processor = template


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (normalizing(normalizers.Lowercase()), r"it normalizes text \(Lowercase\)"),
        (normalizing(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])), r"it normalizes text \(Strip\)"),
        (normalizing(normalizers.NFKC()), r"it normalizes text \(NFKC\)"),
        (surrounded, ".*with other tokens around a text than bos and eos"),
        (with_model(end_of_word_suffix="</w>"), "its byte-pair encoding has a end_of_word_suffix"),
        (with_model(dropout=0.1), "its byte-pair encoding has a dropout"),
    ],
)
def test_what_llama_cpp_does_not_do_is_refused(tmp_path: Path, change: Change, words: str) -> None:
    tokenizer = by_bytes()
    change(tokenizer)
    with pytest.raises(UserError, match=f"GGUF cannot hold this tokenizer: {words}"):
        write(tokenizer, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("part", "step", "words"),
    [
        ("normalizer", normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(" ", "▁")]), "Lowercase"),
        ("normalizer", normalizers.Replace(Regex(" {2,}"), "▁"), "Replace"),
        ("pre_tokenizer", pre_tokenizers.Digits(individual_digits=True), "Digits"),
        ("normalizer", normalizers.Sequence([]), "it does not read spaces as ▁"),
    ],
)
def test_with_bytes_as_a_last_resort_too(tmp_path: Path, part: str, step: object, words: str) -> None:
    tokenizer = make_spaced_tokenizer()
    setattr(tokenizer.backend_tokenizer, part, step)
    with pytest.raises(UserError, match=f"GGUF cannot hold this tokenizer: .*{words}"):
        write(tokenizer, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (normalizing(normalizers.NFC()), r".*characters of their own \(NFC\)"),
        (lambda t: t.add_tokens([AddedToken("<ask>", rstrip=True)]), "it drops spaces behind <ask>"),
        (lambda t: t.add_tokens([AddedToken("<ask>", lstrip=True)]), "it drops spaces before <ask>"),
        (
            lambda t: t.add_tokens([AddedToken("ask", single_word=True)]),
            "it reads ask only where it is a word of its own",
        ),
    ],
)
def test_what_rare_text_shows_is_named(tmp_path: Path, change: Change, words: str) -> None:
    tokenizer = by_bytes()
    change(tokenizer)
    with pytest.warns(Note, match=f"llama.cpp reads some text as other tokens than this tokenizer: {words}"):
        write(tokenizer, tmp_path / "model.gguf")


@pytest.mark.parametrize("whole", [False, True])
def test_tokens_that_no_merge_makes_are_read_as_the_tokenizer_reads_them(tmp_path: Path, whole: bool) -> None:
    """`ignore_merges` decides: Llama 3 takes such a token, others with the same rule for splitting do not."""
    pytest.importorskip("xllamacpp")
    pattern = next(pattern for pattern, rule in SPLITS.items() if rule == "llama-bpe")
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    bare = json.loads(by_bytes().backend_tokenizer.to_str())
    bare["model"]["vocab"]["boat"] = len(bare["model"]["vocab"])
    bare["model"]["ignore_merges"] = whole
    made = Tokenizer.from_str(json.dumps(bare))
    made.pre_tokenizer = pre_tokenizers.Sequence(splits)
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    ids = tokenizer("boat").input_ids
    assert (len(ids) == 2) is whole
    path = write(tokenizer, tmp_path / "model.gguf")
    llama = LlamaCpp(path, len(tokenizer) + 5, 32, tokenizer.convert_tokens_to_ids("a"), threads=1)
    as_text, as_tokens = (llama.log_probs(prompt, fresh=True) for prompt in ("boat", ids))
    torch.testing.assert_close(as_text, as_tokens, atol=1e-4, rtol=0)
    del llama
    if not whole:
        return
    # a rule without a name of the other kind
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(UserError, match="it takes tokens that no merge makes \\('boat' is one\\)"):
        write(PreTrainedTokenizerFast(tokenizer_object=made, **names), tmp_path / "other.gguf")


def test_what_the_reader_finds_is_named_as_it_was(tmp_path: Path) -> None:
    """The usual tokenizer is written without a word."""
    fields = GGUFReader(write(by_bytes(), tmp_path / "model.gguf")).fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"


def test_the_proof_reads_text_that_the_held_out_text_may_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that takes digits one by one, where the tokenizer merges them, in a text without digits."""
    pytest.importorskip("xllamacpp")
    tokenizer = make_tokenizer(opens_with_bos=True, merges=[*MERGES, ("1", "2")])
    ids = tokenizer("the boat told the bold boat", return_tensors="pt").input_ids
    text = EvaluationText(Sequences(ids, torch.ones_like(ids, dtype=torch.bool)), "a text")
    check = Check(text, "float32", torch.float32, "cpu", no_progress)
    dense = make_pico("llama", vocab_size=len(tokenizer))
    moe = fold(dense, make_plan(dense, "off"))
    found = []
    for rule in ("gpt-2", "smollm"):
        monkeypatch.setattr(gguf_tokenizer, "splitting_rule", lambda pre, rule=rule: rule)
        path = tmp_path / f"{rule}.gguf"
        write_gguf(dense, path, tokenizer)
        comparison = Comparison(path, "f32", moe, tokenizer, 64, check)
        found.append(comparison.text_problem(comparison.open(path)))
    assert found == [None, 'llama.cpp reads "don\'t  12345" as other tokens than the tokenizer does']
