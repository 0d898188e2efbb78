"""Compile a kernel for this processor on first use, cache the library, load it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tomoe.files import cache_folder

log = logging.getLogger(__name__)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-w")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120.0
INSTALL = "install one with OpenMP (`apt install g++`, say)"
POINTER, INT64, INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


# By source: why it could not be compiled or loaded.
_reasons: dict[Path, str] = {}


def why_missing(source: Path) -> str | None:
    """Say why there is no library of this C++ file, and what to do about it; None if there is one."""
    return None if load_library(source) is not None else _reasons.get(source)


class Missing(Exception):
    """There is no library; the message says why and what to do."""


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """Load the library compiled from a C++ file; None without a compiler, OpenMP or cache folder, or if TOMOE_NATIVE=0.

    It is cached in `cache_folder()/kernels` under a hash of source, flags, compiler and processor, so that a stale one, or
    one for another machine, is never loaded; and neither is one that another user could have written.
    """
    try:
        return _open(_compiled(source))
    except Missing as missing:
        reason = str(missing)
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"it could not be compiled or kept ({error}); {INSTALL}, or set TOMOE_CACHE to a folder of yours"
    _reasons[source] = reason
    log.info("no native kernel: %s", reason)
    return None


def _open(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        words = " ".join(str(error).split())
        raise Missing(
            f"it was compiled, but cannot be loaded ({words}); delete {library}, and it is compiled anew"
        ) from None


def _compiled(source: Path) -> Path:
    if os.environ.get("TOMOE_NATIVE", "1") == "0":
        raise Missing("TOMOE_NATIVE=0 switches it off; unset it")
    compiler = _compiler()
    text = b"\0".join(path.read_bytes() for path in [source, *sorted(source.parent.glob("*.h"))])
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=SECONDS).stdout
    flags = " ".join((*compiler[1:], *FLAGS))
    key = hashlib.sha256(b"\0".join([text, version, flags.encode(), _processor()])).hexdigest()[:20]
    path = cache_folder() / "kernels" / f"{source.stem}-{key}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # In the cache folder, so that the last step is a rename: two processes may compile at once, the last one wins.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            log.info("compiling %s for this processor", source.name)
            command = [*compiler, *FLAGS, str(source), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode:
                said = " ".join(done.stderr.split())[-300:]
                raise Missing(f"{shlex.join(compiler)} could not compile it ({said}); {INSTALL}")
            os.replace(built, path)
    stat = path.stat()
    if hasattr(os, "geteuid") and (stat.st_uid != os.geteuid() or stat.st_mode & 0o022):
        raise Missing(f"{path} belongs to, or can be written by, another user; delete it")
    return path


def _compiler() -> list[str]:
    """Return the command of the C++ compiler: the words of CXX, such as `ccache g++` or `g++ -O2`, or the first one installed."""
    cxx = os.environ.get("CXX", "").strip()
    if not cxx:
        found = next(filter(None, map(shutil.which, COMPILERS)), None)
        if found is None:
            raise Missing(f"no C++ compiler ({', '.join(COMPILERS)}); {INSTALL}")
        return [found]
    # a path that holds spaces is one word, as it always was
    if whole := shutil.which(cxx):
        return [whole]
    try:
        first, *more = shlex.split(cxx)
    except ValueError as error:
        raise Missing(f"CXX is {cxx!r}, which no shell reads ({error}); fix it or unset it") from None
    if (program := shutil.which(first)) is None:
        raise Missing(f"the C++ compiler that CXX names, {first}, is not there; {INSTALL}, or unset CXX")
    return [program, *more]


def function(library: ctypes.CDLL, name: str, arguments: Sequence[type[Any]], needs: str = "") -> Any:
    """Return a compiled function with these argument types. With `needs`, what it allocates memory for, it raises
    OutOfMemoryError where it returns nonzero."""

    def check(failed: int, *_: Any) -> None:
        if failed:
            raise torch.OutOfMemoryError(f"no memory for {needs}")

    found = getattr(library, name)
    found.restype, found.argtypes = INT32, arguments
    if needs:
        found.errcheck = check
    return found


def _processor() -> bytes:
    """Describe what `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    features = {line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")}
    return "\n".join([platform.machine(), platform.processor(), *sorted(features)]).encode()
