"""A disk that is really too small (a tmpfs): what was whole stays whole, one sentence, and more room is all it takes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pico_files import CommandLine, contents, small

pytestmark = pytest.mark.slow

TIMED = "cost.json README.md .README.md.sha256 evaluation.json report.html report.json metrics.jsonl".split()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB that can be made larger with `resize`."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can make a small disk; files that may not grow are tried in test_resume.py")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)  # weights may still be mapped


def resize(disk: Path, kib: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kib}k", str(disk)], check=True)


def test_a_model_is_made_anew_in_a_folder_that_is_a_disk_of_its_own(
    tomoe: CommandLine, tmp_path: Path, disk: Path, model: Path, text: Path
) -> None:
    """As where a container has a volume for its results: nothing can be renamed into it from outside."""
    resize(disk, 8192)
    options = [model, "--data", text, "-o", disk]
    assert tomoe("carve", *options, *small()).code == 0
    assert tomoe("carve", *options, *small(active="0.9"), "--force").code == 0
    assert tomoe("carve", model, "--data", text, *small(active="0.9"), "-o", tmp_path / "whole").code == 0
    assert contents(disk, but=TIMED) == contents(tmp_path / "whole", but=TIMED)


@pytest.mark.figures
def test_a_conversion_that_runs_out_of_disk_again_and_again(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path, disk: Path
) -> None:
    """At a checkpoint, the weights, the plan, the tokenizer, the report: every time a little more room, and --resume."""
    options = [model, "--data", text, *small()]
    assert tomoe("convert", *options, "-o", tmp_path / "whole").code == 0
    out, messages = disk / "out", []
    for kib in (160, 400, 900, 1000, 1100, 4096):
        resize(disk, kib)
        done = tomoe("convert", *options, "-o", out, "--resume")
        if kib == 4096:
            assert done.code == 0, done.err
            break
        assert done.code == 2, done.err
        messages.append(done.err.splitlines()[-1])
        assert messages[-1].startswith("tomoe: cannot ")
        assert "No space left on device" in messages[-1]
        assert "Traceback" not in done.err
        assert not (out / "config.json").exists() or "model.safetensors" in {f.name for f in out.iterdir()}
    for words in ("cannot write the checkpoint of step", "cannot write the model to", "figures"):
        assert any(words in sentence for sentence in messages), messages
    assert contents(out, but=TIMED) == contents(tmp_path / "whole", but=TIMED)
