"""What the README says is run: its Python example on a pico model, its commands against the command line."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from pico_files import SMALL, CommandLine, write_pico, write_text

ROOT = Path(__file__).parents[2]


def code_blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [code for tag, code in fenced if tag == language]


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = code_blocks("python")
    pico = write_pico(tmp_path / "dense")
    text = write_text(tmp_path / "text.txt")
    # the same lines on a model and a text of this test's size
    own = {**SMALL, "data.sources": str(text)}
    example = example.replace('"active=0.7"', ", ".join(f'"{key}={value}"' for key, value in own.items()))
    example = example.replace("smollm2-135m", str(pico))
    assert str(pico) in example
    (tmp_path / "example.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("example.py")
    active, numbers, _generated = capsys.readouterr().out.split("\n", 2)
    assert active == "0.700 of the decoder parameters are active"
    assert len([float(number) for number in numbers.split()]) == 3


def test_every_command_of_the_readme_exists(tomoe: CommandLine) -> None:
    text = (ROOT / "README.md").read_text()
    verbs = set(re.findall(r"\btomoe (\w+) ", "\n".join(code_blocks("")) + "\n")) | set(
        re.findall(r"`tomoe (\w+)", text)
    )
    assert {"convert", "evaluate", "generate", "finetune"} <= verbs
    for verb in sorted(verbs):
        assert tomoe(verb, "--help").code == 0, verb


def test_the_two_commands_stand_in_the_readme_and_in_run_sh() -> None:
    text, script = (ROOT / "README.md").read_text(), (ROOT / "run.sh").read_text()
    for word in ("demo", "test", "check"):
        assert f"./run.sh {word}" in text
        assert f"\n{word})" in script
    assert "run.sh test" in (ROOT / ".ci" / "run").read_text()
