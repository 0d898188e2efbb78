"""A conversion that would compute something else once it is loaded is not written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import make_pico, make_plan, pico_moe
from tomoe.errors import UserError
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import FoldedLayers, fold, has_room


def test_a_buffer_that_no_checkpoint_holds(tmp_path: Path) -> None:
    """The rotary frequencies of the running model are not those that its config gives."""
    moe, plan = pico_moe("llama", "off", form="fine")
    moe.model.rotary_emb.inv_freq = moe.model.rotary_emb.inv_freq * 3
    with pytest.raises(
        UserError, match=r"loaded from its folder, on its first tokens .*layer 0 is the first to differ"
    ):
        save_moe(moe, plan, None, tmp_path / "moe", check=True)
    assert not (tmp_path / "moe" / "config.json").exists()


def test_a_window_that_short_texts_do_not_reach(tmp_path: Path) -> None:
    dense = make_pico("mistral", sliding_window=100, max_position_embeddings=256)
    plan = make_plan(dense, "off", form="fine")
    moe = fold(dense, plan)
    forward = moe.model.layers[1].forward
    moe.model.layers[1].forward = lambda x, **kwargs: forward(
        x * (1 + 0.1 * (torch.arange(x.shape[1]) >= 100)[None, :, None]), **kwargs
    )
    with pytest.raises(UserError, match="beyond the window of 100 tokens"):
        save_moe(moe, plan, None, tmp_path / "moe", check=True)


def test_what_is_folded_once_is_what_is_folded_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with room each layer is folded once; elsewhere again to be written and to be compared. The bytes are the same."""
    dense = make_pico("mistral")
    plan = make_plan(dense, "off", form="fine")
    folded: list[int] = []
    fold_layer = FoldedLayers._folded
    monkeypatch.setattr(FoldedLayers, "_folded", lambda layers, i: (folded.append(i), fold_layer(layers, i))[1])
    written = []
    for lazily in (False, True):
        folded.clear()
        save_moe(fold(dense, plan, lazily=lazily), plan, None, tmp_path / str(lazily), check=True)
        written.append((sorted(folded) == [0, 1], (tmp_path / str(lazily) / "model.safetensors").read_bytes()))
    assert (written[0][0], written[1][0]) == (True, False)
    assert written[0][1] == written[1][1]


@pytest.mark.parametrize(("free", "room"), [(2 * 10**6, False), (3 * 10**6, True)])
def test_room_on_a_gpu(free: int, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(empty_cache=lambda: emptied.append(True)))
    monkeypatch.setattr("tomoe.moe.fold.free_on_device", lambda _: free)
    weights = [torch.zeros(250_000)]
    assert has_room(SimpleNamespace(device=torch.device("cuda"), parameters=lambda: weights)) is room
    assert emptied
    assert not has_room(SimpleNamespace(device=torch.device("cpu"), parameters=lambda: weights))
