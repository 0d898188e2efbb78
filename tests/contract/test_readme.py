"""What the README says is run: its Python example on a pico model, its commands against the command line."""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from pathlib import Path

import click
import pytest
from typer.main import get_command

from pico_files import INPUTS, SMALL, CommandLine
from pico_tokenizer import make_tokenizer
from tomoe.cli import app
from tomoe.model.catalog import MODELS
from tomoe.recipe.conversion import Recipe

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m"


def code_blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [code for tag, code in fenced if tag == language]


def shell_lines() -> list[list[str]]:
    """The words of every line of the blocks for a shell."""
    return [shlex.split(line, comments=True) for block in code_blocks("") for line in block.splitlines()]


def test_the_python_example_runs(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = code_blocks("python")
    # the same lines on a model and a text of this test's size
    own = ["active=0.7", f"data.sources={text}", *(f"{key}={value}" for key, value in SMALL.items())]
    assert '"active=0.7"' in example
    example = example.replace('"active=0.7"', ", ".join(f'"{setting}"' for setting in own))
    assert MODEL in example
    example = example.replace(MODEL, str(model))
    (tmp_path / "example.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("example.py")
    active, numbers, _generated = capsys.readouterr().out.split("\n", 2)
    assert active == "0.700 of the decoder parameters are active"
    assert len([float(number) for number in numbers.split()]) == 3


def test_the_commands_run_one_after_the_other(
    tomoe: CommandLine, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand, but for the model, the text and the size of the conversion."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    tokenizer.save_pretrained(model)
    monkeypatch.chdir(tmp_path)
    own = {MODEL: str(model)}
    commands = [words[1:] for words in shell_lines() if words[0] == "tomoe"]
    assert [words[0] for words in commands] == ["convert", "generate", "evaluate"]
    for name, *words in commands:
        more = ["--data", str(text), *INPUTS] if name == "convert" else []
        done = tomoe(name, *(own.get(word, word) for word in words), *more)
        assert done.code == 0, (name, done.err)


def test_what_the_readme_names_exists() -> None:
    """Commands and options in its sentences, by the parser; the model in the catalog; recipes; what pip installs."""
    text = (ROOT / "README.md").read_text()
    group = get_command(app)
    shown = [shlex.split(code)[1:] for code in re.findall(r"`(tomoe [^`]+)`", text)]
    assert ["finetune"] in shown
    for name, *words in [*shown, *(words[1:] for words in shell_lines() if words[0] == "tomoe")]:
        if name == "--version":
            continue
        command = group.get_command(click.Context(group), name)
        assert command is not None, name
        # what a sentence leaves out is not missing
        command.make_context(name, [*words], resilient_parsing=not words)
    assert MODEL in MODELS
    recipes = re.findall(r"--recipe (\w+)", text)
    assert recipes
    for recipe in recipes:
        Recipe.load(recipe, [])
    assert {tuple(words) for words in shell_lines() if words[0] != "tomoe"} == {("pip", "install", ".")}


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 750
    assert len(text.partition("\n```\n")[0].split()) < 200


def test_one_description_stands_everywhere() -> None:
    """In the README, the help, the package, the site and the citation."""
    description = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    for name in ("README.md", "mkdocs.yml", "CITATION.cff", "docs/index.md"):
        assert description in (ROOT / name).read_text(), name
    assert description in " ".join((get_command(app).help or "").split())


def test_the_citation_is_that_of_the_citation_file() -> None:
    (entry,), cff = code_blocks("bibtex"), (ROOT / "CITATION.cff").read_text()
    fields = dict(re.findall(r"(\w+) = \{+(.*?)\}+,?$", entry, re.MULTILINE))
    for key, name in {"title": "title", "version": "version", "author": "  - name"}.items():
        assert f"\n{name}: {fields[key]}\n" in cff, key


def test_the_two_commands_stand_in_the_readme_and_in_run_sh() -> None:
    text, script = (ROOT / "README.md").read_text(), (ROOT / "run.sh").read_text()
    for word in ("demo", "test", "check"):
        assert f"./run.sh {word}" in text
        assert f"\n{word})" in script
    assert "run.sh test" in (ROOT / ".ci" / "run").read_text()
