"""Compile a kernel for this processor at its first use, cache the library, load it."""

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

from tomoe.files import cache_folder

log = logging.getLogger(__name__)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-w")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120.0


@cache
def load(source: Path) -> ctypes.CDLL | None:
    """The library compiled from a C++ file; None without a compiler, OpenMP or a cache folder, or if TOMOE_NATIVE=0.

    It is cached in `cache_folder()/kernels` under a hash of source, flags, compiler and processor, so that a stale one, or
    one for another machine, is never loaded; and neither is one that another user could have written.
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
    cxx = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, [cxx] if cxx else COMPILERS)), None)
    if compiler is None:
        log.info("no native kernel: no C++ compiler (%s)", cxx or ", ".join(COMPILERS))
        return None
    text = b"\0".join(path.read_bytes() for path in [source, *sorted(source.parent.glob("*.h"))])
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=SECONDS).stdout
    key = hashlib.sha256(b"\0".join([text, version, " ".join(FLAGS).encode(), _processor()])).hexdigest()[:20]
    path = cache_folder() / "kernels" / f"{source.stem}-{key}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # In the cache folder, so that the last step is a rename: two processes may compile at once, the last one wins.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            log.info("compiling %s for this processor", source.name)
            command = [compiler, *FLAGS, str(source), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode:
                log.info("no native kernel: %s says %s", compiler, done.stderr.strip()[-500:])
                return None
            os.replace(built, path)
    stat = path.stat()
    if hasattr(os, "geteuid") and (stat.st_uid != os.geteuid() or stat.st_mode & 0o022):
        log.info("no native kernel: %s belongs to, or can be written by, another user", path)
        return None
    return path


def _processor() -> bytes:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    features = {line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")}
    return "\n".join([platform.machine(), platform.processor(), *sorted(features)]).encode()
