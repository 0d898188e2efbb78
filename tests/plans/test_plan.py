"""The plan as files: the same bytes for the same plan, and a sentence for every file that is not a plan."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from conftest import make_pico, make_plan
from tomoe.errors import UserError
from tomoe.model.shape import ModelShape
from tomoe.moe.fold import fold, neuron_order
from tomoe.plans import LayerPlan, Plan

FILES = ("plan.json", "plan.safetensors")


def saved(folder: Path, attention: str = "per_token", form: str = "overlapping", rotate: bool = False) -> Plan:
    bare = make_plan(make_pico("llama"), attention, form=form, rotate=rotate)
    first, *others = bare.layers
    plan = dataclasses.replace(
        bare,
        layers=(dataclasses.replace(first, value_rotation=None), *others),
        source="0123abcd",
        dense_config={"hidden_size": 32},
        recipe={"active": 0.6},
        notes={"steps": 3, "who": "日本"},
    )
    plan.save(folder)
    return plan


def rewrite(folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
    """Change head and tensors of a saved plan, with a right checksum."""
    head, tensors = json.loads((folder / "plan.json").read_text()), load_file(folder / "plan.safetensors")
    change(head, tensors)
    data = save(tensors)
    head["tensors_sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "plan.safetensors").write_bytes(data)
    (folder / "plan.json").write_text(json.dumps(head))


@pytest.mark.parametrize(
    ("attention", "form", "rotate"),
    [
        ("off", "overlapping", False),
        ("per_token", "overlapping", True),
        ("per_token", "fine", False),
        ("static", "fine", True),
    ],
)
def test_round_trip(attention: str, form: str, rotate: bool, tmp_path: Path) -> None:
    plan = saved(tmp_path / "one", attention, form, rotate)
    again = Plan.load(tmp_path / "one")
    for name in ("shape", "source", "dense_config", "recipe", "notes", "counts", "rotated"):
        assert getattr(again, name) == getattr(plan, name)
    for one, two in zip(plan.layers, again.layers, strict=True):
        loaded = vars(two) | two.value_router
        for name, value in (vars(one) | one.value_router).items():
            if isinstance(value, Tensor):
                assert torch.equal(value, loaded[name])
                assert value.dtype == loaded[name].dtype
            elif not isinstance(value, dict):
                assert value == loaded[name]
    again.save(tmp_path / "two")
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == sorted(FILES)
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


ODD = 44
"""Neurons of a layer that do not fill the last byte of a packed mask."""


def fine_plan(neurons: int = ODD) -> Plan:
    return make_plan(make_pico("llama", intermediate_size=neurons), "static", form="fine")


@pytest.mark.parametrize("neurons", [48, ODD])
def test_neurons_of_fine_experts_take_a_bit(neurons: int, tmp_path: Path) -> None:
    """The first neuron of a byte is its lowest bit, whoever reads it."""
    plan = fine_plan(neurons)
    plan.save(tmp_path)
    stored = load_file(tmp_path / "plan.safetensors")
    for i, layer in enumerate(plan.layers):
        for name, mask in (("expert_neurons", layer.expert_masks), ("shared_neurons", layer.shared_mask)):
            rows = stored[f"layers.{i}.{name}"]
            assert rows.numel() == mask.numel() // neurons * 6
            bits = "".join(f"{byte:08b}"[::-1] for byte in rows.flatten().tolist())
            rows_of_bits = [bits[at : at + 48] for at in range(0, len(bits), 48)]
            expected = mask.reshape(-1, neurons).int().tolist()
            assert rows_of_bits == ["".join(map(str, row)).ljust(48, "0") for row in expected]
    for own, other in zip(plan.layers, Plan.load(tmp_path).layers, strict=True):
        assert torch.equal(own.expert_masks, other.expert_masks)
        assert torch.equal(own.shared_mask, other.shared_mask)
    assert Plan.load(tmp_path).counts == plan.counts


def test_routers_take_two_bytes_where_that_loses_nothing(tmp_path: Path) -> None:
    plan = saved(tmp_path)
    drawn = [torch.randn(4, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    exact, other = drawn[0].bfloat16().float(), drawn[1]
    layers = [dataclasses.replace(layer, router_weight=w) for layer, w in zip(plan.layers, (exact, other), strict=True)]
    dataclasses.replace(plan, layers=tuple(layers)).save(tmp_path)
    stored = load_file(tmp_path / "plan.safetensors")
    assert [stored[f"layers.{i}.router_weight"].dtype for i in (0, 1)] == [torch.bfloat16, torch.float32]
    for layer, weight in zip(Plan.load(tmp_path).layers, (exact, other), strict=True):
        assert layer.router_weight.dtype == torch.float32
        assert torch.equal(layer.router_weight, weight)


def test_a_plan_holds_no_base_weight(tmp_path: Path) -> None:
    saved(tmp_path)
    names = {name.split(".", 2)[2] for name in load_file(tmp_path / "plan.safetensors")}
    assert {name for name in names if not name.startswith("value_router.")} == {
        "expert_neurons",
        "router_weight",
        "qk_kept",
        "value_kept",
    }


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_cut_short_or_missing(name: str, tmp_path: Path) -> None:
    saved(tmp_path)
    data = (tmp_path / name).read_bytes()
    for kept in (0.0, 0.3, 0.99):
        (tmp_path / name).write_bytes(data[: int(kept * len(data))])
        with pytest.raises(UserError):
            Plan.load(tmp_path)
    (tmp_path / name).unlink()
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="holds no plan"):
            Plan.load(folder)


def test_foreign_heads(tmp_path: Path) -> None:
    saved(tmp_path)
    head = json.loads((tmp_path / "plan.json").read_text())
    for data in (b"\xff\xfe\x00", b"[1, 2]", b"3", b"null", b'{"format": "other"}', b"{}", b"not JSON"):
        (tmp_path / "plan.json").write_bytes(data)
        with pytest.raises(UserError, match=r"plan\.json"):
            Plan.load(tmp_path)
    for key in (
        "shape",
        "value_top_k",
        "experts_per_token",
        "tensors_sha256",
        "dense_config",
        "recipe",
        "notes",
        "source",
    ):
        (tmp_path / "plan.json").write_text(json.dumps({name: v for name, v in head.items() if name != key}))
        with pytest.raises(UserError):
            Plan.load(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(head | {"format": "tomoe-plan-9"}))
    with pytest.raises(UserError, match=r"'tomoe-plan-9'.*'tomoe-plan-1'"):
        Plan.load(tmp_path)


def test_foreign_and_flipped_tensors(tmp_path: Path) -> None:
    saved(tmp_path)
    data = bytearray((tmp_path / "plan.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "plan.safetensors").write_bytes(bytes(data))
    with pytest.raises(UserError, match="checksums differ"):
        Plan.load(tmp_path)
    foreign = b"no safetensors at all"
    (tmp_path / "plan.safetensors").write_bytes(foreign)
    head = json.loads((tmp_path / "plan.json").read_text()) | {"tensors_sha256": hashlib.sha256(foreign).hexdigest()}
    (tmp_path / "plan.json").write_text(json.dumps(head))
    with pytest.raises(UserError, match="damaged plan"):
        Plan.load(tmp_path)


def _set(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda head, tensors: tensors.update({f"layers.1.{name}": value})


Damages = dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]]


UNTURNED = torch.eye(8).repeat(4, 1, 1)
DAMAGES: Damages = {
    "a rotation of another number of heads": (
        _set("value_rotation", UNTURNED[:2].clone()),
        r"value_rotation has shape \(2, 8, 8\)",
    ),
    "a rotation that stretches": (_set("value_rotation", 1.001 * UNTURNED), "not orthogonal"),
    "a rotation NaN": (_set("value_rotation", UNTURNED * torch.nan), "not orthogonal"),
    "a rotation too large to square": (_set("value_rotation", UNTURNED * 3e38), "not orthogonal"),
    "a rotation of bools": (_set("value_rotation", UNTURNED.bool()), "of BOOL"),
    "no router": (lambda head, tensors: tensors.pop("layers.1.router_weight"), "router_weight"),
    "part of a value router": (
        lambda head, tensors: tensors.pop("layers.1.value_router.norm.bias"),
        "lacks .*norm.bias",
    ),
    "router of other width": (_set("router_weight", torch.zeros(4, 31)), "router_weight has shape"),
    "another number of experts": (
        lambda head, tensors: tensors.update(
            {
                "layers.1.router_weight": torch.zeros(3, 32),
                "layers.1.expert_neurons": torch.full((3, 6), 255, dtype=torch.uint8),
            }
        ),
        "3, 4. experts",
    ),
    "unequal widths": (_set("expert_neurons", torch.tensor([[1, 3, 7, 15]]).t().byte().repeat(1, 6)), "unequal widths"),
    "an empty expert": (_set("expert_neurons", torch.zeros(4, 6).byte()), "no neuron"),
    "no Q/K dims": (_set("qk_kept", torch.zeros(4, dtype=torch.bool)), "no Q/K dim"),
    "dropped V/O dims with a value router": (_set("value_kept", torch.arange(8) < 7), "among all V/O dims"),
    "router NaN": (_set("router_weight", torch.full((4, 32), torch.nan)), "not finite"),
    "value router infinity": (_set("value_router.norm.bias", torch.full((16,), torch.inf)), "not finite"),
    "value router of another width": (
        _set("value_router.project_in.weight", torch.zeros(16, 31)),
        "project_in.weight has shape",
    ),
    "K of no tokens": (lambda head, _: head.update(value_top_k=[1, 0]), "K = 0"),
    "K beyond the head": (lambda head, _: head.update(value_top_k=[1, 9]), "K = 9"),
    "K of one layer": (lambda head, _: head.update(value_top_k=[1]), "holds 1 layers"),
    "K that is no number": (lambda head, _: head.update(value_top_k=["a", 1]), "damaged"),
    "shape that is no dict": (lambda head, _: head.update(shape=[1, 2]), "damaged"),
    "shape without a size": (lambda head, _: head["shape"].pop("head_dim"), "damaged"),
    "shape with words": (lambda head, _: head["shape"].update(mlp_size="many"), "'shape.mlp_size': Input should be"),
    "shape with more layers": (lambda head, _: head["shape"].update(num_layers=3), "model has 3"),
}


def _flipped(name: str, bits: int) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    """Flip bits of the last byte of a neuron mask."""
    return lambda head, tensors: tensors[f"layers.1.{name}"].view(-1)[-1:].bitwise_xor_(bits)


PACKED_DAMAGES: Damages = {
    "a neuron beyond the last, of an expert": (_flipped("expert_neurons", 0x10), "more neurons than the model"),
    "a neuron beyond the last, of the shared part": (_flipped("shared_neurons", 0x80), "more neurons than the model"),
    "a shared neuron in an expert, too": (_flipped("shared_neurons", 0x0F), "in no expert, or in several"),
    "a byte short": (_set("expert_neurons", torch.zeros(8, 5).byte()), r"expert_neurons has shape \(8, 5\) of U8"),
    "a byte for each neuron": (_set("expert_neurons", torch.zeros(8, ODD).byte()), r"\(8, 44\) of U8"),
    "a bool for each neuron": (
        _set("expert_neurons", torch.zeros(8, ODD).bool()),
        r"\(8, 44\) of BOOL, .* \(8, 6\) of U8",
    ),
    "bits of a whole number": (_set("shared_neurons", torch.zeros(6, dtype=torch.int32)), "of I32"),
    "bits that are bools": (_set("shared_neurons", torch.zeros(6).bool()), r"shared_neurons has shape \(6,\) of BOOL"),
    "other masks as bytes": (_set("qk_kept", torch.ones(4).byte()), "qk_kept has shape"),
    "a shared part alone": (lambda head, tensors: tensors.pop("layers.1.expert_neurons"), "lacks .*expert_neurons"),
}


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", [*DAMAGES, *PACKED_DAMAGES])
def test_plans_that_contradict_themselves(name: str, tmp_path: Path) -> None:
    """Files that are whole, with a right checksum, but of something that is no plan."""
    if name in PACKED_DAMAGES:
        fine_plan().save(tmp_path)
    else:
        saved(tmp_path)
    change, words = (DAMAGES | PACKED_DAMAGES)[name]
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=words) as caught:
        Plan.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_choice_of_values_needs_a_router_and_the_other_way_round() -> None:
    plan = make_plan(make_pico("llama"), "per_token")
    layer = plan.layers[0]
    for broken in (
        dataclasses.replace(layer, value_router={}),
        dataclasses.replace(layer, value_top_k=plan.shape.head_dim),
    ):
        with pytest.raises(UserError, match="value router"):
            Plan(plan.shape, (broken, *plan.layers[1:]))
    with pytest.raises(UserError, match="1 layers, but its model has 2"):
        Plan(plan.shape, plan.layers[:1])


@pytest.mark.parametrize(
    "changes", [{"intermediate_size": 64}, {"hidden_size": 64}, {"num_hidden_layers": 3}, {"num_key_value_heads": 2}]
)
def test_a_plan_of_another_model_is_not_folded(changes: dict[str, int]) -> None:
    plan = make_plan(make_pico("llama"), "off")
    with pytest.raises(UserError, match=r"the plan was made for .* but this model has .*") as caught:
        fold(make_pico("llama", **changes), plan)
    made_for, has = str(caught.value).split("but this model has")
    assert made_for.removeprefix("the plan was made for ").rstrip(", ") != has.split(";")[0].strip()


def test_describe_counts_what_widths_say() -> None:
    plan = make_plan(make_pico("qwen2"), "per_token")
    rows = plan.describe()
    assert [(row["width"], row["qk_dims"], row["value_dims"]) for row in rows] == plan.widths()
    assert sum(row["active"] for row in rows) / len(rows) == pytest.approx(plan.active_fraction())
    assert all(0 < row["width_share"] <= row["union_share"] <= 1 for row in rows)
    # plain numbers, which JSON can hold
    assert json.loads(json.dumps([plan.totals(), rows])) == [plan.totals(), rows]


def test_experts_are_few_runs_of_rows() -> None:
    """Gray-code order: sorting by membership keeps neighbours alike, so an expert is few ranges of the shared rows."""
    generator = torch.Generator().manual_seed(0)
    neurons = torch.rand(8, 4096, generator=generator) < 0.5
    order = neuron_order(neurons)
    assert torch.equal(order.sort().values, neurons.any(0).nonzero().squeeze(1))
    sorted_rows = neurons[:, order].int()
    runs = [int((row.diff() == 1).sum() + row[0]) for row in sorted_rows]
    assert sum(runs) <= 128  # a 0/1 column of an 8-bit Gray code has at most 64 runs of ones, all columns 128
    assert sum(runs) < sum(int((row.int().diff() == 1).sum()) for row in neurons) / 50


def test_order_does_not_depend_on_the_machine() -> None:
    neurons = torch.tensor([[1, 1, 0, 0, 1, 0], [0, 1, 1, 0, 1, 0]]).bool()
    assert neuron_order(neurons).tolist() == [2, 1, 4, 0]
    layer = LayerPlan(neurons, torch.zeros(2, 1), torch.ones(1).bool(), torch.ones(1).bool(), 1)
    counts = layer.count(ModelShape(1, 1, 6, 1, 1, 1, 0, gated=True))
    assert (counts.width, counts.union) == (3, 4)
