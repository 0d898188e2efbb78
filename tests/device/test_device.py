"""All stages on a fake device: nothing mixes with the CPU, the numbers are the CPU's, and the host hardly waits. And the script
that waits for a GPU runs every step, in small.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import SOURCE

pytestmark = pytest.mark.slow

BENCHMARKS = SOURCE.parents[1] / "benchmarks"
STAGES = "load convert carve repair finetune evaluate generate benchmark export forward proof".split()
TOLERANCE = 1e-5  # of the largest number, float32


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `stages.py` finds in a process of its own, which the device cannot leave."""
    folder = tmp_path_factory.mktemp("device")
    tests = Path(__file__).parents[1]
    paths = map(str, (SOURCE.parent, tests, tests / "device", BENCHMARKS))
    settings = {"PYTHONPATH": os.pathsep.join(paths), "JAXTYPING_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    # in threads of their own the device is not known
    settings |= {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("stages.py")), str(folder)]
    ended = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads((folder / "found.json").read_text("utf-8")))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_computes_on_a_device_what_it_does_on_the_cpu(found: dict[str, Any], stage: str) -> None:
    assert found[stage]["error"] is None, found[stage]["error"]
    assert found[stage]["difference"] <= TOLERANCE


@pytest.mark.parametrize(("work", "most"), [("prefill", 0), ("token", 0), ("elimination", 0), ("step", 4)])
def test_the_host_waits_no_more_often_than_it_must(found: dict[str, Any], work: str, most: int) -> None:
    waits = found["waits"][work]
    assert sum(waits.values()) <= most, waits


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
