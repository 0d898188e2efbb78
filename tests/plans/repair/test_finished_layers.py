"""A repair that is killed between two layers resumes after the last whole one, and ends in the same bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Bool, Int
from test_repair import calibration
from torch import Tensor

from conftest import make_pico, make_plan
from pico_files import pico_recipe
from tomoe.finetuning.repair import repair
from tomoe.pipeline.convert import convert
from tomoe.plans import Plan
from tomoe.plans.repair import layers as repairing
from tomoe.plans.repair.plan import KEPT, forget_repair, repair_plan
from tomoe.recipe.conversion import RepairSection

Text = tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"]]
HALF = RepairSection(mode="full", target="half")


class Killed(BaseException):
    """No handler catches it."""


def dying_after(layers: int) -> Callable[..., None]:
    def on_progress(stage: str, done: int, total: int, info: Any) -> None:
        if done > layers:
            raise Killed

    return on_progress


def repaired(
    form: str, attention: str, section: RepairSection, folder: Path | None, text: Text | None = None, **more: Any
) -> Plan:
    model = make_pico("qwen2", num_hidden_layers=3)
    with torch.no_grad():
        return repair_plan(
            make_plan(model, attention, form=form), model, *(text or calibration()), section, folder=folder, **more
        )


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one number with every matrix that is fitted."""
    fits: list[int] = []
    own = repairing.refit

    def counted(*args: Any) -> Any:
        fits.append(len(fits))
        return own(*args)

    monkeypatch.setattr(repairing, "refit", counted)
    return fits


def saved(plan: Plan, folder: Path) -> dict[str, bytes]:
    plan.save(folder)
    return {name: (folder / name).read_bytes() for name in ("plan.json", "plan.safetensors")}


@pytest.mark.parametrize(
    ("form", "attention", "section"),
    [
        ("overlapping", "static", HALF),
        ("overlapping", "off", RepairSection(mode="full", target="local")),
        ("fine", "static", RepairSection(mode="low_rank", rank=3, target="half")),
    ],
    ids=["half", "local", "low rank"],
)
def test_killed_and_resumed_it_gives_the_same_bytes(
    tmp_path: Path, fitted: list[int], form: str, attention: str, section: RepairSection
) -> None:
    expected = saved(repaired(form, attention, section, None), tmp_path / "whole")
    matrices, run = len(fitted), tmp_path / "run"
    run.mkdir()
    with pytest.raises(Killed):
        repaired(form, attention, section, run, on_progress=dying_after(2))
    # the third layer was fitted, but not yet kept
    assert sorted(path.name for path in (run / KEPT).iterdir()) == ["layer-000.safetensors", "layer-001.safetensors"]
    fitted.clear()
    heard: list[int] = []
    plan = repaired(form, attention, section, run, on_progress=lambda stage, done, total, info: heard.append(done))
    assert len(fitted) == matrices // 3
    assert heard == [1, 2, 3]
    assert saved(plan, tmp_path / "resumed") == expected
    forget_repair(run)
    assert not list(run.iterdir())


def test_layers_of_another_repair_are_not_taken(tmp_path: Path, fitted: list[int]) -> None:
    run, first, other = tmp_path / "run", calibration(), calibration()
    run.mkdir()
    other[0][0, 0] += 1
    wide = HALF.model_copy(update={"ridge": 2e-2})
    # each finds the layers of the one before
    for form, section, text in (
        ("fine", HALF, first),
        ("fine", HALF, other),
        ("fine", wide, other),
        ("overlapping", wide, other),
    ):
        expected = saved(repaired(form, "off", section, None, text), tmp_path / "whole")
        fitted.clear()
        assert saved(repaired(form, "off", section, run, text), tmp_path / "again") == expected
        assert len(fitted) == 3
    # what lies behind a damaged layer is fitted again
    path = run / KEPT / "layer-001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    fitted.clear()
    assert saved(repaired(form, "off", section, run, text), tmp_path / "again") == expected
    assert len(fitted) == 2


def test_a_full_disk_costs_the_way_to_resume_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = saved(repaired("fine", "off", HALF, None), tmp_path / "whole")
    run = tmp_path / "run"
    run.mkdir()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tomoe.plans.repair.plan.save_file", full)
    assert saved(repaired("fine", "off", HALF, run), tmp_path / "again") == expected
    assert not list(run.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("model", "text")
def test_a_finished_command_keeps_no_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fitted: list[int]) -> None:
    recipe = pico_recipe(tmp_path, "train.steps=0", "repair.mode=full")
    made: list[Plan] = []

    def die(plan: Plan, *_: Any) -> None:
        made.append(plan)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("tomoe.pipeline.steps.fold_and_check", die)
        with pytest.raises(Killed):
            convert(recipe, tmp_path / "out")
    assert (tmp_path / "out" / "run" / KEPT).is_dir()
    fitted.clear()
    convert(recipe, tmp_path / "out", resume=True)
    assert fitted == []
    assert not (tmp_path / "out" / "run" / KEPT).exists()
    expected = saved(made[0], tmp_path / "whole")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in expected} == expected
    repair(tmp_path / "out", tmp_path / "again", ["repair.tokens=200"])
    assert not (tmp_path / "again" / "run" / KEPT).exists()
