"""Files: whole or absent, and JSON that anyone may have written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tomoe import distributed, files
from tomoe.errors import UserError
from tomoe.files import atomic_write, parse_json, read_json, read_text, sha256
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
    others = [tmp_path / ".editor.tmp", tmp_path / ".cell.json.7.tmp", tmp_path / "other" / ".cell.json.7.tomoe.tmp"]
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


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "file" / "inside", tmp_path / "folder"):
        with pytest.raises(UserError, match=rf"^cannot write {place}: "):
            atomic_write(place, "words")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "recursion limit"),
        ('{"a":' * 100_000, "recursion limit"),
        ("9" * 20, "64 bits"),
        ("9" * 10_000, "out of range"),
        ('{"a": [1e400]}', "64 bits"),
        ("NaN", "expected value"),
        ("-Infinity", "invalid number"),
        ('["\\ud800"]', "hex escape"),
        ("{", "EOF while parsing"),
        ("", "EOF while parsing"),
    ],
)
def test_json_that_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=reason) as refused:
        read_json(tmp_path / "a.json")
    assert str(tmp_path / "a.json") in str(refused.value)
    assert "\n" not in str(refused.value)


def test_json_that_is_read() -> None:
    values = {"a": [[[{"b": None}]], 0.5, -(2**63), 10**18, True], "": {"\U0001f3dd": "\x1b"}}
    assert parse_json(json.dumps(values)) == values
    assert parse_json(json.dumps(values, ensure_ascii=False)) == values


def test_a_file_that_has_no_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe waits for whoever writes to it, and /dev/zero fills the memory."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "zero", "folder"):
        with pytest.raises(UserError, match="not a regular file"):
            read_text(tmp_path / name)
        with pytest.raises(OSError, match="No such file"):
            sha256(tmp_path / name)
    with pytest.raises(UserError, match="No such file"):
        read_text(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="not text in UTF-8"):
        read_text(tmp_path / "latin")
    monkeypatch.setattr(files, "_MAX_TEXT", 3)
    with pytest.raises(UserError, match="4 bytes, more than"):
        read_text(tmp_path / "latin")
