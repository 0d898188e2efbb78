"""The plan of the form `inputs`: what it counts, what comes back from disk, and what a damaged or hostile file may hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tomoe.errors import UserError
from tomoe.model.shape import ModelShape
from tomoe.moe.modeling_tomoe import ToMoEConfig
from tomoe.plans import InputsPlan, PathPoint, Plan, read_plan

# 2 layers of 8 x 12: MLPs of 3 x 8 x 12 weights, other matrices of 64 in each layer
SHAPE = ModelShape(num_layers=2, hidden_size=8, mlp_size=12, other_params=128)
TOTAL = 2 * (3 * 8 * 12) + 128
WIDTHS = {"up": [8, 8], "down": [12, 12]}
COLUMNS = {"up": [24, 24], "down": [8, 8]}


def fraction(up: list[int], down: list[int]) -> float:
    """By hand: weights that are not read, of all."""
    return 1 - (24 * (16 - sum(up)) + 8 * (24 - sum(down))) / TOTAL


def point(up: list[int], down: list[int]) -> PathPoint:
    return PathPoint(fraction(up, down), {"up": up, "down": down})


PATH = (point([8, 8], [12, 12]), point([6, 8], [9, 12]), point([2, 4], [3, 6]))


def make(active: float = 0.5, **changes: Any) -> InputsPlan:
    names = {"up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"]}
    return InputsPlan(
        **{"shape": SHAPE, "names": names, "widths": WIDTHS, "columns": COLUMNS, "path": PATH, "active": active}
        | changes
    )


def config_of(path: list[dict[str, Any]]) -> ToMoEConfig:
    return ToMoEConfig(
        tomoe_dense_type="llama",
        tomoe_dense_class="LlamaForCausalLM",
        tomoe_expert_form="inputs",
        tomoe_mlps=["model.layers.0.mlp", "model.layers.1.mlp"],
        tomoe_projections=make().names,
        tomoe_input_path=path,
    )


def test_it_counts_the_weights_that_are_read() -> None:
    assert PATH[0].active == 1.0
    plan = make(PATH[1].active)
    assert plan.inputs() == {"up": [6, 8], "down": [9, 12]}
    assert plan.active_fraction() == pytest.approx(fraction([6, 8], [9, 12]))
    first, second = plan.describe()
    assert first["up"] == 6 / 8
    assert first["down"] == 9 / 12
    assert second["up"] == 1.0
    assert (first["active"] + second["active"]) / 2 == pytest.approx(plan.active_fraction())
    assert plan.totals()["decoder_params"] == TOTAL


def test_between_points_numbers_move_evenly_and_the_config_says_the_same() -> None:
    middle = (PATH[1].active + PATH[2].active) / 2
    assert make(middle).inputs() == {"up": [4, 6], "down": [6, 9]}
    assert make(1.0).inputs() == WIDTHS
    config = config_of([{"active": k.active, **k.inputs} for k in PATH])
    for i in range(21):
        active = PATH[2].active + (1 - PATH[2].active) * i / 20
        config.tomoe_active = active
        found = {kind: [config.layer_inputs(kind, layer) for layer in range(2)] for kind in WIDTHS}
        assert found == make(active).inputs()


def test_a_config_whose_fractions_do_not_fall_is_refused() -> None:
    for fractions in ((1.0, 0.7, 0.7), (0.9, 0.7, 0.5), (1.0, 1.0, 0.5), (0.7, 0.7, 0.7), (1.0, 0.5, 0.7)):
        path = [{"active": a, **k.inputs} for a, k in zip(fractions, PATH, strict=True)]
        with pytest.raises(ValueError, match="where a falling fraction should be"):
            config_of(path)


def test_it_comes_back_from_disk(tmp_path: Path) -> None:
    plan = make(source="abc", notes={"steps": 0, "seq_len": 8}, recipe={"active": 0.5})
    plan.save(tmp_path)
    assert read_plan(tmp_path) == plan
    before = (tmp_path / "plan.json").read_bytes()
    plan.save(tmp_path)
    assert (tmp_path / "plan.json").read_bytes() == before
    with pytest.raises(UserError, match=r"uses sparse inputs.* needs experts"):
        Plan.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    {
        "path that rises": ({"path": (PATH[0], PATH[2], PATH[1])}, "from more inputs to fewer"),
        "one point": ({"path": PATH[:1]}, "does not begin with all inputs"),
        "not all inputs": ({"path": PATH[1:]}, "does not begin with all inputs"),
        "fraction that is not so": ({"path": (*PATH[:2], replace(PATH[2], active=0.4))}, "says 0.4000 active"),
        "no input": ({"path": (*PATH[:2], point([0, 4], [3, 6]))}, "from more inputs to fewer"),
        "layers": ({"widths": {"up": [8], "down": [12, 12]}}, "has not 2 sizes"),
        "kinds": ({"columns": {"up": [24, 24]}}, "other kinds"),
        "out of reach": ({"active": 0.1}, "does not reach"),
    }.values(),
)
def test_parts_that_contradict_each_other_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(**changes)


@pytest.mark.parametrize(
    "damage",
    [
        lambda head: head.pop("path"),
        lambda head: head["shape"].update(num_layers=10**9),
        lambda head: head["names"].update(gate=[]),
        lambda head: head["names"].update(up=["a", 3]),
        lambda head: head["widths"].update(up="88"),
        lambda head: head["path"][1]["inputs"].update(up=[6, -1]),
        lambda head: head["path"][1]["inputs"].update(up=[6, 2**40]),
        lambda head: head["path"][1].update(active="0.5"),
        lambda head: head.update(active=float("nan")),
        lambda head: head.update(path={"active": 1}),
        lambda head: head.update(notes=[]),
        lambda head: head.update(recipe="none"),
    ],
)
@pytest.mark.usefixtures("as_shipped")
def test_a_damaged_file_is_said_in_a_sentence(tmp_path: Path, damage: Callable[[dict[str, Any]], Any]) -> None:
    make().save(tmp_path)
    head = json.loads((tmp_path / "plan.json").read_text())
    damage(head)
    (tmp_path / "plan.json").write_text(json.dumps(head))
    with pytest.raises(UserError, match=r"plan") as refused:
        read_plan(tmp_path)
    assert "\n" not in str(refused.value)
