"""The floor plan of docs/architecture.md, held against the imports; and how big a room may get."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from conftest import SOURCE

FLOORS = (
    {"errors"},
    {"files", "distributed"},
    {"recipe", "model"},
    {"data", "budget"},
    {"plan", "evaluation"},
    {"training", "pruning", "moe"},
    {"conversion"},
    {"serving", "memory"},
    {"api"},
    {"report"},
    {"exporting", "finetuning"},
    {"sweep"},
    {"cli"},
)
# what the moves alone leave pointing up, to be cut next
UP = {("api", "report"), ("conversion", "exporting"), ("training", "pruning")}
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 350, 60
LONGER = {"moe/modeling_tomoe.py": 600}  # must stay one file: it is copied beside the weights


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Full names of all that a module imports, also within functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)} imports relatively; write the full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_only_go_down(path: Path) -> None:
    here = room(path)
    if here in ("__init__", "__main__"):  # doors of the house: they lead to every floor
        return
    assert here in FLOOR_OF, f"{name(path)} stands on no floor; give it one here and in docs/architecture.md"
    # `import tomoe` alone is for its version
    below = {full.split(".")[1] for full in imports(path) if full.startswith("tomoe.")} - {here}
    for there in sorted(below):
        assert FLOOR_OF[there] < FLOOR_OF[here] or (here, there) in UP, f"{name(path)} may not import tomoe.{there}"


def test_the_modelling_file_is_self_contained() -> None:
    """It is copied beside the weights, where tomoe is not installed."""
    packages = {full.split(".")[0] for full in imports(SOURCE / "moe" / "modeling_tomoe.py")}
    assert packages - set(sys.stdlib_module_names) == {"torch", "transformers"}


def test_no_lower_floor_needs_the_command_line() -> None:
    for path in MODULES:
        if room(path) != "cli":
            found = {full.split(".")[0] for full in imports(path)}
            assert "typer" not in found, f"{name(path)} imports typer, which is the command line's own"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= LONGER.get(name(path), MAX_FILE), (
        f"{name(path)} has {len(text.splitlines())} lines"
    )
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION, f"{node.name} in {name(path)} has {lines} lines"


def test_no_cupboards() -> None:
    assert not [name(p) for p in MODULES if {"utils", "helpers", "misc", "common", "manager"} & set(p.stem.split("_"))]


def test_files_are_never_pickled() -> None:
    for path in MODULES:
        text = path.read_text("utf-8")
        for word in ("pickle", "torch.save(", "torch.load("):
            assert word not in text, f"{name(path)} speaks of {word}"


def test_random_numbers_come_from_seeds() -> None:
    """No draw from the global stream: each `rand*` call is handed a generator, or stands under a forked stream."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                drawn = node.func.attr in ("rand", "randn", "randint", "randperm", "multinomial", "bernoulli")
                given = any(keyword.arg == "generator" for keyword in node.keywords)
                assert given or not drawn, f"line {node.lineno} of {name(path)} draws without a generator"
