"""Recipes: read, refused, saved, compared."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import pytest
from pydantic import ValidationError

from tomoe.errors import UserError
from tomoe.methods.registry import resolve_method
from tomoe.recipe.base import presets
from tomoe.recipe.conversion import Recipe, RepairSection, TrainSection
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.recipe.shared import DataSection


def test_the_default_recipe_says_in_its_comments_what_the_defaults_are() -> None:
    text = resources.files("tomoe").joinpath("recipe/presets", "default.toml").read_text()
    lines = [line.removeprefix("# ") for line in text.splitlines() if " = " in line or line.startswith("# [")]
    written = tomllib.loads("\n".join(lines))
    assert written["data"].pop("text_column") == "text"
    defaults = Recipe().model_dump(mode="json")
    assert defaults.pop("model") == ""
    assert defaults["data"].pop("text_column") is None
    assert written["data"].pop("evaluation_source") == "python-docs"
    assert defaults["data"].pop("evaluation_source") is None
    # chosen for the rest: calibration, evaluation and repair
    assert (written["data"].pop("tokens"), defaults["data"].pop("tokens")) == (0, 32_768 + 16_384 + 32_768)
    assert written["attention"].pop("share") == pytest.approx(defaults["attention"].pop("share"), abs=1e-3)
    assert written == defaults
    assert Recipe.load(None) == Recipe.load("default") == Recipe()


def test_the_paper_preset_is_the_papers_setting() -> None:
    paper = Recipe.load("paper")
    assert (paper.start, paper.attention.pruning, paper.experts.num_experts) == ("random", "per_token", 8)
    assert not paper.attention.rotate_values
    train = paper.train
    assert (train.learning_rate, train.schedule, train.steps, train.batch_size) == (1e-3, "constant", 10_000, 1)
    assert (train.weight_decay, train.gradient_clip) == (0.05, 0)
    assert (paper.data.sources, paper.data.seq_len) == (("wikitext", "alpaca", "code-alpaca"), 2048)


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


def test_a_comma_in_a_path_that_is_there_belongs_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a, b,c.txt").touch()
    (tmp_path / "d,e").mkdir()
    read = Recipe.load(None, ["data.sources=wikitext, a, b,c.txt,d,e ,f,"]).data.sources
    assert read == ("wikitext", "a, b,c.txt", "d,e", "f")
    (tmp_path / "mine.toml").write_text('[data]\nsources = "d,e"\n')
    assert Recipe.load(tmp_path / "mine.toml").data.sources == ("d,e",)


def test_what_repair_aims_at_depends_on_learning() -> None:
    recipe = Recipe()
    assert (recipe.repair.mode, Recipe.load("paper").repair.mode) == ("full", "none")
    assert [recipe.repair.target_after(steps) for steps in (0, 1)] == ["half", "local"]
    assert [RepairSection(target="half").target_after(steps) for steps in (0, 1)] == ["half"] * 2


def test_the_ridge_of_a_repair_depends_on_tokens_for_each_neuron() -> None:
    section = RepairSection()
    assert section.ridge_for(10**7, 1536) == 0.01
    assert section.ridge_for(65_536, 1536) == pytest.approx(0.09375)
    assert section.ridge_for(1000, 500) == pytest.approx(2.0)
    assert RepairSection(ridge=0.03).ridge_for(500, 500) == 0.03
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        RepairSection(ridge=-0.1)


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
        ("experts.zzz=1", ["experts.num_experts", "experts.width_multiple"]),
        ("data.seqlen=9", ["did you mean data.seq_len?"]),
        ("zzz=9", ["it has model, seed, device"]),
        ("ofload=true", ["did you mean offload?"]),
        ("train=3", ["section", "train.steps"]),
        ("train.steps", ["section.key=value"]),
        ("train.steps=-1", ["train.steps is -1", "greater than or equal to 0"]),
        ("train.steps=many", ["train.steps is 'many'", "integer"]),
        ("train.schedule=linear", ["'linear'", "'constant' or 'cosine'"]),
        ("train.learning_rate=0", ["greater than 0"]),
        # AdamW would end in an OverflowError in its first step
        ("train.learning_rate=1e38", ["train.learning_rate is 1e+38", "at most 1e+37"]),
        ("active=70", ["active is 70, but it should be at most 1; 70 % is 0.7"]),
        ("train.weight_decay=100", ["train.weight_decay is 100", "train.learning_rate 0.01", "well below 1"]),
        ("active=0", ["active is 0"]),
        ("active=1.01", ["active is 1.01"]),
        ("active=NaN", ["active", "finite"]),
        ("experts.num_experts=-1", ["experts.num_experts is -1"]),
        ("experts.num_experts=257", ["experts.num_experts is 257"]),
        ("experts.embedding_size=7", ["multiple of 2"]),
        ("data.sources=", ["data.sources is empty"]),
        ("data.tokens=49152", ["data.tokens is 49152", "32768", "16384"]),
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
        # a key that Python uses
        ("a.json", b'{"self": 1}', ["no key 'self'"]),
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


def test_recipes_made_in_python_speak_as_plainly() -> None:
    with pytest.raises(UserError, match=r"^section train of the recipe has no key 'step'; did you mean train.steps\?$"):
        Recipe(train={"step": 3})
    with pytest.raises(UserError, match=r"^data.seq_len is 4"):
        Recipe(data={"seq_len": 4})
    with pytest.raises(UserError, match=r"^train.steps is 'x'"):
        Recipe(train={"steps": "x"})
    with pytest.raises(UserError, match=r"^train.dtype is float16, .* train.steps is 1; choose bfloat16"):
        Recipe(train={"dtype": "float16", "steps": 1})
    with pytest.raises(ValidationError, match="step"):
        TrainSection(step=3)


def test_digest_and_differences_see_what_decides_and_nothing_else() -> None:
    recipe = Recipe()
    same = Recipe.load(None, ["device=cpu", "train.log_every=7", "train.save_every=9"])
    assert same != recipe
    assert same.digest() == recipe.digest()
    assert recipe.differences(same) == []
    other = Recipe.load(None, ["train.steps=50", "loss.objective=lm"])
    assert other.digest() != recipe.digest()
    assert recipe.differences(other) == ['loss.objective: "kl" here, "lm" there', "train.steps: 0 here, 50 there"]


def test_there_is_as_much_text_as_the_rest_of_the_recipe_needs() -> None:
    """Calibration and evaluation (49,152 tokens), and what the repair is fitted to or the steps read once."""
    recipe = Recipe()
    for change, tokens in (
        ("seed=0", 49_152 + 32_768),
        ("repair.tokens=106496", 16_384 + 106_496),
        ("repair.mode=none", 49_152 + 512),
        ("repair.tokens=1024", 49_152 + 512),
        ("data.evaluation_tokens=8192", 40_960 + 32_768),
        ("train.steps=50", 49_152 + 32_768),
        ("train.steps=80", 49_152 + 40_960),
        ("train.steps=500", 100_000),
        ("data.calibration_tokens=200000", 16_384 + 200_000 + 512),
        ("data.tokens=90000", 90_000),
    ):
        changed = recipe.changed([change])
        assert changed.data.tokens == tokens, change
        # chosen anew with every change, unless it was given
        assert changed.changed(["data.tokens=0"]) == recipe.changed([change, "data.tokens=0"])
        assert changed.changed(["repair.tokens=98304", "repair.mode=full"]).data.tokens >= min(tokens, 16_384 + 98_304)
    assert FinetuneRecipe().data.tokens == 100_000
    assert FinetuneRecipe(train={"steps": 10, "batch_size": 2}).data.tokens == 24_576 + 10 * 2 * 512


def test_a_random_start_has_to_learn() -> None:
    with pytest.raises(UserError, match=r"start = random leaves random masks .*train.steps"):
        Recipe(start="random")
    assert Recipe(start="random", train={"steps": 1}).experts.form == "overlapping"


@pytest.mark.parametrize("change", ["start=random", "target=mixtral"])
def test_experts_overlap_where_fine_ones_have_no_place_unless_a_form_was_named(change: str) -> None:
    learning = "train.steps=500"
    fine, overlapping = Recipe.load(None, [learning]), Recipe.load(None, [learning, change])
    assert (fine.experts.form, fine.experts.num_experts) == ("fine", 0)
    assert (overlapping.experts.form, overlapping.experts.num_experts) == ("overlapping", 8)
    # what was implied does not stay when its reason goes
    assert overlapping.changed([f"{change.split('=')[0]}={'carved' if 'start' in change else 'hf'}"]) == fine
    assert Recipe.load(None, [learning, change, "experts.num_experts=4"]).experts.num_experts == 4
    assert Recipe.load(None, [learning, "experts.form=overlapping"]).changed(["experts.form=fine"]) == fine
    with pytest.raises(UserError, match=r"experts.form"):
        Recipe.load(None, [learning, change, "experts.form=fine"])
    with pytest.raises(UserError, match=r"num_experts is 0, .* but experts.form is overlapping"):
        Recipe.load(None, [learning, change, "experts.num_experts=0"])


@pytest.mark.parametrize("target", ["glm4_moe", "gguf"])
def test_fine_experts_of_a_stock_form_share_more_unless_a_share_was_named(target: str) -> None:
    usual = Recipe()
    stock = usual.changed([f"target={target}"])
    assert (usual.experts.shared, stock.experts.shared) == (0.4, 0.75)
    assert stock.changed(["target=hf"]) == usual  # what was implied does not stay when its reason goes
    assert Recipe.load(None, [f"target={target}", "experts.shared=0.4"]).experts.shared == 0.4
    # a run that recorded all of its keys keeps them
    assert Recipe(**usual.model_dump(mode="json") | {"target": target}).experts.shared == 0.4


def test_dims_chosen_for_each_token_from_a_random_start_are_those_of_the_model_unless_told() -> None:
    random = ["start=random", "train.steps=5", "attention.pruning=per_token"]
    recipe = Recipe.load(None, random)
    assert not recipe.attention.rotate_values
    assert Recipe.load(None, [*random, "attention.rotate_values=true"]).attention.rotate_values
    assert recipe.changed(["start=carved"]).attention.rotate_values
    assert recipe.changed(["attention.pruning=static"]).attention.rotate_values
    assert not Recipe.load(None, random[2:]).changed(random[:2]).attention.rotate_values
    assert not Recipe(**recipe.model_dump(mode="json")).attention.rotate_values


def test_inputs_need_little_text_and_nothing_is_sampled() -> None:

    def data_of(*changes: str) -> DataSection:
        return resolve_method(Recipe.load(None, ["model=m", "method.name=inputs", *changes]))[1].data

    data = data_of()
    assert data.sources == ("python-docs",)
    assert (data.calibration_tokens, data.evaluation_tokens, data.tokens) == (2048, 2048, 4096 + 256)
    given = data_of("data.sources=self", "data.evaluation_tokens=99", "data.seq_len=64")
    assert (given.sources, given.evaluation_tokens, given.seq_len) == (("self",), 99, 64)
    assert resolve_method(Recipe.load(None, ["model=m"]))[1].data.sources == ("self",)
