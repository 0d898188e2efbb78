"""Bits that flip and files that are cut short, long after a model was written."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pico_files import CommandLine, refused
from stored_models import edit_tensors
from tomoe.errors import UserError
from tomoe.files import SUMS, write_sums
from tomoe.model import checks


def flip(file: Path, place: int) -> None:
    """One bit of the byte so far from the end."""
    data = bytearray(file.read_bytes())
    data[-place] ^= 1
    file.write_bytes(data)


def test_a_model_as_it_was_written(tomoe: CommandLine, converted: Path) -> None:
    done = tomoe("inspect", converted / "moe", "--verify")
    assert done.code == 0, done.err
    assert "are as they were written" in done.out
    named = {line.split("  ")[1] for line in (converted / "moe" / SUMS).read_text().splitlines()}
    assert {"model.safetensors", "config.json", "modeling_tomoe.py", "tokenizer.json"} <= named
    assert {"plan.safetensors", "plan.json"} <= named
    if shutil.which("sha256sum"):  # others can read it too
        subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=converted / "moe", check=True)


def test_a_plan_by_itself(tomoe: CommandLine, converted: Path, tmp_path: Path) -> None:
    for name in ("plan.json", "plan.safetensors"):
        shutil.copy(converted / "moe" / name, tmp_path)
    assert "are as they were written" in tomoe("inspect", tmp_path, "--verify").out
    flip(tmp_path / "plan.safetensors", 5)
    refused(tomoe("inspect", tmp_path, "--verify"), "checksums differ")
    refused(tomoe("apply", tmp_path, converted / "dense", "-o", tmp_path / "moe"), "checksums differ")


def test_flipped_bits_are_found(tomoe: CommandLine, converted: Path, tmp_path: Path) -> None:
    moe = shutil.copytree(converted / "moe", tmp_path / "moe")
    for name in ("model.safetensors", "plan.safetensors", "modeling_tomoe.py"):
        flip(moe / name, 5)
        refused(tomoe("inspect", moe, "--verify"), f"as they were written ({name})")
        flip(moe / name, 5)


@pytest.mark.parametrize(
    ("name", "number"), [("lm_head.weight", torch.nan), ("model.layers.1.mlp.down_proj", -torch.inf)]
)
def test_weights_that_are_not_finite_are_found_behind_right_checksums(
    tomoe: CommandLine, converted: Path, tmp_path: Path, name: str, number: float
) -> None:
    """Loading looks at routers and norms only: the rest costs a pass over all weights."""
    moe = shutil.copytree(converted / "moe", tmp_path / "moe")
    edit_tensors(moe, lambda tensors: tensors | {name: tensors[name].index_fill(1, torch.tensor(1), number)})
    write_sums(moe)
    refused(tomoe("inspect", moe, "--verify"), f"1 tensors in {moe}", f"model.safetensors: {name}")


def test_half_precision_and_scalars_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_SLICE", 8)
    whole = {
        "a": torch.ones(5, 3, dtype=torch.bfloat16), "b": torch.ones(()), "c": torch.ones(4, dtype=torch.float8_e4m3fn),
        "d": torch.ones(0, 2), "e": torch.ones(2, 2, dtype=torch.int64), "f": torch.ones(3, dtype=torch.float16),
    }  # fmt: skip
    save_file(whole, tmp_path / "model.safetensors")
    assert checks.nonfinite_tensors(tmp_path) == []
    broken = {name: t.clone().flatten() if name in "bc" else t.clone() for name, t in whole.items()}
    for name, place in (("a", (4, 2)), ("b", 0), ("c", 3), ("f", 2)):
        broken[name][place] = torch.nan
    save_file(broken, tmp_path / "model.safetensors")
    assert checks.nonfinite_tensors(tmp_path) == [f"model.safetensors: {name}" for name in "abcf"]
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="damaged"):
        checks.nonfinite_tensors(tmp_path)


def test_a_model_cut_short_is_found_when_it_is_loaded(tomoe: CommandLine, converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted / "moe", tmp_path / "moe")
    weights = tmp_path / "moe" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = tomoe("generate", tmp_path / "moe", "the sea")
    assert done.code == 2
    assert "its files are damaged or cut off; get them again" in done.err
    weights.unlink()
    assert "(model.safetensors)" in tomoe("inspect", tmp_path / "moe", "--verify").err


def test_a_flipped_bit_of_the_dense_model_is_found_by_its_plan(
    tomoe: CommandLine, converted: Path, tmp_path: Path
) -> None:
    shutil.copytree(converted / "dense", tmp_path / "dense")
    flip(tmp_path / "dense" / "model.safetensors", 1)  # the highest byte of a float32
    refused(tomoe("apply", converted / "moe", tmp_path / "dense", "-o", tmp_path / "again"), "made for other weights")
    assert not (tmp_path / "again").exists()


def test_checksums_lead_nowhere(tomoe: CommandLine, converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted / "moe", tmp_path / "moe")
    (tmp_path / "moe" / SUMS).write_text(f"{'0' * 64}  ../../etc/passwd\n")
    assert "which is not a file in that folder" in tomoe("inspect", tmp_path / "moe", "--verify").err
    (tmp_path / "moe" / SUMS).unlink()
    assert f"holds no {SUMS}" in tomoe("inspect", tmp_path / "moe", "--verify").err
