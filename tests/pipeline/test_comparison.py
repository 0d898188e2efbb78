"""Methods beside each other: every entry is what convert and evaluate give, and nothing is measured twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pico_files import CommandLine, write_pico, write_text
from pico_tokenizer import TOKENIZER
from tomoe.errors import UserError
from tomoe.pipeline import comparison
from tomoe.pipeline.comparison import Entry, compare_methods, variant
from tomoe.recipe.conversion import Recipe

pytestmark = pytest.mark.slow
SMALL = {
    "train.dtype": "float32", "data.seq_len": 16, "data.tokens": 1200, "data.calibration_tokens": 128,
    "data.evaluation_tokens": 128, "experts.num_experts": 64, "repair.tokens": 512,
}  # fmt: skip
METHODS = ["carve", "carve[experts.num_experts=16]", "tomoe[train.steps=1]", "inputs"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("comparison")
    write_pico(place / "dense", vocab_size=len(TOKENIZER), intermediate_size=512)
    TOKENIZER.save_pretrained(place / "dense")
    write_text(place / "text.txt")
    return place


def recipe(place: Path) -> Recipe:
    return Recipe.of({"model": str(place / "dense"), "data.sources": [str(place / "text.txt")], **SMALL})


@pytest.fixture(scope="module")
def entries(place: Path) -> list[Entry]:
    return compare_methods(recipe(place), place / "out", METHODS, [0.8, 0.6])


def test_every_method_is_measured_at_every_budget(entries: list[Entry], place: Path) -> None:
    found = [(entry.method, entry.active, entry.repaired) for entry in entries]
    experts = [(name, active, repaired) for name in METHODS[:3] for active in (0.8, 0.6) for repaired in (False, True)]
    assert found == [("dense", 1.0, False), *experts, ("inputs", 0.8, False), ("inputs", 0.6, False)]
    for entry in entries[1:]:
        assert entry.active_share == pytest.approx(entry.active, abs=0.003)
    kl = {(e.method, e.active, e.repaired): e.measurement.kl for e in entries}
    assert all(kl[name, 0.8, repaired] < kl[name, 0.6, repaired] for name, _, repaired in experts)
    assert (place / "out" / "methods.svg").read_text().startswith("<?xml")
    table = (place / "out" / "comparison.md").read_text()
    assert table.count("\n| ") == len(entries)


def test_an_entry_is_what_convert_and_evaluate_give(entries: list[Entry], place: Path, tomoe: CommandLine) -> None:
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    text = ("--data", place / "text.txt", "--active", "0.6")
    assert tomoe("convert", place / "dense", *text, *sets, "-o", place / "moe").code == 0
    rows = json.loads((place / "moe" / "evaluation.json").read_text())["rows"]
    kept = next(e for e in entries if (e.method, e.active, e.repaired) == ("carve", 0.6, True))
    assert rows[1]["measurement"]["kl"] == pytest.approx(kept.measurement.kl, rel=1e-4)
    assert rows[0]["measurement"]["data_sha256"] == kept.measurement.data_sha256


def test_what_was_measured_is_not_measured_again(
    entries: list[Entry], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measures(*_: object) -> None:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(comparison._Bench, "run", measures)
        again = compare_methods(recipe(place), place / "out", METHODS, [0.8, 0.6])
    assert again[1:] == entries[1:]
    # other settings are others
    monkeypatch.setattr(comparison._Bench, "run", measures)
    with pytest.raises(AssertionError, match="measured again"):
        compare_methods(recipe(place).changed(["seed=1"]), place / "out", ["carve"], [0.8])


def test_a_method_in_a_file_is_what_the_file_holds(place: Path) -> None:
    """Neither an entry nor the plan of an interrupted run outlives an edit."""
    own, out = place / "own.py", place / "own"
    code = "import tomoe\nfrom tomoe.methods.random_split import RandomSplit\n\n\nclass Own(RandomSplit):\n    {body}\n"

    def compared(body: str) -> list[float | None]:
        own.write_text(code.format(body=body))
        entries = compare_methods(recipe(place), out, [f"{own}:Own"], [0.6], repairs=[False])
        return [entry.measurement.kl for entry in entries[1:]]

    other = "def experts(self, seen, room):\n        return tomoe.Experts(super().experts(seen, room).expert_of_neuron.flip(0))"
    first = compared("pass")
    for entry in (out / "entries").glob("*.json"):
        entry.unlink()
    assert compared(other) != first
    assert compared("pass") == first


def test_an_interrupted_comparison_goes_on_to_the_same_numbers(
    entries: list[Entry], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = place / "interrupted"
    measured = comparison._Bench._measure

    def dies(self: comparison._Bench, model: object, name: str, reference: object) -> object:
        if name == "carve at 60%":
            raise KeyboardInterrupt
        return measured(self, model, name, reference)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(comparison._Bench, "_measure", dies)
        with pytest.raises(KeyboardInterrupt):
            compare_methods(recipe(place), out, METHODS[:2], [0.8, 0.6])
    assert len(list((out / "entries").glob("*.json"))) == 2
    again = compare_methods(recipe(place), out, METHODS[:2], [0.8, 0.6])
    wanted = [entry for entry in entries if entry.method in ("dense", *METHODS[:2])]
    assert [(e.method, e.measurement) for e in again] == [(e.method, e.measurement) for e in wanted]


def test_what_is_wrong_is_said_before_anything_runs(place: Path) -> None:
    assert variant("carve[experts.num_experts=16,target=gguf]") == (
        "carve",
        {"experts.num_experts": 16, "target": "gguf"},
    )
    for name, sentence in (("carve[x]", "should read METHOD"), ("carve]", "should read METHOD"), ("cave", "no method")):
        with pytest.raises(UserError, match=sentence):
            compare_methods(recipe(place), place / "none", ["carve", name], [0.7])
    (place / "text.tokens").write_text("the sea", "utf-8")

    def refuse(*_: object) -> None:
        raise AssertionError("something ran")

    with pytest.raises(UserError, match="should end in"):
        compare_methods(
            recipe(place), place / "none", ["carve"], [0.7], text=str(place / "text.tokens"), on_progress=refuse
        )
    assert not (place / "none").exists()
