"""Processes that are killed, warned or starved of disk: one sentence, a checkpoint, and any number of processes go on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launcher import assert_same_run, launch, train
from pico_files import metrics

pytestmark = pytest.mark.slow


def last_line(out: Path, rank: int) -> str:
    return Path(f"{out}.{rank}.log").read_text().splitlines()[-1]


def assert_resumes(alone: Path, out: Path, count: int) -> None:
    assert launch(count, *train(alone, out, "--resume")) == [0] * count
    assert [row["step"] for row in metrics(out)] == list(range(1, 5))
    assert_same_run(out, alone / "one")


@pytest.mark.parametrize(("victim", "then"), [(1, 1), (0, 4)])
def test_one_is_killed(alone: Path, tmp_path: Path, victim: int, then: int) -> None:
    out = tmp_path / "run"
    codes = launch(2, *train(alone, out, "--set", "train.save_every=1"), victims=[victim])
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 2
    message = last_line(out, 1 - victim)
    assert message.startswith("tomoe: another process of this run ended")
    assert "--resume" in message
    assert_resumes(alone, out, then)


def test_all_are_warned(alone: Path, tmp_path: Path) -> None:
    """A scheduler's SIGTERM goes to all: not 0, which would pass for a finished run, but 143; the last whole step is kept."""
    out = tmp_path / "run"
    codes = launch(2, *train(alone, out, "--set", "train.save_every=1"), victims=[0, 1], signum=signal.SIGTERM)
    # who waits for the other in the moment of the signal may hear of its end first
    assert codes[0] in (143, 2)
    assert codes[1] in (143, 2)
    assert 143 in codes
    assert "--resume" in last_line(out, 0)
    kept = max(int(folder.name.removeprefix("step-")) for folder in (out / "masks").glob("step-*"))
    assert kept == max(row["step"] for row in metrics(out))
    assert_resumes(alone, out, 1)


def test_the_disk_of_the_one_that_writes_is_full(alone: Path, tmp_path: Path) -> None:
    """Moments are twice the masks: the checkpoint of step 0 fits, the next one does not. The others hear of it."""
    out = tmp_path / "run"
    size = (alone / "one" / "masks" / "step-000000" / "masks.safetensors").stat().st_size
    codes = launch(2, *train(alone, out, "--set", "train.save_every=1"), limits={0: size + size // 2})
    assert codes == [2, 2]
    assert "cannot write the checkpoint of step 1" in last_line(out, 0)
    assert "another process of this run ended" in last_line(out, 1)
    assert sorted(folder.name for folder in (out / "masks").iterdir()) == ["step-000000"]
    assert_resumes(alone, out, 2)
