"""Text becomes sequences: packed, mixed, kept apart, and the same again every time."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from conftest import make_pico
from pico_tokenizer import make_tokenizer
from tomoe.data import sampling, sources
from tomoe.data.corpus import Corpus, Sequences, pack, prepare_corpus
from tomoe.data.evaluation_text import held_out_text
from tomoe.data.sampling import ordinary_tokens, sample_documents, sample_from_logits
from tomoe.data.sources import documents
from tomoe.errors import UserError
from tomoe.recipe.conversion import DataSection, Recipe

BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def section(*sources: str | Path, **values: Any) -> DataSection:
    small = {"seq_len": 8, "tokens": 400, "calibration_tokens": 40, "evaluation_tokens": 80}
    return DataSection(sources=tuple(map(str, sources)), **small | values)


def lines(path: Path, letter: str, count: int = 60) -> Path:
    """Rows that differ from each other and begin with a letter of their own."""
    path.write_text("\n".join(json.dumps({"text": f"{letter}{row:05d}"}) for row in range(count)))
    return path


def rows(sequences: Sequences) -> Counter[tuple[int, ...]]:
    return Counter(tuple(row) for row in sequences.input_ids.tolist())


def text(tokenizer: PreTrainedTokenizerFast, sequences: Sequences) -> str:
    return tokenizer.decode(sequences.input_ids[sequences.mask])


# ---- packing


def test_documents_are_closed_by_eos_and_cut_into_sequences(tokenizer: PreTrainedTokenizerFast) -> None:
    sequences = pack(tokenizer, ["abc", "de"], seq_len=4)
    assert text(tokenizer, sequences) == "abc<eos>de<eos>"
    assert sequences.mask.tolist() == [[True] * 4, [True, True, True, False]]
    assert sequences.tokens == 7
    # a document that ends in eos gets no second one, and bos opens documents where the tokenizer says so
    assert text(tokenizer, pack(tokenizer, ["ab<eos>"], 8)) == "ab<eos>"
    opened = pack(make_tokenizer(opens_with_bos=True), ["ab", "c"], 8)
    assert text(tokenizer, opened) == "<bos>ab<eos><bos>c<eos>"


def test_no_more_tokens_than_asked_and_no_more_text_read_than_needed(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tomoe.data.corpus._TOKENIZE_CHARACTERS", 7)
    endless = itertools.repeat("abcdefg")
    sequences = pack(tokenizer, endless, seq_len=8, max_tokens=20)
    assert sequences.tokens == 20
    assert len(sequences) == 3


def test_no_text(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="no text"):
        pack(tokenizer, [], 8)


# ---- sources


def test_txt_files_split_at_two_blank_lines_and_into_parts_when_long(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\nstill one\n\n\ntwo\n\n\n\n\n\n")
    assert list(documents(str(tmp_path / "a.txt"))) == ["one\n\nstill one", "two"]
    (tmp_path / "long.txt").write_text("a line of text\n" * 10_000)
    parts = list(documents(str(tmp_path / "long.txt")))
    assert len(parts) == 3
    assert "".join(parts) == "a line of text\n" * 10_000


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt").write_text("b")
    lines(tmp_path / "a.jsonl", "a", 1)
    (tmp_path / "notes.md").write_text("no")
    assert list(documents(str(tmp_path))) == ["a00000", "b"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\xff\xff", ["a.txt", "UTF-8"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', ["line 2", "a.jsonl", "JSON"]),
        ("a.jsonl", b'["text"]', ["line 1", "list"]),
        ("a.parquet", b"PAR1", ["a.parquet", "parquet"]),
        ("a.doc", b"", ["a.doc", ".txt"]),
    ],
)
def test_files_that_are_not_text(tmp_path: Path, name: str, content: bytes, words: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        list(documents(str(tmp_path / name)))
    for word in words:
        assert word in str(refused.value)


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean wikitext\?"):
        documents("wikitex")
    with pytest.raises(UserError, match=r"wikitext.*alpaca.*self.*owner/name"):
        documents("nothing")
    with pytest.raises(UserError, match="no file or folder"):
        documents(str(tmp_path / "none.txt"))
    with pytest.raises(UserError, match="dense model"):
        documents("self")
    with pytest.raises(UserError, match="holds no"):
        list(documents(str(tmp_path)))


def test_the_documentation_of_python_has_each_paragraph_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "phased-in incompatible language changes" in next(sources._docstrings())
    monkeypatch.setattr(sources, "_docstrings", lambda: iter(["First.\n\nLast."] * 2))
    paragraphs = [part for document in documents("python-docs") for part in document.split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs) > 1000
    assert paragraphs[-2:] == ["First.", "Last."]
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match="no pydoc_data"):
        list(documents("python-docs"))


def test_installed_packages_are_mixed_and_each_text_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="no packages with text are installed"):
        list(documents("python-packages"))
    names = [f"{package}/{name}" for package in "abcd" for name in ("x.py", "y.rst", "z.md")]
    texts = {name: f"{name} " * 100 for name in names}
    others = {"e/copy.py": texts["a/x.py"], "e/short.py": "1", "e/data.csv": "1," * 500, "e/long.py": "x\n" * 150_000}
    for path, text in (texts | others).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "e" / "latin.py").write_bytes(b"\xe9" * 1000)
    found = list(documents("python-packages"))
    assert sorted(found) == sorted(texts.values())
    assert found == list(documents("python-packages"))
    # not package after package
    assert len({text[0] for text in found[:4]}) > 2


class Hub:
    """Stands in for the hub: what it holds by (name, split), and what it was asked for."""

    def __init__(self, held: dict[tuple[str, str], list[dict[str, str]]]):
        self.held, self.asked = held, list[tuple[str, str | None, str]]()

    def __call__(self, name: str, config: str | None, *, split: str, **load: object) -> list[dict[str, str]]:
        self.asked.append((name, config, split))
        return self.held[name, split]


def test_wikitext_comes_in_articles_that_join_to_the_standard_text(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = ["", " = A = \n", "", " First \n", " = = Part = = \n", " x = y = \n", "", " = Two words = \n", " Second \n"]
    hub = Hub({("Salesforce/wikitext", "test"): [{"text": line} for line in raw]})
    monkeypatch.setattr(datasets, "load_dataset", hub)
    articles = list(documents("wikitext", "test"))
    assert len(articles) == 2
    assert articles[1].startswith(" = Two words = ")
    assert "\n\n".join(articles) == "\n\n".join(raw)
    assert hub.asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test")]


def test_hub_ids_may_name_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub({("some/set", "train"): [{"text": "x"}]})
    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert [list(documents("some/set:en")), list(documents("some/set"))] == [["x"], ["x"]]
    assert hub.asked == [("some/set", "en", "train"), ("some/set", None, "train")]


def test_a_text_column_is_that_of_sources_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = {"text": "x", "sentence": "y", "body": "z"}
    task = {"instruction": "do", "input": "", "output": "done", "body": "z"}
    names = ("Salesforce/wikitext", "parquet", "tatsu-lab/alpaca", "allenai/c4", "some/set")
    held = {(name, "train"): [row] for name in names} | {("sahil2801/CodeAlpaca-20k", "train"): [task]}
    monkeypatch.setattr(datasets, "load_dataset", Hub(held))
    (tmp_path / "my.jsonl").write_text(json.dumps(row))
    read = {
        source: list(documents(source, text_column="body"))
        for source in ("wikitext", "ptb", "alpaca", "c4", "code-alpaca", "some/set", str(tmp_path / "my.jsonl"))
    }
    assert list(read.values()) == [["x"], ["y"], ["x"], ["x"], ["do\ndone"], ["z"], ["z"]]


@pytest.mark.parametrize("source", ["wikitext", "c4", "ptb", "alpaca", "some/set"])
def test_a_hub_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    def unreachable(*args: object, **load: object) -> None:
        raise ConnectionError("Couldn't reach the Hub. And more.\nAnd more still.")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError) as refused:
        list(documents(source))
    assert "\n" not in str(refused.value)
    for word in (source, "reach the Hub", ".jsonl", "self"):
        assert word in str(refused.value)


def test_a_split_of_its_own_is_the_evaluation(
    monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast
) -> None:
    hub = Hub(
        {("Salesforce/wikitext", split): [{"text": letter * 600}] for split, letter in (("train", "r"), ("test", "e"))}
    )
    monkeypatch.setattr(datasets, "load_dataset", hub)
    corpus = prepare_corpus(section("wikitext"), tokenizer, seed=0)
    assert set(text(tokenizer, corpus.evaluation)) == {"e"}
    assert set(text(tokenizer, corpus.train) + text(tokenizer, corpus.calibration)) == {"r"}
    assert [len(corpus.train), len(corpus.calibration), len(corpus.evaluation)] == [35, 5, 10]


def test_an_evaluation_source_leaves_all_of_the_sources_to_learn_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    other = lines(tmp_path / "other.jsonl", "o")
    hub = Hub({("Salesforce/wikitext", "train"): [{"text": "r" * 600}]})
    monkeypatch.setattr(datasets, "load_dataset", hub)
    for source in (lines(tmp_path / "a.jsonl", "a"), "wikitext"):
        corpus = prepare_corpus(section(source, evaluation_source=str(other)), tokenizer, seed=0)
        assert [len(corpus.train), len(corpus.calibration), len(corpus.evaluation)] == [45, 5, 10]
        assert text(tokenizer, corpus.evaluation).startswith("o00000<eos>o00001")
        assert "o0" not in text(tokenizer, corpus.train) + text(tokenizer, corpus.calibration)

        (tmp_path / "out" / "run").mkdir(parents=True, exist_ok=True)
        corpus.save(tmp_path / "out" / "run" / "corpus.safetensors")
        kept = held_out_text([str(tmp_path / "out")])
        assert kept.name == "other.jsonl"
        assert torch.equal(kept.sequences.input_ids, corpus.evaluation.input_ids)


def test_tokens_to_evaluate_on_do_not_come_out_of_the_sources_if_they_have_a_source() -> None:
    held_out, of_its_own = (
        Recipe.load(None, ["data.evaluation_tokens=4096", *more]).data.tokens
        for more in ([], ["data.evaluation_source=python-docs"])
    )
    assert held_out - of_its_own == 4096
    with pytest.raises(UserError, match=r"exceed data\.calibration_tokens \(40\)$"):
        Recipe.load(None, ["data.tokens=40", "data.calibration_tokens=40", "data.evaluation_source=b.txt"])


def test_a_text_to_learn_from_is_not_the_one_to_evaluate_on(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = lines(tmp_path / "a.jsonl", "a")
    with pytest.raises(UserError, match=r"a\.jsonl, which data.sources names, too"):
        prepare_corpus(section(source, evaluation_source=str(source)), tokenizer, seed=0)
    with pytest.raises(UserError, match="sampled from the dense model"):
        prepare_corpus(section(source, evaluation_source="self"), tokenizer, seed=0)
    with pytest.raises(UserError, match="twice"):
        prepare_corpus(section(source, source), tokenizer, seed=0)


# ---- the corpus


def test_parts_are_disjoint_and_of_the_asked_size(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    corpus = prepare_corpus(section(lines(tmp_path / "a.jsonl", "a")), tokenizer, seed=0)
    assert [len(corpus.train), len(corpus.calibration), len(corpus.evaluation)] == [35, 5, 10]
    together = rows(corpus.train) + rows(corpus.calibration) + rows(corpus.evaluation)
    assert max(together.values()) == 1  # every row of the file differs, so would every sequence


def test_a_mixture_has_equal_parts_by_tokens_even_when_one_source_is_short(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    sources = [
        lines(tmp_path / f"{letter}.jsonl", letter, count) for letter, count in (("a", 1000), ("b", 20), ("c", 1000))
    ]
    for tokens, most in ((200, 72), (4000, 140)):  # b holds 20 rows of 7 tokens
        corpus = prepare_corpus(section(*sources, tokens=tokens), tokenizer, seed=0)
        everything = "".join(text(tokenizer, part) for part in (corpus.train, corpus.calibration, corpus.evaluation))
        written = [everything.count(letter) for letter in "abc"]
        assert max(written) - min(written) <= 2
        assert most - 8 <= 7 * min(written) <= most + 8
        for part in (corpus.train, corpus.calibration, corpus.evaluation):
            assert set("abc") <= set(text(tokenizer, part))


def test_documents_are_taken_from_all_of_a_source(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = lines(tmp_path / "a.jsonl", "a", 1000)  # ten times as many tokens as asked for
    written = [text(tokenizer, prepare_corpus(section(source, tokens=700), tokenizer, seed).train) for seed in (0, 1)]
    for some in written:
        assert set(re.findall(r"a00(\d)\d\d", some)) == set("0123456789")  # rows from every tenth of the file
    assert set(written[0].split("<eos>")) != set(written[1].split("<eos>"))


def test_any_run_of_sequences_is_a_mixture(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    sources = [lines(tmp_path / f"{letter}.jsonl", letter, 500) for letter in "ab"]
    corpus = prepare_corpus(section(*sources, evaluation_tokens=160), tokenizer, seed=0)
    for part in (corpus.train, corpus.evaluation):
        half = text(tokenizer, part.select(torch.arange(len(part) // 2)))
        assert min(half.count("a"), half.count("b")) > 0.15 * len(part)


def test_same_seed_same_bytes(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    data = section(lines(tmp_path / "a.jsonl", "a", 500), lines(tmp_path / "b.jsonl", "b", 500))
    first, again, other = (prepare_corpus(data, tokenizer, seed) for seed in (0, 0, 1))
    assert first.digest() == again.digest() != other.digest()
    first.save(tmp_path / "first")
    again.save(tmp_path / "again")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "again").read_bytes()
    with safe_open(tmp_path / "first", framework="pt") as file:
        about = json.loads(file.metadata()["tomoe_corpus"])
    assert about["tokens"]["train"] == first.train.tokens
    assert (about["tokenizer"], about["seed"], about["sha256"]) == ("pico", 0, first.digest())


def test_a_saved_corpus_reads_back(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    saved = prepare_corpus(section(lines(tmp_path / "a.jsonl", "a")), tokenizer, seed=5)
    saved.save(tmp_path / "corpus.safetensors")
    loaded = Corpus.load(tmp_path / "corpus.safetensors")
    assert loaded.digest() == saved.digest()
    assert (loaded.sources, loaded.tokenizer, loaded.seed) == (saved.sources, "pico", 5)
    assert torch.equal(loaded.evaluation.input_ids, saved.evaluation.input_ids)
    assert loaded.train.input_ids.dtype == torch.long
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "corpus.safetensors"]


def test_a_corpus_that_is_not_what_was_written(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    corpus = prepare_corpus(section(lines(tmp_path / "a.jsonl", "a")), tokenizer, seed=0)
    path = tmp_path / "corpus.safetensors"
    with pytest.raises(UserError, match="cannot write"):
        corpus.save(tmp_path / "a.jsonl" / "corpus.safetensors")
    with pytest.raises(UserError, match="no prepared tokens"):
        Corpus.load(path)
    corpus.save(path)
    raw = path.read_bytes()
    foreign = safetensors.torch.save({"weight": torch.zeros(2)})
    for content, words in (
        (raw[:-9], "complete file"),
        (foreign, "no tokens prepared"),
        (raw[:-1] + bytes([raw[-1] ^ 1]), "were altered"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=words):
            Corpus.load(path)


def test_too_little_text_for_three_sequences_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "a.txt"
    for content, words in (
        ("   \n\n\n\n  ", r"a\.txt holds no text"),
        ("x" * 3, r"4 tokens.*data\.seq_len"),
        ("x" * 15, r"16 tokens.*data\.seq_len"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=words):
            prepare_corpus(section(file), tokenizer, seed=0)
    file.write_text("x" * 16)
    corpus = prepare_corpus(section(file), tokenizer, seed=0)
    assert [len(corpus.train), len(corpus.calibration), len(corpus.evaluation)] == [1, 1, 1]


# ---- batches


@pytest.fixture
def corpus(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Corpus:
    return prepare_corpus(section(lines(tmp_path / "a.jsonl", "a")), tokenizer, seed=0)


def test_a_repair_is_fitted_to_training_text_then_to_calibration_text_and_never_to_what_is_held_out(
    corpus: Corpus,
) -> None:
    length, train = corpus.train.input_ids.shape[1], len(corpus.train)
    every = train + len(corpus.calibration)
    for count in (1, train, train + 1, every, every + 5):
        fitted = corpus.fitting_text(count * length)
        assert len(fitted) == min(count, every)
        assert torch.equal(fitted.input_ids[:train], corpus.train.input_ids[:count])
        assert torch.equal(fitted.input_ids[train:], corpus.calibration.input_ids[: max(0, count - train)])
        assert torch.equal(fitted.mask, torch.cat([corpus.train.mask, corpus.calibration.mask])[:count])


def test_an_epoch_is_every_sequence_once_in_its_own_order(corpus: Corpus) -> None:
    count = len(corpus.train)
    epochs = [[corpus.batch(epoch * count + step, 0, 1, 1, seed=0) for step in range(count)] for epoch in range(2)]
    for batches in epochs:
        assert sum((rows(batch) for batch in batches), Counter()) == rows(corpus.train)
    first, second = ([batch.input_ids.tolist() for batch in batches] for batches in epochs)
    assert first != second
    assert first != [[row] for row in corpus.train.input_ids.tolist()]


def test_batches_need_no_history_and_depend_on_the_seed(corpus: Corpus) -> None:
    asked = corpus.batch(17, 1, 2, 3, seed=4)
    for step in range(17):
        corpus.batch(step, 0, 2, 3, seed=4)
    assert torch.equal(corpus.batch(17, 1, 2, 3, seed=4).input_ids, asked.input_ids)
    assert not torch.equal(corpus.batch(17, 1, 2, 3, seed=5).input_ids, asked.input_ids)


def test_batch_size_and_accumulation_cut_the_same_stream(corpus: Corpus) -> None:
    one_by_one = torch.cat([corpus.batch(step, 0, 1, 1, seed=0).input_ids for step in range(60)])  # more than an epoch
    in_steps = [corpus.batch(step, micro, 5, 3, seed=0) for step in range(4) for micro in range(3)]
    assert torch.equal(torch.cat([batch.input_ids for batch in in_steps]), one_by_one)
    assert in_steps[0].mask.shape == (5, 8)


# ---- text of the model itself


def test_draws_follow_the_distribution_and_never_take_what_is_impossible() -> None:
    probabilities = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0])
    levels = (torch.arange(1000) + 0.5) / 1000
    drawn = sample_from_logits(probabilities.log().expand(1000, -1), levels[:, None], rows_at_once=7)
    assert torch.bincount(drawn, minlength=6).tolist() == [0, 100, 0, 600, 300, 0]
    assert sample_from_logits(probabilities.log()[None], torch.zeros(1, 1)).item() == 1


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(UserError, match="not finite"):
        sample_from_logits(torch.tensor([[0.0, float("nan")]]), torch.zeros(1, 1))


def test_a_row_is_what_the_whole_model_says_of_it(
    dense: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token with cache and own attention = one pass without either, for every family."""
    before = dense.config._attn_implementation
    said: list[Tensor] = []

    # where a document ends, what follows is drawn again
    def without_end(logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([EOS]), -torch.inf)

    def likeliest(logits: Tensor, uniform: Tensor) -> Tensor:
        said.append(logits)
        return without_end(logits).argmax(-1)

    monkeypatch.setattr(sampling, "sample_from_logits", likeliest)
    monkeypatch.setattr(sampling, "ordinary_tokens", lambda tokenizer: torch.arange(3, 64))
    monkeypatch.setattr(sampling, "_split", lambda row, eos: [row])  # so that rows stay rows
    written = sample_documents(dense, tokenizer, tokens=200, seed=0, batch_size=5, length=40)
    assert dense.config._attn_implementation == before
    window = getattr(dense.config, "sliding_window", None) or 40
    assert {len(row) for row in written} == {window}
    assert sum(map(len, written)) >= 200
    rounds = torch.stack(said).unflatten(0, (-1, window - 1))  # [rounds, tokens, rows, V]
    found = rounds.transpose(1, 2).flatten(0, 1)
    for row, logits in zip(written, found, strict=True):
        meant = dense(torch.tensor([row])).logits[0, :-1]
        torch.testing.assert_close(logits, meant[:, : logits.shape[-1]], rtol=0, atol=1e-5)
        assert row[1:] == without_end(logits).argmax(-1).tolist()


