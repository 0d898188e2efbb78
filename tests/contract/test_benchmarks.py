"""Every benchmark finds the names that it imports; nothing here runs one."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import runpy
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_finds_what_it_imports(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(path.parent))
    assert callable(runpy.run_path(str(path), run_name="benchmark")["main"])
    # within functions, too
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module != "__future__" and not _elsewhere(node.module):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


def _elsewhere(module: str | None) -> bool:
    """Whether it belongs to what the tests do without: vLLM has an environment of its own (./run.sh engines)."""
    package = str(module).partition(".")[0]
    return package == "vllm" and importlib.util.find_spec(package) is None
