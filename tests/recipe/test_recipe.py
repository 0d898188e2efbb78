"""Recipes: read, refused, saved, compared."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import pytest

from tomoe.errors import UserError
from tomoe.recipe.conversion import DataSection, Recipe, TrainSection
from tomoe.recipe.files import presets


def test_the_default_recipe_says_in_its_comments_what_the_defaults_are() -> None:
    text = resources.files("tomoe").joinpath("recipe/presets", "default.toml").read_text()
    lines = [line.removeprefix("# ") for line in text.splitlines() if " = " in line or line.startswith("# [")]
    written = tomllib.loads("\n".join(lines))
    assert written["data"].pop("text_column") == "text"
    defaults = Recipe().model_dump(mode="json")
    assert defaults.pop("model") == ""
    assert defaults["data"].pop("text_column") is None
    assert written["experts"].pop("attention_share") == pytest.approx(
        defaults["experts"].pop("attention_share"), abs=1e-3
    )
    assert written == defaults
    assert Recipe.load(None) == Recipe.load("default") == Recipe()


def test_the_paper_preset_is_the_papers_setting() -> None:
    paper = Recipe.load("paper")
    assert (paper.start, paper.experts.attention, paper.experts.num_experts) == ("random", "dynamic", 8)
    train = paper.train
    assert (train.learning_rate, train.schedule, train.steps, train.batch_size) == (1e-3, "constant", 10_000, 1)
    assert (train.weight_decay, train.gradient_clip) == (0.05, 0)
    assert (paper.data.sources, paper.data.block_size) == (("wikitext", "alpaca", "code-alpaca"), 2048)


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_and_survives_a_save(name: str, tmp_path: Path) -> None:
    recipe = Recipe.load(name)
    recipe.save(tmp_path / "recipe.json")
    assert Recipe.load(tmp_path / "recipe.json") == recipe
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.json"]


def test_a_file_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('active = 0.5\n[train]\nsteps = 7\nschedule = "constant"\n')
    recipe = Recipe.load(
        tmp_path / "mine.toml",
        ["train.steps=1e2", "data.sources=a.txt,b.jsonl", "seed=3", "data.text_column=null", "model=7"],
    )
    assert (recipe.active, recipe.seed, recipe.model) == (0.5, 3, "7")
    assert (recipe.train.steps, recipe.train.schedule) == (100, "constant")
    assert (recipe.data.sources, recipe.data.text_column) == (("a.txt", "b.jsonl"), None)
    assert Recipe.load(None, ['data.sources=["a,b.txt"]']).data.sources == ("a,b.txt",)


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Recipe().train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.step=3", ["section train", "'step'", "train.steps"]),
        ("trian.steps=3", ["trian.steps", "train.steps"]),
        ("learning_rate=1", ["train.learning_rate"]),
        ("loss.steps=1", ["section loss", "train.steps"]),
        ("actve=1", ["did you mean active"]),
        ("experts.zzz=1", ["experts.num_experts", "experts.attention"]),
        ("train=3", ["section", "train.steps"]),
        ("train.steps", ["section.key=value"]),
        ("train.steps=-1", ["train.steps is -1", "greater than or equal to 0"]),
        ("train.steps=many", ["train.steps is 'many'", "integer"]),
        ("train.schedule=linear", ["'linear'", "'constant' or 'cosine'"]),
        ("train.learning_rate=0", ["greater than 0"]),
        ("active=0", ["active is 0"]),
        ("active=1.01", ["active is 1.01"]),
        ("active=NaN", ["active", "finite"]),
        ("experts.num_experts=0", ["experts.num_experts is 0"]),
        ("experts.embedding_size=7", ["multiple of 2"]),
        ("data.sources=", ["data.sources is empty"]),
        ("data.tokens=24576", ["data.tokens is 24576", "8192", "16384"]),
    ],
)
def test_what_is_not_allowed_gets_one_sentence(override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        Recipe.load(None, [override])
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", b"[train\n", ["not valid TOML"]),
        ("a.json", b"{", ["not valid JSON"]),
        ("a.json", b"[1]", ["list"]),
        ("a.toml", b"\xff\xfe", ["UTF-8"]),
        ("a.toml", b"train = 3\n", ["train is 3", "section"]),
        ("a.toml", b"[train]\nstep = 3\n", ["a.toml", "train.steps"]),
        ("a.yaml", b"", [".toml or .json"]),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, name: str, content: bytes, words: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        Recipe.load(tmp_path / name)
    for word in words:
        assert word in str(refused.value)


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"default, demo, paper.*did you mean paper"):
        Recipe.load("papr")
    with pytest.raises(UserError, match="cannot read"):
        Recipe.load(tmp_path / "none.toml")


def test_sections_made_in_python_speak_as_plainly() -> None:
    with pytest.raises(UserError, match=r"^section train of the recipe has no key 'step'; did you mean train.steps\?$"):
        TrainSection(step=3)
    with pytest.raises(UserError, match=r"^data.block_size is 4"):
        DataSection(block_size=4)
    with pytest.raises(UserError, match=r"^train.steps is 'x'"):
        Recipe(train={"steps": "x"})


def test_digest_and_differences_see_what_decides_and_nothing_else() -> None:
    recipe = Recipe()
    same = Recipe.load(None, ["device=cpu", "train.log_every=7", "train.save_every=9"])
    assert same != recipe
    assert same.digest() == recipe.digest()
    assert recipe.differences(same) == []
    other = Recipe.load(None, ["train.steps=150", "start=random"])
    assert other.digest() != recipe.digest()
    assert recipe.differences(other) == ['start: "carved" here, "random" there', "train.steps: 500 here, 150 there"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*recipe\.json"):
        Recipe().save(tmp_path / "file" / "recipe.json")
    with pytest.raises(UserError, match=r"cannot write .*folder"):
        Recipe().save(tmp_path / "folder")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder"]
