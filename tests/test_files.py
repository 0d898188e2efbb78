"""Files that a killed process left half-written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tomoe import distributed
from tomoe.files import atomic_write
from tomoe.locks import LOCK_FILE

# killed when the new file is written and not yet renamed
KILLED = """
import os, signal, sys
from pathlib import Path
from tomoe.files import atomic_write
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
atomic_write(Path(sys.argv[1]), "half of it")
"""


def test_the_next_writer_of_a_folder_deletes_what_a_killed_one_left(tmp_path: Path) -> None:
    paths = [tmp_path / "report.json", tmp_path / "run" / "metrics.jsonl"]
    for path in paths:
        atomic_write(path, "whole")
        assert subprocess.run([sys.executable, "-c", KILLED, path]).returncode == -signal.SIGKILL
        assert len(list(path.parent.glob(".*.tmp"))) == 1
    others = [tmp_path / ".editor.tmp", tmp_path / "other" / ".cell.json.7.tmp"]
    for path in others:
        atomic_write(path, "of somebody else")
    with distributed.locked(tmp_path, "convert"):
        atomic_write(paths[0], "new")
    left = {path for path in tmp_path.rglob("*") if path.is_file()} - {tmp_path / LOCK_FILE}
    assert left == {*paths, *others}
    assert [path.read_text() for path in paths] == ["new", "whole"]


def test_writers_of_one_name_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a teacher cache that several runs share, which no lock guards."""
    replace = os.replace

    def meanwhile(*paths: Path) -> None:
        script = (
            "import sys; from pathlib import Path; from tomoe.files import atomic_write as w; w(Path(sys.argv[1]), 'b')"
        )
        subprocess.run([sys.executable, "-c", script, tmp_path / "file"], check=True)
        replace(*paths)

    monkeypatch.setattr(os, "replace", meanwhile)
    atomic_write(tmp_path / "file", "a")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "a"
