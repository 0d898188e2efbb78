"""A method in a file outside the package goes the whole way, and what is wrong with one is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tomoe as api
from conftest import tokens
from pico_files import CommandLine, write_pico, write_text
from pico_tokenizer import TOKENIZER
from tomoe.errors import UserError
from tomoe.methods import registry
from tomoe.plans.partition.experts import Experts, Room

OWN = Path(__file__).parents[2] / "examples" / "own_method.py"
# both stock classes hold what becomes of it
SETTINGS = {
    "train.dtype": "float32", "data.seq_len": 16, "data.tokens": 1200, "data.calibration_tokens": 128,
    "data.evaluation_tokens": 128, "experts.num_experts": 8, "experts.expert_size": 32, "target": "glm4_moe",
}  # fmt: skip
ACTIVE = 0.8125


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("own")
    write_pico(place / "dense", vocab_size=len(TOKENIZER), num_hidden_layers=3)
    TOKENIZER.save_pretrained(place / "dense")
    write_text(place / "text.txt")
    return place


def test_it_is_short() -> None:
    assert len(OWN.read_text("utf-8").splitlines()) <= 40


@pytest.mark.slow
@pytest.mark.engine
def test_it_is_converted_repaired_measured_and_exported(place: Path, tomoe: CommandLine) -> None:
    sets = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    common = ["--data", place / "text.txt", "--active", str(ACTIVE), "--set", "method.share_busiest=false"]
    made = tomoe("convert", place / "dense", "--method", f"{OWN}:ByText", *common, *sets, "-o", place / "moe")
    assert made.code == 0, made.err
    plan = api.Plan.load(place / "moe")
    assert plan.recipe["method"] == {"name": f"{OWN}:ByText", "share_busiest": False}
    assert plan.notes["method"]["name"] == "ByText"
    assert plan.notes["repair"]["error_after"] < plan.notes["repair"]["error_before"]
    _, moe = api.evaluate([place / "dense", place / "moe"], device="cpu")
    assert moe.measurement.kl is not None
    for target in ("glm4_moe", "gguf"):
        exported = api.export(place / "moe", target, place / target)
        assert exported.proof is not None
        assert exported.proof.problem is None


def test_a_run_is_not_resumed_with_other_code(place: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN.read_text("utf-8"), "utf-8")
    settings = SETTINGS | {"target": "hf", "repair.mode": "none", "active": ACTIVE, "method.name": f"{own}:ByText"}
    changes = [f"{key}={value}" for key, value in settings.items()]
    recipe = api.Recipe.load(None, [f"model={place / 'dense'}", f'data.sources=["{place / "text.txt"}"]', *changes])
    api.convert(recipe, tmp_path / "moe")
    assert (tmp_path / "moe" / "run" / "method.py").read_bytes() == own.read_bytes()
    api.convert(recipe, tmp_path / "moe", resume=True)
    own.write_text(own.read_text("utf-8") + "\n", "utf-8")
    with pytest.raises(UserError, match=r"own\.py changed since"):
        api.convert(recipe, tmp_path / "moe", resume=True)


def test_it_is_the_same_from_python(place: Path) -> None:
    own = registry.find(f"{OWN}:ByText")
    model = AutoModelForCausalLM.from_pretrained(place / "dense", dtype=torch.float32).eval()
    ids = tokens(8, 16)
    plan = api.plan(model, own(share_busiest=False), ids, active=ACTIVE, recipe=SETTINGS)
    assert plan.active_fraction() == pytest.approx(ACTIVE, abs=0.002)
    repaired = api.repair(plan, model, ids)
    moe = api.fold(model, repaired)
    again = AutoModelForCausalLM.from_pretrained(
        api.save(moe, repaired, place / "saved", tokenizer=TOKENIZER), dtype=torch.float32
    )
    torch.testing.assert_close(again(ids).logits, moe(ids).logits, atol=1e-5, rtol=0)
    # as models and as names
    rows = api.evaluate([model, moe], ids), api.evaluate([place / "dense", place / "saved"], ids, dtype="float32")
    assert [row.name for row in rows[0]] == ["model 1 (LlamaForCausalLM)", "model 2 (ToMoEForCausalLM)"]
    assert rows[0][1].measurement.kl == pytest.approx(rows[1][1].measurement.kl, rel=1e-3)
    same = api.plan(str(place / "dense"), own, ids, active=ACTIVE, recipe=SETTINGS | {"method.share_busiest": False})
    for a, b in zip(plan.layers, same.layers, strict=True):
        assert torch.equal(a.expert_masks, b.expert_masks)
        assert torch.equal(a.router_weight, b.router_weight)


def test_groups_that_do_not_fill_the_room_are_refused() -> None:
    room = Room(layer=3, num_layers=4, num_experts=2, expert_size=3, shared=2, top_k=1, router_bias=True, seed=0)
    Experts(torch.tensor([-1, 0, 0, 0, 1, 1, 1, -1])).check(room)
    with pytest.raises(ValueError, match="layer 3 has 1 shared neurons and experts of"):
        Experts(torch.tensor([-1, 0, 0, 0, 1, 1, 1, 1])).check(room)


FILES = {
    "no class": ("x = 1", "has no class Own"),
    "no method": ("class Own: pass", "is not a method"),
    "an error": ("1 / 0", "cannot be run: ZeroDivisionError"),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, name: str) -> None:
    text, sentence = FILES[name]
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(UserError, match=sentence):
        registry.find(f"{tmp_path / 'own.py'}:Own")


def test_what_is_wrong_with_a_name_or_a_setting_is_said() -> None:
    for name, sentence in (("carved", "did you mean carve"), ("nowhere.py:Own", "no file"), ("x", "FILE.py:CLASS")):
        with pytest.raises(UserError, match=sentence):
            registry.find(name)
    recipe = api.Recipe.load(None, ["method.name=carve", "method.topp=3"])
    with pytest.raises(UserError, match="settings of the method has no key 'topp'"):
        registry.resolve_method(recipe)
    for change, sentence in (("train.steps=3", "train.steps = 0, but it is 3"), ("start=random", "start = carved")):
        more = ["experts.form=overlapping"] if "random" in change else []
        with pytest.raises(UserError, match=sentence):
            registry.resolve_method(api.Recipe.load(None, ["method.name=carve", change, "train.steps=3", *more]))
    for name, target, sentence in (
        ("inputs", "gguf", r"makes \(a choice of inputs\); set target to hf, or method to carve, .* or tomoe"),
        ("carve", "mixtral", r"makes \(experts without overlap\); set target to hf, or method to static or tomoe"),
    ):
        with pytest.raises(UserError, match=f"target {target} does not support what method {name} {sentence}"):
            registry.resolve_method(api.Recipe.load(None, [f"method.name={name}", f"target={target}"]))


def test_keys_are_checked_together_with_the_defaults_of_the_method(tmp_path: Path) -> None:
    own = "import tomoe\nclass Own(tomoe.Method):\n    kind, requires = 'overlapping', {}\n    defaults = {'train.steps': 9}"
    (tmp_path / "own.py").write_text(own)
    keys = [f"method.name={tmp_path / 'own.py'}:Own", "start=random"]
    assert registry.resolve_method(api.Recipe.load(None, keys))[1].train.steps == 9
    with pytest.raises(UserError, match="start = random leaves random masks"):
        registry.resolve_method(api.Recipe.load(None, [*keys, "train.steps=0"]))
    with pytest.raises(UserError, match=r"training takes thousands of passes \(train.steps is 300\)"):
        registry.resolve_method(api.Recipe.load(None, ["method.name=dot_moe", "offload=true", "data.sources=text.txt"]))


def test_a_recipe_that_names_no_method_has_the_one_that_its_keys_are_of() -> None:
    for changes, name in (
        ([], "carve"), (["target=gguf"], "carve"), (["train.steps=1"], "tomoe"), (["start=random", "train.steps=1"], "tomoe"),
        (["attention.pruning=static"], "tomoe"), (["target=mixtral"], "tomoe"), (["method.name=inputs"], "inputs"),
    ):  # fmt: skip
        method, recipe = registry.resolve_method(api.Recipe.load(None, changes))
        assert (method.name, recipe.method.name) == (name, name)
        # once more changes nothing
        assert registry.resolve_method(recipe)[1] == recipe
