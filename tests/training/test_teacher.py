"""The kept teacher: the same bits from disk as from the model, whatever became of the folder in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_loop import train
from torch import Tensor
from transformers import PreTrainedModel

from conftest import make_pico, tokens
from tomoe.errors import UserError
from tomoe.recipe.conversion import Recipe
from tomoe.training.teacher import TeacherCache, hidden_states


class Watched:
    """How often a model ran."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.passes = 0
        model.model.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.passes += 1


def batch(rows: int = 2, padded: int = 3) -> tuple[Tensor, Tensor]:
    ids = tokens(rows, 16)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[-1, 16 - padded :] = False
    return ids, mask


@pytest.mark.slow
def test_a_run_that_reads_its_teacher_learns_the_same_bits(tmp_path: Path) -> None:
    model = make_pico("llama")
    changes = ["train.steps=12", "train.batch_size=2", "active=0.7"]
    kept = f"train.teacher_cache={tmp_path / 'cache'}"
    plain, _ = train(model, tmp_path / "plain", *changes)
    watched = Watched(model)
    first, _ = train(model, tmp_path / "first", *changes, kept)
    second, _ = train(model, tmp_path / "second", *changes, kept, "train.learning_rate=1e-2")
    for net in (first, second):
        assert all(
            torch.equal(a, b) for a, b in zip(plain.state_dict().values(), net.state_dict().values(), strict=True)
        )
    assert watched.passes == (12 + 2) + 12, (
        "four sequences, two a step: the teacher runs in two steps of the first run only"
    )


def test_what_is_kept_is_what_the_model_says(tmp_path: Path) -> None:
    model = make_pico("qwen3").to(torch.bfloat16)
    ids, mask = batch()
    teacher = TeacherCache(tmp_path, model)
    with torch.no_grad():
        expected = hidden_states(model, ids, mask)
        assert torch.equal(teacher(model, ids, mask), expected)
        watched = Watched(model)
        assert torch.equal(TeacherCache(tmp_path, model)(model, ids, mask), expected)
    assert watched.passes == 0
    swapped = teacher(model, ids.flip(0), mask.flip(0))
    assert torch.equal(swapped.view(2, 16, -1).flip(0).flatten(0, 1), expected), "sequences are kept one by one"


def test_padding_is_part_of_the_sequence(tmp_path: Path) -> None:
    model = make_pico("llama")
    ids, mask = batch()
    teacher = TeacherCache(tmp_path, model)
    with torch.no_grad():
        teacher(model, ids, mask)
        whole = torch.ones_like(mask)
        assert torch.equal(teacher(model, ids, whole), hidden_states(model, ids, whole))


@pytest.mark.parametrize("damage", [b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", None])
def test_a_damaged_file_is_computed_again(damage: bytes | None, tmp_path: Path) -> None:
    model = make_pico("llama")
    ids, mask = batch(rows=1)
    teacher = TeacherCache(tmp_path, model)
    with torch.no_grad():
        expected = teacher(model, ids, mask)
        (file,) = tmp_path.rglob("*.safetensors")
        good = file.read_bytes()
        file.write_bytes(good[: len(good) // 2] if damage is None else damage)
        assert torch.equal(teacher(model, ids, mask), expected)
    assert file.read_bytes() == good


def test_other_weights_have_other_files(tmp_path: Path) -> None:
    ids, mask = batch(rows=1)
    model = make_pico("llama")
    for _ in range(2):
        with torch.no_grad():
            model.model.norm.weight[0] += 1
            assert torch.equal(TeacherCache(tmp_path, model)(model, ids, mask), hidden_states(model, ids, mask))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    model = make_pico("llama")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"cannot write .*file"), torch.no_grad():
        TeacherCache(tmp_path / "file", model)(model, *batch(rows=1))


def test_a_shared_out_base_keeps_no_teacher() -> None:
    with pytest.raises(UserError, match=r"train\.teacher_cache and train\.shard cannot be combined"):
        Recipe.load(None, ["train.shard=true", "train.teacher_cache=kept"])
