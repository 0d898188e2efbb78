"""Tokens for which the embeddings have no row: padding is another one, the rest is one sentence before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_contract import tiny_model
from tokenizers import processors

from conftest import make_pico
from pico_files import CARVED, CommandLine, fine, refused, write_pico, write_text
from pico_tokenizer import make_tokenizer
from tomoe.errors import Note, UserError
from tomoe.evaluation.writing.humaneval import Prompt
from tomoe.evaluation.writing.run import write
from tomoe.model.generation import generate
from tomoe.model.loading import load_dense, load_tokenizer
from tomoe.model.tokens import check_ids, check_length, prompt_ids


def with_tokens(folder: Path, **special: object) -> Path:
    """The folder of a pico model of 259 rows, whose tokenizer has more tokens."""
    write_pico(folder)
    tokenizer = make_tokenizer()
    if words := special.pop("words", None):
        tokenizer.add_tokens(words)
    if special:
        tokenizer.add_special_tokens(special)
    tokenizer.save_pretrained(folder)
    return folder


def test_padding_without_a_row_is_another_token(tomoe: CommandLine, tmp_path: Path) -> None:
    dense = with_tokens(tmp_path / "dense", pad_token="[PAD]")
    with pytest.warns(Note, match=r"pads with '\[PAD\]' \(259\).*its place is taken by '<eos>'"):
        assert load_tokenizer(str(dense)).pad_token_id == 2
    text = write_text(tmp_path / "text.txt", 40)
    # the last sequence is not full
    text.write_text(text.read_text()[:805])
    done = tomoe("convert", dense, "-o", tmp_path / "moe", "--data", text, *fine(), *CARVED, "--active", "0.6")
    assert done.code == 0, done.err
    assert done.err.count("tomoe: note: ") == 1, done.err
    with pytest.warns(Note):
        load_tokenizer(str(dense))
    assert load_tokenizer(str(tmp_path / "moe")).pad_token == "<eos>"
    done = tomoe("evaluate", dense, "--text", text, "--context", "64")
    assert done.code == 0, done.err


def test_words_without_rows_are_refused(tomoe: CommandLine, tmp_path: Path, text: Path) -> None:
    dense = with_tokens(tmp_path / "dense", words=["sea", "boat"])
    words = "has 2 tokens for which its embeddings of 259 rows have none, for example 'sea' (259)"
    refused(tomoe("doctor", dense), words)
    refused(tomoe("convert", dense, "-o", tmp_path / "moe", "--data", text, *fine(), *CARVED, "--active", "0.6"), words)
    refused(tomoe("evaluate", dense, "--text", text), words)
    refused(tomoe("generate", dense, "the sea"), words)
    assert not (tmp_path / "moe" / "config.json").exists()


def test_an_end_without_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 tokens .* '<end>' \(259\)"):
        load_tokenizer(str(with_tokens(tmp_path / "dense", eos_token="<end>")))


def test_special_tokens_without_rows_may_be_there_but_not_in_a_text(tomoe: CommandLine, tmp_path: Path) -> None:
    """As Gemma 3's token of images, which the models of text alone have, too."""
    dense = with_tokens(tmp_path / "dense", additional_special_tokens=["<image>"])
    text = write_text(tmp_path / "text.txt")
    options = ("--data", text, *fine(), *CARVED, "--active", "0.6", "--repair", "none")
    done = tomoe("convert", dense, "-o", tmp_path / "moe", *options)
    assert done.code == 0, done.err
    text.write_text("<image>" + text.read_text())
    words = "the text holds the token 259, but the embeddings have 259 rows"
    refused(tomoe("convert", dense, "-o", tmp_path / "other", *options), words)
    refused(tomoe("evaluate", dense, "--text", text), words)
    refused(tomoe("generate", dense, "an <image>"), words)
    refused(tomoe("route", tmp_path / "moe", "an <image>"), words)


def test_ids_are_compared_with_the_rows() -> None:
    model = make_pico("llama")
    check_ids(torch.tensor([[0, 63]]), model)
    check_ids(torch.tensor([], dtype=torch.long), model)
    with pytest.raises(UserError, match="token 64, but the embeddings have 64 rows"):
        check_ids(torch.tensor([[0, 64]]), model)


def test_a_prompt_of_other_tokens(tmp_path: Path) -> None:
    write_pico(tmp_path / "dense", vocab_size=32)
    with pytest.raises(UserError, match="embeddings have 32 rows"):
        generate(load_dense(str(tmp_path / "dense"), torch.float32), make_tokenizer(), "the sea")


def test_a_text_longer_than_the_learned_positions_is_refused() -> None:
    dense = tiny_model("opt", max_position_embeddings=64)
    check_length(64, dense)
    with pytest.raises(
        UserError, match="a text of 65 tokens is longer than the 64 positions that the model has learned"
    ):
        check_length(65, dense)
    with pytest.raises(UserError, match="longer than the 64 positions"):
        generate(dense, make_tokenizer(), "abc", max_new_tokens=64)
    # rotary embeddings have no table
    with pytest.warns(Note, match="a text of 65 tokens is longer than the 64 positions that the model was made for"):
        check_length(65, tiny_model("llama", max_position_embeddings=64))
    stretched = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    long = tiny_model("llama", max_position_embeddings=64, rope_parameters=stretched)
    check_length(256, long)
    with pytest.warns(Note, match="a text of 257 tokens"):
        check_length(257, long)


@pytest.mark.parametrize("closes", ["<eos>", "<eos> <eos>"])
def test_a_text_to_continue_is_opened_but_not_closed(closes: str) -> None:
    """Else the model would write what follows the end of a text."""
    closing, opening = make_tokenizer(), make_tokenizer(opens_with_bos=True)
    closing.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<bos> $A {closes}", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    # an end that stands in the text belongs to it
    for text in ("the sea", "the sea<eos>", ""):
        assert prompt_ids(closing, text) == prompt_ids(opening, text) == opening(text).input_ids
    dense = tiny_model("llama", vocab_size=len(opening))
    first, second = (generate(dense, tokenizer, "the sea", max_new_tokens=8) for tokenizer in (closing, opening))
    assert first == second
    first, second = (write(dense, tokenizer, [Prompt("", "", "the sea")], 8).ids for tokenizer in (closing, opening))
    assert first == second


def test_a_prompt_that_grows_beyond_the_positions_is_named_once() -> None:
    dense = tiny_model("llama", vocab_size=259, max_position_embeddings=16)
    with pytest.warns(Note, match="a text of 22 tokens is longer than the 16 positions") as noted:
        generate(dense, make_tokenizer(), "a" * 18, max_new_tokens=4)
    assert len(noted) == 1
