"""Ctrl-C while the command is being imported: one line, exit code 130, wherever it falls and whoever catches it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from conftest import SOURCE

# Sends itself a SIGINT when a module is about to be imported, in a way.
CHILD = """
import runpy, signal, sys, weakref

module, way = sys.argv[1:3]
sys.argv = ["tomoe", *sys.argv[3:]]

class Object: pass

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name != module:
            return
        sys.meta_path.remove(self)
        if way == "callback":
            held = Object()
            reference = weakref.ref(held, lambda _: signal.raise_signal(signal.SIGINT))
            del held
        elif way == "caught":
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException as error:
                raise ImportError("numpy failed to load") from error
        elif way == "swallowed":
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                pass
        else:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
runpy.run_module("tomoe", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "way"),
    [("tomoe.cli", "raised"), ("typer", "callback"), ("pydantic", "swallowed")]
    + [("tomoe.model.catalog", way) for way in ("raised", "callback", "caught", "swallowed")]
    + [("transformers.utils.logging", "swallowed")],
)
def test_one_line_and_130(module: str, way: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, module, way, "doctor", "smollm2-135m"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tomoe: stopped\n")
