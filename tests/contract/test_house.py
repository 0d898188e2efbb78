"""The layers of docs/architecture.md, compared with the imports; how long a file may get, and what benchmarks import."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import runpy
import sys
from functools import cache
from pathlib import Path

import pytest

from conftest import SOURCE

DOCS = SOURCE.parents[1] / "docs"
# A module may import those of the groups before its own.
GROUPS = runpy.run_path(str(DOCS / "make_modules.py"))["layers"]((DOCS / "architecture.md").read_text("utf-8"))
RANK = {module: i for i, group in enumerate(GROUPS) for module in group}
NEVER = {("methods", "moe"), ("moe", "methods")}
MODULES = sorted(SOURCE.rglob("*.py"))
# lines; files aim at 350
MAX_FILE, MAX_FUNCTION = 450, 60
# is copied beside the weights, so it cannot be divided, however long it gets
ONE_FILE = SOURCE / "moe" / "modeling_tomoe.py"
MAX_IN_PACKAGE = 12


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def top_module(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of its syntax tree."""
    return [*ast.walk(ast.parse(path.read_text("utf-8")))]


@cache
def imports(path: Path) -> set[str]:
    """Full names of all that a module imports, also within functions."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)} imports relatively; write the full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_only_go_down() -> None:
    for path in MODULES:
        here = top_module(path)
        if here in ("__init__", "__main__"):  # entry points: they import every layer
            continue
        assert here in RANK, f"{name(path)} is in no layer; give it one in docs/architecture.md"
        assert "tomoe" not in imports(path), f"{name(path)} imports the entry point, which imports every layer"
        below = {full.split(".")[1] for full in imports(path) if full.startswith("tomoe.")} - {here}
        for there in sorted(below):
            assert RANK[there] < RANK[here], f"{name(path)} may not import tomoe.{there}"
            assert (here, there) not in NEVER, f"{name(path)} may not import tomoe.{there}: they meet at the plan"


def test_the_modelling_file_is_self_contained() -> None:
    """It is copied beside the weights, where tomoe is not installed."""
    packages = {full.split(".")[0] for full in imports(ONE_FILE)}
    assert packages - set(sys.stdlib_module_names) == {"torch", "transformers"}


def test_no_lower_layer_needs_the_command_line() -> None:
    for path in MODULES:
        if top_module(path) != "cli":
            found = {full.split(".")[0] for full in imports(path)}
            assert "typer" not in found, f"{name(path)} imports typer, which is the command line's own"


def test_files_and_functions_stay_small() -> None:
    for path in MODULES:
        lines = len(path.read_text("utf-8").splitlines())
        assert lines <= MAX_FILE or path == ONE_FILE, f"{name(path)} has {lines} lines"
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                assert lines <= MAX_FUNCTION, f"{node.name} in {name(path)} has {lines} lines"


def test_the_package_can_be_read_at_a_glance() -> None:
    names = [path.name for path in SOURCE.glob("*.py")]
    assert len(names) <= MAX_IN_PACKAGE, sorted(names)


def test_no_public_name_is_a_module() -> None:
    """`from tomoe import convert` must mean the function, whatever was imported before."""
    import tomoe

    names = {path.stem for path in SOURCE.glob("*.py")} | {path.name for path in SOURCE.iterdir() if path.is_dir()}
    assert not names & set(tomoe.__all__)


def test_no_module_collects_leftovers() -> None:
    assert not [name(p) for p in MODULES if {"utils", "helpers", "misc", "common", "manager"} & set(p.stem.split("_"))]


def test_files_are_never_pickled() -> None:
    for path in MODULES:
        text = path.read_text("utf-8")
        for word in ("pickle", "torch.save(", "torch.load("):
            assert word not in text, f"{name(path)} speaks of {word}"


def test_random_numbers_come_from_seeds() -> None:
    """No draw from the global stream: each `rand*` call is handed a generator, or stands under a forked stream."""
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                drawn = node.func.attr in ("rand", "randn", "randint", "randperm", "multinomial", "bernoulli")
                given = any(keyword.arg == "generator" for keyword in node.keywords)
                assert given or not drawn, f"line {node.lineno} of {name(path)} draws without a generator"


BENCHMARKS = sorted((SOURCE.parents[1] / "benchmarks").glob("*.py"))


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
    """Whether it belongs to what the tests do without: vLLM has an environment of its own (./run.sh engines), and a llama.cpp
    for this processor is compiled for minutes."""
    package = str(module).partition(".")[0]
    return package in ("vllm", "llama_cpp") and importlib.util.find_spec(package) is None
