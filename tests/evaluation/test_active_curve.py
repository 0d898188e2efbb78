"""One row for each number of fine-grained experts that a model is measured with."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from test_results import some_rows

from pico_files import CommandLine, refused, rows_from
from tomoe.errors import UserError
from tomoe.evaluation.evaluate import evaluate, save_active_curves, settings_to_measure
from tomoe.evaluation.results import ACTIVE_CURVE, read_rows
from tomoe.moe.active_experts import runtime_settings

pytestmark = [pytest.mark.slow, pytest.mark.figures]


def test_a_row_for_each_point(tomoe: CommandLine, converted_fine: Path, tmp_path: Path) -> None:
    """Without a dense model named, the one of the plan is the reference; two fractions near one number are one row."""
    folder, runtime = tmp_path / "moe", runtime_settings(str(converted_fine / "moe"))
    shutil.copytree(converted_fine / "moe", folder)
    found = tmp_path / "rows.json"
    done = tomoe("evaluate", folder, "--active", "30%,0.6,0.6001,1", "--dtype", "float32", "--json", found)
    assert done.code == 0, done.err
    points = [runtime.nearest(active) for active in (0.3, 0.6, 1)]
    assert done.err.splitlines()[:3] == [f"moe: {point}" for point in points]
    rows = rows_from(found.read_text())
    planned = runtime.config.planned_top_k
    assert points[1].value == planned
    names = [f"moe, {p.value} of 64 experts" for p in points]
    assert [row.name for row in rows] == ["dense", names[0], "moe", names[2]]
    assert [row.experts_per_token for row in rows] == [None, *(p.value for p in points)]
    for row, point in zip(rows[1:], points, strict=True):
        assert row.facts["active_share"] == pytest.approx(point.active_fraction)
        assert f"{point.active_fraction:.1%}" in done.out
        assert row.training_overlap is not None
    # with all experts it is the dense model
    distances = [row.measurement.kl for row in rows[1:]]
    assert min(distances[:2]) > 1e-2  # 0.066 to 0.35 over six seeds, and below 5e-9 with all of them
    assert distances[2] < 1e-6
    assert rows[-1].measurement.perplexity == pytest.approx(rows[0].measurement.perplexity, rel=1e-5)
    shares = [[share for layer in row.usage.shares for share in layer] for row in rows[1:]]
    assert max(shares[-1]) == pytest.approx(1 / 64)
    assert max(shares[0]) > 2 / 64
    assert rows[-1].usage.per_token == [64, 64]

    # kept in the folder for its report
    assert f"The measurements are saved in {folder / 'active.json'}" in done.out.replace("\n", "")
    assert read_rows(folder, ACTIVE_CURVE) == rows
    shown = tomoe("report", folder)
    assert shown.code == 0, shown.err
    assert (folder / "figures" / "active.svg").is_file()
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert 'id="figure-active"' in page
    assert all(f"{row.measurement.perplexity:.4g} at {row.facts['active_share']:.0%}" in page for row in rows[1:])


def test_a_single_point_and_a_strange_reference_are_not_kept(converted_fine: Path, tmp_path: Path) -> None:
    shutil.copytree(converted_fine / "moe", tmp_path / "moe")
    dense, fine = str(converted_fine / "dense"), str(tmp_path / "moe")
    _, routed = some_rows()
    plain = replace(routed, usage=None)
    assert save_active_curves(settings_to_measure([dense, fine], [0.5]), [plain, routed]) == []
    assert save_active_curves(settings_to_measure([fine, fine], [0.5, 1.0]), [routed] * 3) == []
    settings = settings_to_measure([dense, fine], [0.5, 1.0])
    assert save_active_curves(settings, [plain, routed, routed]) == [tmp_path / "moe" / "active.json"]
    (tmp_path / "moe" / "active.json").unlink()
    (tmp_path / "moe" / "active.json").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        save_active_curves(settings, [plain, routed, routed])


def test_offloaded_it_is_the_same(converted_fine: Path) -> None:
    names = [str(converted_fine / name) for name in ("dense", "moe")]
    settings = {"tokens": 64, "active": [0.4], "dtype": "bfloat16"}
    whole, offloaded = (evaluate(names, offload=offload, **settings) for offload in (False, True))
    assert len(whole) == 2
    assert offloaded == whole


def test_the_reference_may_be_anything_and_the_others_not(converted_fine: Path, converted: Path) -> None:
    dense, fine, other = (str(path) for path in (converted / "dense", converted_fine / "moe", converted / "moe"))
    for first in (dense, fine, other):
        settings = settings_to_measure([first, fine], [0.5, 1.0])
        assert [name for name, _ in settings] == [first, fine, fine]
        assert settings[0][1] is None
    assert settings_to_measure([dense, other], []) == [(dense, None), (other, None)]
    with pytest.raises(UserError, match="is a dense model"):
        settings_to_measure([fine, dense], [0.5])
    with pytest.raises(UserError, match="is a dense model"):
        settings_to_measure([dense], [0.5])


def test_a_dense_model_that_is_gone_must_be_named(tomoe: CommandLine, converted_fine: Path, tmp_path: Path) -> None:
    shutil.copytree(converted_fine / "moe", tmp_path / "moe")
    plan = json.loads((tmp_path / "moe" / "plan.json").read_text())
    plan["recipe"]["model"] = str(tmp_path / "gone")
    (tmp_path / "moe" / "plan.json").write_text(json.dumps(plan))
    refused(tomoe("evaluate", tmp_path / "moe", "--active", "0.5"), "name it first")
