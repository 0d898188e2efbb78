"""The script that waits for a GPU runs every step, in small."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("always_better")
@pytest.mark.parametrize("part", ["kernels", "model", "large", "curve"])
def test_every_step_runs_in_small(
    part: str, tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    main = runpy.run_path(str(BENCHMARKS / "gpu_proof.py"), run_name="benchmark")["main"]
    words = ["--part", part, "--tiny", "--device", "cpu", "--out", str(tmp_path / "out")]
    proof = main([*words, "--model", str(model), "--text", str(text)])
    assert not [line for line in proof.rows if "failed" in line], proof.table()
    assert all(row.get("passes", True) for line in proof.rows for row in line["rows"]), proof.table()
    lines = (tmp_path / "out" / "proof.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [line["step"] for line in proof.rows]


def test_a_step_that_fails_or_hangs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = runpy.run_path(str(BENCHMARKS / "gpu_proof.py"), run_name="benchmark")

    def hangs(proof: object) -> object:
        yield {"seen": 1}
        while True:
            pass

    def fails(proof: object) -> object:
        yield from ()
        raise ValueError("not this card")

    monkeypatch.setitem(script["PARTS"], "kernels", [(fails, 5), (hangs, 1)])
    proof = script["main"](["--part", "kernels", "--tiny", "--device", "cpu", "--out", str(tmp_path)])
    assert [line["failed"] for line in proof.rows] == ["ValueError: not this card", "TimeoutError: took more than 1 s"]
    assert [line["rows"] for line in proof.rows] == [[], [{"seen": 1}]]
