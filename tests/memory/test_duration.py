"""Minutes: the operations of stages are those that are computed, and seconds follow from them and from the speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tomoe
from conftest import make_pico, tokens
from pico_files import CommandLine, write_pico
from tomoe.memory import duration
from tomoe.memory.duration import Speed, Work, works_of
from tomoe.memory.estimate import sizes_of
from tomoe.methods.registry import resolve_method
from tomoe.recipe.conversion import Recipe

WIDE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}
SETTINGS = {"experts.num_experts": 16, "data.seq_len": 64, "data.calibration_tokens": 2048, "active": 0.6}


def counted(name: str, fitted: int) -> dict[str, float]:
    """What is computed beside what is told of it, by stage: as a share of the former."""
    model, text = make_pico("llama", **WIDE), tokens(32, 64)
    keys = [f"{key}={value}" for key, value in SETTINGS.items()]
    recipe = Recipe.load(
        None, ["device=cpu", f"method.name={name}", f"repair.tokens={fitted}", "data.tokens=30000", *keys]
    )
    told = {work.stage: work for work in works_of(sizes_of(model.config, recipe), *resolve_method(recipe))}
    with FlopCounterMode(display=False) as carving:
        plan = tomoe.plan(model, name, text, active=0.6, recipe={k: v for k, v in SETTINGS.items() if k != "active"})
    with FlopCounterMode(display=False) as repair:
        tomoe.repair(plan, model, text[: fitted // 64])
    return {
        "carving": told["carving"].operations / carving.get_total_flops(),
        "repair": told["repair"].operations / repair.get_total_flops(),
    }


@pytest.mark.parametrize(("name", "fitted"), [("carve", 2048), ("carve", 192), ("random_split", 2048)])
def test_told_operations_are_those_that_are_computed(name: str, fitted: int) -> None:
    for stage, share in counted(name, fitted).items():
        assert 1 / 1.3 < share < 1.3, (stage, share)


def test_seconds_follow_from_work_and_speed() -> None:
    speed = Speed(operations=100.0, stored=10.0, exact=50.0)
    work = Work("folding", operations=200.0, stored=10.0, exact=50.0, files=2 * duration.DISK)
    assert speed.seconds(work) == pytest.approx((1 + duration.OVERHEAD) * (2 + 1 + 1) + 2)
    assert duration.in_words({"text": 0.0, "carving": 80.0, "repair": 600.0, "folding": 7200.0}) == (
        "About 2.2 h as this machine computes now (carving 80 s, repair 10 min, folding 2.0 h)."
    )


def test_doctor_and_an_offloaded_conversion_tell_the_time(
    tomoe: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duration.Speed, "measured", lambda shape, base: Speed(1e3, 1e3, 1e3))
    model = write_pico(tmp_path / "dense")
    words = "as this machine computes now (text"
    assert words in tomoe("doctor", model).out
    text = tmp_path / "text.txt"
    text.write_text("the sea " * 4000, encoding="utf-8")
    sizes = [f"data.{key}=64" for key in ("seq_len", "calibration_tokens", "evaluation_tokens")]
    options = [part for size in (*sizes, "repair.tokens=64") for part in ("--set", size)]
    done = tomoe("convert", model, "-o", tmp_path / "out", "--data", text, "--offload", *options)
    assert done.code == 0, done.err
    assert "as this machine computes now (" in done.out


def test_speed_is_that_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = sizes_of(make_pico("llama").config, Recipe()).shape
    base = replace(duration.BaseWeights.of(Recipe.load(None, ["device=cpu"])), compute=torch.float32)
    products: list[torch.dtype] = []
    linear = torch.nn.functional.linear

    def noted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        products.append(x.dtype)
        assert (len(x), *weight.shape) == (duration.TIMED_TOKENS, shape.mlp_size, shape.hidden_size)
        return linear(x, weight)

    clock = iter(range(10**6))
    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    # each look at it is a second later, so one product of each dtype is timed, behind one that is not
    monkeypatch.setattr(duration.time, "perf_counter", lambda: float(next(clock)))
    found = Speed.measured(shape, base)
    assert sorted(map(str, products)) == sorted(str(t) for t in (base.compute, base.dtype, torch.float64) for _ in "ab")
    operations = 2 * duration.TIMED_TOKENS * shape.mlp_size * shape.hidden_size
    assert found == Speed(operations / 2, operations / 2, operations / 2)
