"""Fine-tuning reads text that the conversion was not fitted to, as far as there is any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pico_files import pico_recipe
from tomoe.data.corpus import Corpus, Sequences
from tomoe.evaluation.compare import shared_tokens
from tomoe.finetuning.text import finetuning_text, fitted_text, unfitted_first
from tomoe.model.loading import load_tokenizer
from tomoe.pipeline.convert import convert
from tomoe.plans import REPAIRED, Plan
from tomoe.progress import no_progress
from tomoe.recipe.finetuning import FinetuneRecipe


def rows(numbers: list[int], length: int = 32) -> Sequences:
    """One sequence of tokens that occur nowhere else for each number; the last token is padding."""
    ids = torch.stack([torch.arange(length) + 1000 * number for number in numbers])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, -1] = False
    return Sequences(ids, mask)


def numbers(sequences: Sequences) -> list[int]:
    return [int(ids[0]) // 1000 for ids in sequences.input_ids]


@pytest.mark.parametrize(
    ("fitted", "tokens", "read", "expected"),
    [
        ([0, 2, 4, 6], 6 * 32, 2, [1, 3, 5]),  # enough text that was not fitted
        ([0, 2, 4, 6], 6 * 32, 3, [1, 3, 5]),
        ([0, 2, 4, 6], 2 * 32, 9, [1, 3]),  # no more than was asked for
        ([0, 2, 4, 6], 6 * 32, 5, [1, 3, 5, 0, 2]),  # fitted text rather than the same again
        ([0, 2, 4, 6], 6 * 32, 99, [1, 3, 5, 0, 2, 4]),
        ([0, 1, 2, 3, 4, 5], 3 * 32, 1, [0, 1, 2]),  # text that was fitted is better than none
        ([9], 6 * 32, 1, [0, 1, 2, 3, 4, 5]),  # nothing fitted changes nothing
    ],
)
def test_text_that_was_not_fitted_comes_first(fitted: list[int], tokens: int, read: int, expected: list[int]) -> None:
    assert numbers(unfitted_first(rows([0, 1, 2, 3, 4, 5]), rows(fitted), tokens, read)) == expected


def test_a_sequence_counts_as_fitted_if_most_of_it_is() -> None:
    text, fitted = rows([0, 1]), rows([0, 1])
    fitted.input_ids[0, 20:] = 7  # 20 of 31 tokens of the first are left
    fitted.input_ids[1, 14:] = 7  # 14 of the second
    assert shared_tokens(text, fitted).sum(1).tolist() == [20, 14]
    assert numbers(unfitted_first(text, fitted, 64, 1)) == [1]


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    """And a carved and repaired conversion, and a trained one."""
    convert(pico_recipe(place, "train.steps=0", "repair.mode=full", "repair.tokens=100"), place / "carved")
    convert(pico_recipe(place, "train.steps=1"), place / "trained")
    return place


def test_only_what_a_carve_was_repaired_on_is_fitted(place: Path) -> None:
    corpus, plan = Corpus.load(place / "carved" / "run" / "corpus.safetensors"), Plan.load(place / "carved")
    repaired = plan.notes[REPAIRED]["tokens"]
    fitted = fitted_text(place / "carved", plan)
    assert fitted is not None
    assert 0 < repaired < corpus.train.tokens
    assert fitted.tokens == repaired + corpus.calibration.tokens
    trained = Corpus.load(place / "trained" / "run" / "corpus.safetensors")
    everything = fitted_text(place / "trained", Plan.load(place / "trained"))
    assert everything is not None
    assert everything.tokens == trained.train.tokens + trained.calibration.tokens


def read(folder: Path, *changes: str) -> Corpus:
    """The text of two steps of fine-tuning a converted folder."""
    recipe = FinetuneRecipe.load(None, ["data.seq_len=16", "train.steps=2", *changes])
    return finetuning_text(recipe, folder, Plan.load(folder), load_tokenizer(str(folder)), None, no_progress)


SIZES = ("data.tokens=1200", "data.calibration_tokens=128", "data.evaluation_tokens=128")


@pytest.mark.parametrize("named", [True, False])
def test_the_same_file_gives_text_that_was_not_fitted(place: Path, named: bool) -> None:
    kept = Corpus.load(place / "carved" / "run" / "corpus.safetensors")
    corpus = read(place / "carved", *SIZES, *([f"data.sources={place / 'text.txt'}"] if named else []))
    fitted = fitted_text(place / "carved", Plan.load(place / "carved"))
    assert fitted is not None
    assert len(corpus.train) >= 2
    covered = 2 * shared_tokens(corpus.train, fitted).sum(1) > corpus.train.mask.sum(1)
    assert not bool(covered.any())
    held_out = {tuple(ids.tolist()) for ids in kept.evaluation.input_ids}
    assert held_out == {tuple(ids.tolist()) for ids in corpus.evaluation.input_ids}


def test_more_text_is_held_out_than_by_the_conversion(place: Path) -> None:
    """The first sequences are held out; behind the conversion's come those that it was carved from."""
    kept, plan = Corpus.load(place / "carved" / "run" / "corpus.safetensors"), Plan.load(place / "carved")
    more = "data.tokens=1200", "data.calibration_tokens=128", "data.evaluation_tokens=384"
    corpus = read(place / "carved", *more, f"data.sources={place / 'text.txt'}")
    fitted = fitted_text(place / "carved", plan)
    assert fitted is not None
    assert not bool((2 * shared_tokens(corpus.evaluation, fitted).sum(1) > corpus.evaluation.mask.sum(1)).any())
    assert kept.evaluation.tokens <= corpus.evaluation.tokens < 384


def test_what_the_conversion_kept_is_the_text_where_none_is_named(place: Path) -> None:
    assert read(place / "trained").digest() == Corpus.load(place / "trained" / "run" / "corpus.safetensors").digest()


@pytest.mark.parametrize("named", [False, True], ids=["kept text", "named text"])
def test_an_evaluation_source_takes_nothing_from_the_text_to_learn_from(
    place: Path, tmp_path: Path, named: bool
) -> None:
    (tmp_path / "other.txt").write_text(" ".join(f"{i} apples" for i in range(90)))
    folder, changes = place / "trained", [*SIZES, *([f"data.sources={place / 'text.txt'}"] if named else [])]
    held_out = read(folder, *changes)
    of_its_own = read(folder, *changes, f"data.evaluation_source={tmp_path / 'other.txt'}")
    assert (held_out.evaluation_name, of_its_own.evaluation_name) == (None, "other.txt")
    assert held_out.train.tokens <= of_its_own.train.tokens <= held_out.tokens_of_sources
    assert (held_out.train.tokens < of_its_own.train.tokens) == named
    assert load_tokenizer(str(folder)).decode(of_its_own.evaluation.input_ids[0]).startswith("0 apples 1")
