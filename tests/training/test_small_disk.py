"""A folder of results that is a disk of its own, as where a container has a volume for them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pico_files import CARVED, CommandLine, contents, small

pytestmark = pytest.mark.slow

TIMED = "cost.json README.md .README.md.sha256 evaluation.json report.html report.json metrics.jsonl".split()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a disk")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)  # weights may still be mapped


def test_a_model_is_made_anew_in_a_folder_that_is_a_disk_of_its_own(
    tomoe: CommandLine, tmp_path: Path, disk: Path, model: Path, text: Path
) -> None:
    """Nothing can be renamed into it from outside."""
    options = [model, "--data", text, "-o", disk]
    assert tomoe("convert", *options, *small(), *CARVED).code == 0
    assert tomoe("convert", *options, *small(active="0.9"), *CARVED, "--force").code == 0
    assert tomoe("convert", model, "--data", text, *small(active="0.9"), *CARVED, "-o", tmp_path / "whole").code == 0
    assert contents(disk, but=TIMED) == contents(tmp_path / "whole", but=TIMED)
