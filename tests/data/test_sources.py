"""Folders and files of text: splits, what lies beside them, and text that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from pico_tokenizer import make_tokenizer
from tomoe.data.corpus import prepare_corpus
from tomoe.data.sources import documents, evaluation_documents, jsonl, overlap
from tomoe.errors import Note, UserError
from tomoe.recipe.shared import DataSection


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def write(folder: Path, *names: str) -> None:
    """Files whose text is their name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name if name.lower().endswith(".txt") else json.dumps({"text": name}))


@pytest.mark.parametrize(
    ("names", "learned", "measured"),
    [
        (("data/train-0.jsonl", "data/test-0.jsonl", "data/validation-0.jsonl"), ["data/train-0.jsonl"], "test"),
        (("train/a.txt", "dev/a.txt"), ["train/a.txt"], "validation"),
        # the name of a file says more than that of a folder
        (("test/train_sft.txt", "test/test_sft.txt"), ["test/train_sft.txt"], "test"),
        (("notes.txt", "eval.txt"), ["notes.txt"], "test"),
    ],
)
def test_of_a_folder_with_splits_the_text_to_learn_from_is_read(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, names: tuple[str, ...], learned: list[str], measured: str
) -> None:
    write(tmp_path, *names)
    with pytest.warns(Note, match=r"has splits: of it, .* are read to learn from, and .* are not"):
        assert list(documents(str(tmp_path))) == learned
    name, texts = evaluation_documents(str(tmp_path), tokenizer)
    assert name == f"{tmp_path.name} ({measured})"
    assert not set(texts) & set(learned)


@pytest.mark.parametrize("names", [("test-0.txt", "test-1.txt"), ("latest.txt", "contest.txt"), ("a/train.txt",)])
def test_a_folder_of_one_split_is_all_its_files(tmp_path: Path, names: tuple[str, ...]) -> None:
    write(tmp_path, *names)
    assert sorted(documents(str(tmp_path))) == sorted(names)


def test_what_lies_beside_the_text(tmp_path: Path) -> None:
    """Copies that programs keep are not read, and data of other kinds is named."""
    write(tmp_path, "a.txt", "B.TXT", ".ipynb_checkpoints/a-checkpoint.txt", "__MACOSX/._a.txt", "._a.txt")
    assert list(documents(str(tmp_path))) == ["B.TXT", "a.txt"]
    write(tmp_path, "c.csv", "d.jsonl.gz", "README.md", "dataset_infos.json")
    with pytest.warns(Note, match=r"holds 2 files that are not read \(c\.csv, d\.jsonl\.gz\)"):
        documents(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "the sea".encode("utf-16-le"), "holds null characters, as text in UTF-16 does"),
        ("a.jsonl", b'{"text": "caf\xe9"}', "is not text in UTF-8"),
    ],
)
def test_text_of_another_encoding(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        list(documents(str(tmp_path / name)))
    # problems of tasks are read so, too
    if name.endswith(".jsonl"):
        with pytest.raises(UserError, match=words):
            list(jsonl(tmp_path / name))


def test_half_a_character_is_no_text(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = ['{"text": "whole"}', '{"text": "broken \\ud83d half"}', '{"text": "\\ud83d\\ude00"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    with pytest.warns(Note, match=r"1 of 3 rows of .* are left out; the first: row 2 holds half a character"):
        read = list(documents(str(tmp_path / "a.jsonl")))
    assert read == ["whole", "\U0001f600"]
    assert all(tokenizer(text).input_ids for text in read)


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    for name in ("data/missing.csv", "data/MISSING.TXT", "data/missing.json"):
        with pytest.raises(UserError, match=f"no file or folder {name}"):
            documents(name)


def test_one_text_by_two_names_is_one_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "in/a.txt", "in/b.txt")
    for one, other in (("in/a.txt", f"{tmp_path}/in/../in/a.txt"), ("in", "in/a.txt")):
        assert overlap(one, other)
        assert overlap(other, one)
        with pytest.raises(UserError, match="twice"):
            prepare_corpus(DataSection(sources=(one, other), tokens=100_000), tokenizer, seed=0)
        with pytest.raises(UserError, match="names, too"):
            prepare_corpus(DataSection(sources=(one,), evaluation_source=other, tokens=100_000), tokenizer, seed=0)
    assert overlap("wikitext", "Salesforce/wikitext:wikitext-2-raw-v1")
    for one, other in (("in/a.txt", "in/b.txt"), ("wikitext", "wikitext-103"), ("self", "in")):
        assert not overlap(one, other)
