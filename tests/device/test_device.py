"""All stages on a fake device: nothing mixes with the CPU, the numbers are the CPU's, and the host hardly waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import SOURCE

STAGES = "load convert carve repair finetune evaluate generate benchmark export forward proof".split()
TOLERANCE = 1e-5  # of the largest number, float32


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `stages.py` finds in a process of its own, which the device cannot leave."""
    folder = tmp_path_factory.mktemp("device")
    tests, root = Path(__file__).parents[1], SOURCE.parents[1]
    paths = map(str, (SOURCE.parent, tests, tests / "device", root / "benchmarks"))
    settings = {"PYTHONPATH": os.pathsep.join(paths), "JAXTYPING_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    # in threads of their own the device is not known
    settings |= {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("stages.py")), str(folder)]
    ended = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads((folder / "found.json").read_text("utf-8")))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_computes_on_a_device_what_it_does_on_the_cpu(found: dict[str, Any], stage: str) -> None:
    assert found[stage]["error"] is None, found[stage]["error"]
    assert found[stage]["difference"] <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("work", "most"), [("prefill", 0), ("token", 0), ("elimination", 0), ("step", 4)])
def test_the_host_waits_no_more_often_than_it_must(found: dict[str, Any], work: str, most: int) -> None:
    waits = found["waits"][work]
    assert sum(waits.values()) <= most, waits
