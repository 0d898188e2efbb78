"""A conversion that would compute something else once it is loaded is not written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import make_pico, make_plan
from tomoe.errors import UserError
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold


@pytest.mark.parametrize("lazily", [False, True])
def test_what_is_loaded_is_what_was_folded(lazily: bool, tmp_path: Path) -> None:
    dense = make_pico("mistral")
    plan = make_plan(dense, "off", form="fine")
    save_moe(fold(dense, plan, lazily=lazily), plan, None, tmp_path / "moe", check=True)
    assert (tmp_path / "moe" / "config.json").exists()


def test_a_buffer_that_no_checkpoint_holds(tmp_path: Path) -> None:
    """The rotary frequencies of the running model are not those that its config gives."""
    dense = make_pico("llama")
    plan = make_plan(dense, "off", form="fine")
    moe = fold(dense, plan)
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
