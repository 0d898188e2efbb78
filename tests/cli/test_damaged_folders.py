"""Folders whose files were damaged one way or another: a sentence, or the words of the undamaged folder.

The kinds that ten thousand draws found; the table is in docs/lab/reliability.md.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from damage import copy_folder, damage
from pico_files import CommandLine, pico_recipe, refused
from tomoe.errors import UserError
from tomoe.pipeline.stages import train
from tomoe.training.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_shipped")]


@pytest.fixture
def moe(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted / "moe", tmp_path / "moe"))


@pytest.fixture(scope="module")
def learned(place: Path) -> Path:
    """A run of one step; to be read only."""
    return train(pico_recipe(place, "train.steps=1"), place / "run")


@pytest.fixture
def run(learned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(learned, tmp_path / "run"))


@pytest.mark.parametrize("seed", range(40))
def test_damage_ends_in_a_sentence_or_changes_nothing(
    tomoe: CommandLine, converted: Path, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    folder = copy_folder(converted / "moe", tmp_path / "moe")
    names = "plan.json plan.safetensors run/metrics.jsonl run/recipe.json run/masks/step-000004/state.json SHA256SUMS".split()
    damage(folder, folder / draw.choice([name for name in names if (folder / name).is_file()]), draw)
    for words in ([folder], [folder / "run"], [folder, "--verify"], [folder, "--json"]):
        done = tomoe("inspect", *words)
        assert done.code == 0 or refused(done) is None


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("run/recipe.json", _text("[" * 100_000), "recursion limit"),
        ("run/recipe.json", _text(json.dumps({"repair": {"rank": list(range(1000))}})), "repair.rank"),
        ("run/recipe.json", _pipe, "not a regular file"),
        ("run/metrics.jsonl", lambda path: path.write_bytes(b"\xff\xfe"), "not text in UTF-8"),
        ("run/metrics.jsonl", _text('{"step": 1}\nnull\n{"step": 2}\n'), "line 2 of"),
        ("run/metrics.jsonl", _text('{"step": 1}\n{"step": "2"}\n{"step": 3}\n'), "it has no step"),
        ("run/metrics.jsonl", _text("[" * 100_000 + '\n{"step": 3}\n'), "recursion limit"),
        ("run/metrics.jsonl", _pipe, "not a regular file"),
    ],
)
def test_a_run_that_is_damaged(
    tomoe: CommandLine, moe: Path, name: str, harm: Callable[[Path], object], words: str
) -> None:
    (moe / name).parent.mkdir(exist_ok=True)
    (moe / name).touch()
    harm(moe / name)
    done = tomoe("inspect", moe / "run")
    refused(done, words, str(moe / name))
    assert len(done.err) < 600, "a value from the file is repeated in full"


def test_a_checkpoint_that_is_damaged_is_named(tomoe: CommandLine, run: Path) -> None:
    *_, last = sorted((run / "masks").glob("step-*"))
    assert "Damaged" not in tomoe("inspect", run).out
    shutil.copytree(last, last.with_name("step-000009"))
    done = tomoe("inspect", run)
    assert done.code == 0, done.err
    assert "Damaged, and skipped by --resume: step-000009." in done.out


def test_a_checkpoint_whose_files_are_pipes_is_damaged(run: Path) -> None:
    *_, last = sorted((run / "masks").glob("step-*"))
    (last / "masks.safetensors").unlink()
    os.mkfifo(last / "masks.safetensors")
    assert RunFolder(run).damaged() == [last.name]


def test_the_origin_of_a_run_is_text(moe: Path) -> None:
    (moe / "run" / "origin.sha256").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not text in UTF-8"):
        RunFolder(moe / "run").origin_fingerprint()


def test_a_plan_whose_model_has_a_list_of_sizes(tomoe: CommandLine, moe: Path) -> None:
    head = json.loads((moe / "plan.json").read_text())
    head["shape"]["head_dim"] = list(range(1000))
    (moe / "plan.json").write_text(json.dumps(head))
    done = tomoe("inspect", moe)
    refused(done, "holds a damaged plan", "head_dim")
    assert len(done.err) < 600, "a value from the file is repeated in full"


def test_a_name_of_thousands_of_characters_is_cut(tomoe: CommandLine, moe: Path) -> None:
    head = json.loads((moe / "plan.json").read_text())
    head["recipe"]["x" * 6000] = 1
    (moe / "plan.json").write_text(json.dumps(head))
    (moe / "SHA256SUMS").write_text(f"{'0' * 64}  {'n' * 3000}" + "\0" * 3000)
    for done, words in (
        (tomoe("inspect", moe), "has no key"),
        (tomoe("inspect", "--verify", moe), "as they were written"),
    ):
        refused(done, words)
        assert len(done.err) < 1500, "a value from the file is repeated in full"


def test_a_plan_that_is_a_folder(tomoe: CommandLine, moe: Path) -> None:
    (moe / "plan.json").unlink()
    (moe / "plan.json").mkdir()
    refused(tomoe("inspect", moe), "holds no plan")


@pytest.mark.parametrize(
    ("old", "new"), [('"version": "1.0",', '"version": "1.0" "x",'), ('"type"', '"typ"'), ('"id": 0', '"id": "0"')]
)
def test_a_tokenizer_that_is_damaged(tomoe: CommandLine, converted: Path, tmp_path: Path, old: str, new: str) -> None:
    """tokenizers raises no exception of its own, but a bare one."""
    dense = Path(shutil.copytree(converted / "dense", tmp_path / "dense"))
    text = (dense / "tokenizer.json").read_text("utf-8")
    assert old in text
    (dense / "tokenizer.json").write_text(text.replace(old, new, 1), "utf-8")
    refused(tomoe("generate", dense, "the sea"), "cannot load the tokenizer")
