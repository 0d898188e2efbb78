"""Fine-tuning reads text that the conversion was not fitted to, as far as there is any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pico_files import CommandLine, pico_recipe, write_pico, write_text
from tomoe.conversion.convert import convert
from tomoe.data.corpus import Corpus, Sequences
from tomoe.evaluation.overlap import shared_tokens
from tomoe.finetuning.text import fitted_text, unfitted_first
from tomoe.plan import REPAIRED, Plan


def rows(numbers: list[int], length: int = 32) -> Sequences:
    """One sequence of tokens that occur nowhere else for each number; the last token is padding."""
    ids = torch.stack([torch.arange(length) + 1000 * number for number in numbers])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, -1] = False
    return Sequences(ids, mask)


def numbers(sequences: Sequences) -> list[int]:
    return [int(ids[0]) // 1000 for ids in sequences.input_ids]


@pytest.mark.parametrize(
    ("tokens", "read", "expected"),
    [
        (6 * 32, 2, [1, 3, 5]),  # enough text that was not fitted
        (6 * 32, 3, [1, 3, 5]),
        (2 * 32, 9, [1, 3]),  # no more than was asked for
        (6 * 32, 5, [1, 3, 5, 0, 2]),  # fitted text rather than the same again
        (6 * 32, 99, [1, 3, 5, 0, 2, 4]),
    ],
)
def test_text_that_was_not_fitted_comes_first(tokens: int, read: int, expected: list[int]) -> None:
    chosen = unfitted_first(rows([0, 1, 2, 3, 4, 5]), rows([0, 2, 4, 6]), tokens, read)
    assert numbers(chosen) == expected


def test_a_sequence_counts_as_fitted_if_most_of_it_is() -> None:
    text, fitted = rows([0, 1]), rows([0, 1])
    fitted.input_ids[0, 20:] = 7  # 20 of 31 tokens of the first are left
    fitted.input_ids[1, 14:] = 7  # 14 of the second
    assert shared_tokens(text, fitted).sum(1).tolist() == [20, 14]
    assert numbers(unfitted_first(text, fitted, 64, 1)) == [1]


def test_text_that_was_fitted_is_better_than_none() -> None:
    text = rows([0, 1, 2])
    assert numbers(unfitted_first(text, text, 96, 1)) == [0, 1, 2]


def test_nothing_fitted_changes_nothing() -> None:
    text = rows([0, 1, 2])
    assert numbers(unfitted_first(text, rows([9]), 96, 1)) == [0, 1, 2]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, text, a carved and repaired conversion, and a trained one."""
    place = tmp_path_factory.mktemp("place")
    write_pico(place / "dense")
    write_text(place / "text.txt")
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


@pytest.mark.slow
@pytest.mark.usefixtures("always_better")
@pytest.mark.parametrize("named", [True, False])
def test_the_same_file_gives_text_that_was_not_fitted(
    tomoe: CommandLine, place: Path, tmp_path: Path, named: bool
) -> None:
    out, data = tmp_path / "tuned", ["--data", place / "text.txt"] if named else []
    kept = Corpus.load(place / "carved" / "run" / "corpus.safetensors")
    recipe = pico_recipe(place).data
    sizes = [
        word
        for key in ("seq_len", "tokens", "calibration_tokens", "evaluation_tokens")
        for word in ("--set", f"data.{key}={getattr(recipe, key)}")
    ]
    outcome = tomoe("finetune", place / "carved", *data, "-o", out, "--steps", 2, "--seed", 0, *sizes)
    assert outcome.code == 0, outcome.err
    fitted = fitted_text(place / "carved", Plan.load(place / "carved"))
    corpus = Corpus.load(out / "run" / "corpus.safetensors")
    assert fitted is not None
    assert len(corpus.train) >= 2
    covered = 2 * shared_tokens(corpus.train, fitted).sum(1) > corpus.train.mask.sum(1)
    assert not bool(covered.any())
    held_out = {tuple(ids.tolist()) for ids in kept.evaluation.input_ids}
    assert held_out == {tuple(ids.tolist()) for ids in corpus.evaluation.input_ids}
