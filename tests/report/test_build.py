"""`tomoe report` on a converted folder: what it writes, what it measures again, and what it takes from before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pico_files import CommandLine, contents, small, write_pico, write_text

pytestmark = [pytest.mark.slow, pytest.mark.figures]


def test_a_report_is_made_again_from_what_was_measured(
    tomoe: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "moe"
    sources = [write_text(tmp_path / "a.txt"), write_text(tmp_path / "b.txt", sentences=300)]
    write_pico(tmp_path / "dense")
    texts = [word for source in sources for word in ("--data", source)]
    made = tomoe("convert", tmp_path / "dense", "-o", out, *texts, *small())
    assert made.code == 0, made.err
    cost = json.loads((out / "run" / "cost.json").read_text())
    assert set(cost["seconds"]) == {"text", "carving", "learning", "repair", "folding"}
    assert cost["tokens"]["learning"] == 4 * 16
    assert cost["tokens"]["text"] > 128
    assert cost["peak_memory_bytes"] > 1e7
    assert (cost["device"], cost["resumed"]) == ("cpu", False)

    names = {path.stem for path in (out / "figures").iterdir()}
    assert names == {"layers", "training"}
    assert {path.suffix for path in (out / "figures").iterdir()} == {".svg", ".png"}

    before = contents(out)
    (out / "report.html").unlink()
    again = tomoe("report", out)
    assert again.code == 0, again.err
    assert "evaluating" not in again.err
    assert contents(out) == before

    monkeypatch.setattr("tomoe.report.build.all_figures", lambda *_: [])
    assert "evaluating" in tomoe("report", out, "--again").err
    observed = json.loads((out / "report.json").read_text())
    (out / "report.json").write_text(json.dumps(observed | {"plan": "of another plan"}))
    assert "evaluating" in tomoe("report", out).err
    assert json.loads((out / "report.json").read_text()) == observed
    for content, said in (("{", "is not JSON"), ("[1]", "holds a list")):
        (out / "report.json").write_text(content)
        broken = tomoe("report", out)
        assert broken.code == 2
        assert f"report.json {said}" in broken.err


def test_a_folder_without_a_plan_is_refused(tomoe: CommandLine, tmp_path: Path) -> None:
    assert "holds no converted model" in tomoe("report", tmp_path).err
    (tmp_path / "config.json").write_text("{}")
    done = tomoe("report", tmp_path)
    assert done.code == 2
    assert "holds no plan" in done.err
