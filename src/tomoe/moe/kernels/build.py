"""Compile a kernel for this very processor at its first use, keep the library, load it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tomoe.model.catalog import cache_folder

log = logging.getLogger(__name__)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-w")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120.0


@cache
def load(source: Path) -> ctypes.CDLL | None:
    """The library made from a C++ file, or None where it cannot be had: no compiler, no OpenMP, no place, TOMOE_NATIVE=0.

    It is kept in `cache_folder()/kernels` under a name made from source, flags, compiler and processor, so that nothing
    stale and nothing made for another machine is ever loaded; and nothing that another user could have written.
    """
    if os.environ.get("TOMOE_NATIVE", "1") == "0":
        return None
    try:
        path = _compiled(source)
        return None if path is None else ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        log.info("no native kernel: %s", error)
        return None


def _compiled(source: Path) -> Path | None:
    asked = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, [asked] if asked else COMPILERS)), None)
    if compiler is None:
        log.info("no native kernel: no C++ compiler (%s)", asked or ", ".join(COMPILERS))
        return None
    text = b"\0".join(path.read_bytes() for path in [source, *sorted(source.parent.glob("*.h"))])
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=SECONDS).stdout
    key = hashlib.sha256(b"\0".join([text, version, " ".join(FLAGS).encode(), _processor()])).hexdigest()[:20]
    path = cache_folder() / "kernels" / f"{source.stem}-{key}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Beside its place, so that the last step is a rename: two processes may compile at once, the last one wins.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            log.info("compiling %s for this processor", source.name)
            command = [compiler, *FLAGS, str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode:
                log.info("no native kernel: %s says %s", compiler, done.stderr.strip()[-500:])
                return None
            os.replace(made, path)
    found = path.stat()
    if hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
        log.info("no native kernel: %s belongs to, or can be written by, another user", path)
        return None
    return path


def _processor() -> bytes:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")}
    return "\n".join([platform.machine(), platform.processor(), *sorted(told)]).encode()
