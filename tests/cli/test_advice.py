"""What the command line advises: options that the command has, in place of arguments and keys."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import tomoe as package
from pico_files import CommandLine, refused
from tomoe.cli import main
from tomoe.errors import UserError
from tomoe.plans.inputs import InputsPlan


def test_a_setting_is_an_option_here_and_an_argument_in_python(tomoe: CommandLine, model: Path) -> None:
    refused(tomoe("evaluate", model), "use --text FILE to name a file or source")
    with pytest.raises(UserError, match="use text=FILE to name a file or source"):
        package.evaluate(str(model))


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("generate", ()),
        ("evaluate", ("--offload", "--context N", "--batch-size N")),
        ("convert", ("--offload", "--set data.seq_len=N")),
        ("train", ("--set data.seq_len=N",)),
    ],
)
def test_too_little_memory_advises_what_the_command_has(
    command: str, named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("8 TB")

    monkeypatch.setattr("typer.Typer.__call__", fail)
    with pytest.raises(SystemExit) as left:
        main([command, "model"])
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert said.startswith("tomoe: memory ran out (8 TB); free some")
    assert [
        word for word in ("--offload", "--context N", "--batch-size N", "--set data.seq_len=N") if word in said
    ] == [*named]
    assert "gradient_checkpointing" not in said


def test_a_damaged_plan_of_inputs_is_made_again_by_a_conversion(
    tomoe: CommandLine, converted_inputs: Path, tmp_path: Path
) -> None:
    """No run holds anything that `tomoe plan` could extract it from."""
    folder = shutil.copytree(converted_inputs / "moe", tmp_path / "moe")
    values = json.loads((folder / "plan.json").read_text())
    for damage in ({"path": 3}, {"names": {}}):
        (folder / "plan.json").write_text(json.dumps(values | damage))
        done = tomoe("inspect", folder)
        refused(done, "use --method inputs to convert the model again")
        assert "tomoe plan" not in done.err
        with pytest.raises(UserError, match=r"use method\.name=inputs"):
            InputsPlan.load(folder)


@pytest.mark.parametrize("said", ["many", "-1"])
def test_a_number_of_processes_that_is_none(tomoe: CommandLine, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", said)
    refused(tomoe("generate", "nowhere", "a"), f"WORLD_SIZE is {said!r}")
    monkeypatch.setenv("WORLD_SIZE", "")
    refused(tomoe("generate", "./nowhere", "a"), "nowhere")