def make_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return make_pico("llama", vocab_size=len(tokenizer) + 5)  # padded, as vocabularies often are


@pytest.mark.slow
def test_self_text_is_repeatable_and_opens_with_an_ordinary_token(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model(tokenizer)
    heard: list[tuple[int, int]] = []
    first = sample_documents(model, tokenizer, 500, 7, 8, 16, lambda done, total: heard.append((done, total)))
    assert first == sample_documents(model, tokenizer, 500, 7, 8, 16)
    assert first != sample_documents(model, tokenizer, 500, 8, 8, 16)
    assert sum(map(len, first)) == heard[-1][0] == heard[-1][1] == 512
    assert {token for document in first for token in document} <= set(range(len(tokenizer)))
    assert {document[0] for document in first} <= set(range(3, 259)) == set(ordinary_tokens(tokenizer).tolist())
    assert len({document[0] for document in first}) > 20
    assert all(EOS not in document[:-1] for document in first)


@pytest.mark.slow
def test_rounds_are_divided_among_ranks_and_come_together_to_the_same_text(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, count = make_model(tokenizer), 3
    alone = sample_documents(model, tokenizer, 500, 7, 8, 16)  # four rounds
    parts: list[torch.Tensor] = []
    monkeypatch.setattr(sampling.distributed, "world_size", lambda: count)
    monkeypatch.setattr(sampling.distributed, "all_reduce_", lambda t: parts.append(t.clone()))
    for rank in range(count):
        monkeypatch.setattr(sampling.distributed, "rank", lambda rank=rank: rank)
        sample_documents(model, tokenizer, 500, 7, 8, 16)
    assert [int((part != 0).any((1, 2)).sum()) for part in parts] == [2, 1, 1], "each did its own rounds only"
    monkeypatch.setattr(sampling.distributed, "all_reduce_", lambda t: t.copy_(torch.stack(parts).sum(0)))
    assert sample_documents(model, tokenizer, 500, 7, 8, 16) == alone


def test_a_document_that_ends_early_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(opens_with_bos=True)
    monkeypatch.setattr(sampling, "sample_from_logits", lambda logits, uniform: torch.full((len(logits),), EOS))
    written = sample_documents(make_model(tokenizer), tokenizer, tokens=40, seed=0, batch_size=4, length=10)
    assert [len(document) for document in written] == [3, 3, 3, 1] * 4
    assert all(document[0] == BOS for document in written)
    assert all(document[1] > EOS and document[2] == EOS for document in written if len(document) == 3)


@pytest.mark.slow
def test_a_corpus_of_self_text(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = make_model(tokenizer)
    corpus = prepare_corpus(section("self"), tokenizer, seed=0, model=model)
    assert sum(part.tokens for part in (corpus.train, corpus.calibration, corpus.evaluation)) == 400
    mixed = prepare_corpus(section("self", lines(tmp_path / "a.jsonl", "a")), tokenizer, seed=0, model=model)
    assert mixed.train.tokens < 400
    with pytest.raises(UserError, match="dense model"):
        prepare_corpus(section("self"), tokenizer, seed=0)
