"""Models side by side: tokens that mean other text, names that are alike, and what is left when one of them fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from pico_files import CommandLine, refused, rows_from, write_pico, write_text
from pico_tokenizer import make_tokenizer
from tomoe.errors import Note, UserError
from tomoe.evaluation.compare import titles
from tomoe.evaluation.evaluate import evaluate

SMALL = dict(context=16, tokens=256, dtype="float32")


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_pico(tmp_path / "dense")


def with_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast, tokens: int = 0) -> Path:
    write_pico(folder, **({"vocab_size": tokens} if tokens else {}))
    tokenizer.save_pretrained(folder)
    return folder


def renumbered() -> PreTrainedTokenizerFast:
    """The same tokens, those of bytes in reverse order."""
    rules = json.loads(make_tokenizer().backend_tokenizer.to_str())
    vocabulary = rules["model"]["vocab"]
    last = len(vocabulary) + 2
    rules["model"]["vocab"] = {token: i if i < 3 else last - i for token, i in vocabulary.items()}
    bare = Tokenizer.from_str(json.dumps(rules))
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def test_a_model_whose_tokens_mean_other_text_is_refused(tmp_path: Path, dense: Path, text: Path) -> None:
    other = with_tokenizer(tmp_path / "other", renumbered())
    with pytest.raises(
        UserError, match=r"the tokenizers of .*dense and .*other differ: the token \d+ is .* measure .*other by"
    ):
        evaluate([dense, other], text, **SMALL)
    assert len(evaluate([other], text, **SMALL)) == 1


def test_a_tokenizer_that_divides_the_text_otherwise_is_named(tmp_path: Path, text: Path) -> None:
    """Its tokens mean the same text; it would have taken others of them."""
    merges = [("t", "h")]
    one = with_tokenizer(tmp_path / "one", make_tokenizer(merges=merges), 260)
    bare = json.loads(make_tokenizer(merges=merges).backend_tokenizer.to_str())
    bare["model"]["merges"] = []
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(bare)), pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    with_tokenizer(tmp_path / "other", other, 260)
    with pytest.warns(
        Note, match=r"other reads the text in the tokens of .*one; its own tokenizer would split it differently"
    ):
        evaluate([one, tmp_path / "other"], text, **SMALL)


def test_weights_without_a_tokenizer_are_measured_and_named(tmp_path: Path, dense: Path, text: Path) -> None:
    for file in write_pico(tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    with pytest.warns(Note, match=r"bare reads the text in the tokens of .*dense: cannot load the tokenizer"):
        rows = evaluate([dense, tmp_path / "bare"], text, **SMALL)
    assert rows[1].measurement.kl == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("folders", "shown"),
    [
        (("a/model", "b/model"), ["a/model", "b/model"]),
        (("a/x/model", "b/x/model", "c"), ["a/x/model", "b/x/model", "c"]),
        (("a/one", "b/two"), ["one", "two"]),
    ],
)
def test_folders_of_one_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: Sequence[str], shown: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in folders:
        Path(folder).mkdir(parents=True)
    assert list(titles(folders).values()) == shown
    assert titles(["hub/name", folders[0], folders[0]])["hub/name"] == "hub/name"


def scaled(folder: Path, factor: float) -> Path:
    """A model whose logits are so many times as large."""
    write_pico(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("factor", "words"), [(3000.0, "does not fit a number (mean loss"), (float("nan"), "are not finite numbers")]
)
def test_an_error_of_one_model_keeps_the_rows_of_those_before(
    tomoe: CommandLine, tmp_path: Path, dense: Path, text: Path, factor: float, words: str
) -> None:
    bad, file = scaled(tmp_path / "bad", factor), tmp_path / "rows.json"
    done = tomoe("evaluate", dense, bad, "--text", text, "--context", "16", "--tokens", "256", "--json", file)
    assert done.code == 2
    assert words in done.err
    assert "dense" in done.out
    assert [row.name for row in rows_from(file.read_text())] == ["dense"]


def test_two_tables_need_two_files(tomoe: CommandLine, tmp_path: Path, dense: Path, text: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "rows")
    for other in ("rows", "./rows", "link"):
        files = ("--json", tmp_path / "rows", "--markdown", f"{tmp_path}/{other}")
        refused(tomoe("evaluate", dense, "--text", text, *files), "give each a file of its own")
    assert not (tmp_path / "rows").exists()


def test_a_context_longer_than_the_text_takes_no_memory(dense: Path, text: Path) -> None:
    with pytest.warns(Note, match="longer than the 256 positions"):
        (row,) = evaluate([dense], text, context=10**12, tokens=300, dtype="float32")
    assert row.measurement.context_length == 300
    write_text(text, sentences=1)
    assert evaluate([dense], text, context=10**12, dtype="float32")[0].measurement.context_length < 100
