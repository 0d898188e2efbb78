"""The documentation is compared with the code: the generated pages are current, and links inside it lead somewhere."""

from __future__ import annotations

import ast
import inspect
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

import tomoe
from tomoe.cli import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "tomoe"
TEMPLATES = SOURCE / "report" / "templates"
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING"))])


def test_the_page_of_recipe_keys_is_current() -> None:
    page = runpy.run_path(str(DOCS / "make_reference.py"))["make_page"]()
    assert (DOCS / "reference" / "recipe.md").read_text("utf-8") == page, (
        "run: python docs/make_reference.py > docs/reference/recipe.md"
    )


def test_the_table_of_modules_is_current() -> None:
    page = (DOCS / "architecture.md").read_text("utf-8")
    assert page == runpy.run_path(str(DOCS / "make_modules.py"))["make_page"](page), "run: python docs/make_modules.py"


def test_the_page_of_commands_has_every_command() -> None:
    page = (DOCS / "reference" / "commands.md").read_text("utf-8")
    table = page.split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+) ", table, re.MULTILINE)) == sorted(
        command.__name__ for commands in COMMANDS.values() for command in commands
    )


def test_the_page_for_python_has_every_public_name_with_its_arguments() -> None:
    page = (DOCS / "reference" / "python.md").read_text("utf-8")
    blocks = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    shown = {node.name: node.args for node in ast.parse(blocks).body if isinstance(node, ast.FunctionDef)}
    for name in set(tomoe.__all__) - {"__version__"}:
        value = getattr(tomoe, name)
        assert name in shown or re.search(rf"`(tomoe\.)?{name}\b", page), name
        if inspect.isfunction(value) and name != "method":
            parameters = inspect.signature(value).parameters.values()
            assert ast.unparse(shown[name]) == ast.unparse(_arguments(parameters)), name


def _arguments(parameters: Iterable[inspect.Parameter]) -> ast.arguments:
    """The arguments of a function without annotations; a default that is a function is an ellipsis."""
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty, default=...)
        if callable(parameter.default) and parameter.default is not inspect.Parameter.empty
        else parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in parameters
    ]
    (function,) = ast.parse(f"def f{inspect.Signature(plain)}: ...".replace("=Ellipsis", "=...")).body
    assert isinstance(function, ast.FunctionDef)
    return function.args


def test_no_line_installs_a_package_that_is_not_released() -> None:
    """Errors, cards and pages install from the checkout, and name extras that there are."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    folders = (path for name in ("src", "docs", "examples", "benchmarks") for path in (ROOT / name).rglob("*.*"))
    written = [path for path in folders if path.suffix in {".py", ".md", ".j2", ".html", ".toml"}]
    for path in (*written, *PAGES, ROOT / "run.sh"):
        text = path.read_text("utf-8")
        assert not re.search(rf"install[^`\n]*\b{project['name']}\b", text), path
        own = path.is_relative_to(SOURCE) and path.name != "version.py"
        assert not own or not re.search(r"pip install '?\.", text), f"{path.name}: tomoe.version.INSTALL is that line"
        extras = re.findall(r"pip install '\.\[([a-z]+)\]'|install_extra\(['\"](\w+)['\"]\)", text)
        assert {name for pair in extras for name in pair if name} <= {*project["optional-dependencies"]}, path


def test_the_drawings_of_the_method_are_current() -> None:
    made = runpy.run_path(str(DOCS / "images" / "method.py"))
    for name, drawn in made["drawings"]().items():
        assert (TEMPLATES / name).read_text("utf-8") == drawn, "run: python docs/images/method.py"
    assert (DOCS / "images" / "forms.svg").read_text("utf-8") == made["beside"](made["FINE"], made["INPUTS"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub and mkdocs make them from plain words."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in DOCS.rglob("*.md"):
        assert page.relative_to(DOCS).as_posix() in navigation


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "reference" / "recipe.html").is_file()
    assert 'src="images/method-overlapping.svg"' in (tmp_path / "site" / "method.html").read_text("utf-8")
    assert (tmp_path / "site" / "images" / "method-overlapping.svg").is_file()
