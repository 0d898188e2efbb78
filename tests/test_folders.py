"""Files that tomoe did not write are neither deleted nor overwritten, whatever the command."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest

from pico_files import CARVED, CommandLine, contents, refused, small
from tomoe.folders import MODEL, RUN, is_ours

# names of ours and others, of files that tomoe did not write
MINE = (
    "adapter_model.safetensors",
    "old-lora.safetensors",
    "README.md",
    "figures/fig1.png",
    "recipe.json",
    "report.html",
)


def fill(folder: Path, *names: str) -> dict[str, str]:
    """Write files of the user's; returns their hashes."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}: weeks of work")
    return contents(folder)


def kept(folder: Path, before: dict[str, str]) -> bool:
    return {**contents(folder), **before} == contents(folder)


def test_a_folder_of_somebody_else_stays_as_it_is(
    tomoe: CommandLine, converted: Path, model: Path, text: Path, tmp_path: Path
) -> None:
    out, moe = tmp_path / "mine", converted / "moe"
    before = fill(out, *MINE)
    commands: tuple[tuple[str | Path, ...], ...] = (
        ("convert", model, "-o", out, "--data", text, *small(), *CARVED),
        ("apply", moe, model, "-o", out),
        ("repair", moe, "-o", out),
        ("finetune", moe, "-o", out, "--data", text),
        ("train", model, "-o", out, "--data", text, *small(), *CARVED),
        ("export", moe, "-o", out),
    )
    for command in commands:
        refused(tomoe(*command), "choose another folder")
        refused(tomoe(*command, "--force"), "choose another folder")
        assert contents(out) == before, command
    refused(tomoe("plan", moe / "run", "-o", out), "README.md", "--force")
    assert contents(out) == before


@pytest.mark.slow
def test_with_force_a_model_is_written_beside_them(tomoe: CommandLine, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    before = fill(out, "thesis.txt", "old-lora.safetensors", "figures/fig1.png", "model_backup.safetensors")
    command = ("convert", model, "-o", out, "--data", text, *small(), *CARVED)
    refused(tomoe(*command), "thesis.txt", "--force")
    assert contents(out) == before
    assert tomoe(*command, "--force").code == 0
    assert kept(out, before)


@pytest.mark.slow
def test_what_is_put_into_a_folder_of_ours_stays(
    tomoe: CommandLine, converted: Path, model: Path, text: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(converted / "moe", tmp_path / "moe")
    names = (
        "README.md",  # a card that was edited
        "lora.safetensors",
        "model-best.safetensors",
        "figures/mine.png",
        "run/masks/step-000002-good/masks",
        ".me.7.tmp",
    )
    fill(out, *names)
    before = {name: contents(out)[name] for name in names}
    done = tomoe("convert", model, "-o", out, "--data", text, "--force", *small(seed="1"))
    assert done.code == 0
    assert kept(out, before)
    assert "README.md was edited" in done.err
    assert "turned into" in (out / "README.tomoe.md").read_text()
    exported = tmp_path / "exported"
    command = ("export", out, "-o", exported, "--tokens", "16", "--force")
    assert tomoe(*command, "--format", "mixtral").code == 0
    before = fill(exported, "README.md", "thesis.txt", "model-mine.gguf")
    before = {name: before[name] for name in ("README.md", "thesis.txt", "model-mine.gguf")}
    assert tomoe(*command, "--format", "hf").code == 0
    assert kept(exported, before)


def test_a_run_beside_a_project_takes_no_file_of_it(
    tomoe: CommandLine, converted: Path, model: Path, tmp_path: Path
) -> None:
    """OUT holds a run of ours, and a README of somebody else: the model that becomes of the run is written elsewhere."""
    out = tmp_path / "project"
    shutil.copytree(converted / "moe" / "run", out / "run")
    before = fill(out, "README.md")
    refused(tomoe("apply", converted / "moe", model, "-o", out, "--force"), "README.md", "choose another folder")
    assert contents(out) == before


@pytest.mark.parametrize(
    ("command", "option"),
    [("evaluate", "--json"), ("evaluate", "--markdown"), ("benchmark", "--json"), ("route", "--html")],
)
def test_a_file_of_somebody_else_is_not_replaced_by_a_table(
    tomoe: CommandLine, converted: Path, model: Path, tmp_path: Path, command: str, option: str
) -> None:
    mine = tmp_path / "thesis.md"
    mine.write_text("years of work")
    models = {
        "evaluate": (converted / "moe",),
        "benchmark": (model, converted / "moe"),
        "route": (converted / "moe", "a"),
    }
    refused(tomoe(command, *models[command], option, mine), "thesis.md", "choose another name")
    assert mine.read_text() == "years of work"


@pytest.mark.parametrize(
    ("command", "option", "name"),
    [
        ("evaluate", "--json", "plan.json"),
        ("evaluate", "--json", "report.json"),
        ("evaluate", "--markdown", "README.md"),
        ("evaluate", "--markdown", "report.html"),
        ("benchmark", "--json", "evaluation.json"),
        ("route", "--html", "report.html"),
    ],
)
def test_a_file_of_a_model_is_not_replaced_by_a_table(
    tomoe: CommandLine, converted: Path, model: Path, tmp_path: Path, command: str, option: str, name: str
) -> None:
    """They have marks of ours in them, too."""
    moe = shutil.copytree(converted / "moe", tmp_path / "moe")
    before = contents(moe)
    models = {"evaluate": (moe,), "benchmark": (model, moe), "route": (moe, "a")}
    refused(tomoe(command, *models[command], option, moe / name), name, "choose another name")
    assert contents(moe) == before


def test_tables_of_ours_are_replaced(tomoe: CommandLine, converted: Path, text: Path, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "a.json", "--markdown", tmp_path / "a.md")
    for _ in range(2):
        assert tomoe("evaluate", converted / "moe", "--text", text, "--tokens", "64", *files).code == 0
        assert tomoe("route", converted / "moe", "the sea", "--html", tmp_path / "a.html").code == 0


def test_everything_in_a_converted_folder_is_in_the_list(converted: Path) -> None:
    out = converted / "moe"
    assert is_ours(out)
    assert is_ours(out / "run")
    assert not is_ours(out.parent)
    names = [str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and not path.name.startswith(".")]
    for name in names:
        listed = any(fnmatch(name, pattern) for pattern in MODEL) or name.startswith("run/")
        assert listed, f"{name} is not in the list of what a folder of ours holds"
    for path in (out / "run").iterdir():
        assert any(fnmatch(path.name, pattern) for pattern in RUN), path.name
