"""The best weights of a run on held-out text: which they are, and that a resume finds the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tomoe.errors import UserError
from tomoe.finetuning.finetune import peak_rate, require_improvement_
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.training.loop import BestWeights
from tomoe.training.run_folder import RunFolder


def checked(folder: Path, losses: list[float]) -> tuple[nn.Linear, BestWeights]:
    """A run of 30 steps whose weights are the number of the step, with these losses at its checks."""
    net, found = nn.Linear(1, 1), iter(losses)
    best = BestWeights(net, RunFolder(folder), 30, lambda: next(found), checks=10)
    for step in range(31):
        nn.init.constant_(net.weight, step)
        assert best.check(step).keys() == ({"held_out"} if step % 3 == 0 else set())
    return net, best


@pytest.mark.parametrize("later", [3.0, 4.0, float("nan")])
def test_what_is_never_better_than_the_start_is_refused(tmp_path: Path, later: float) -> None:
    _, best = checked(tmp_path, [3.0] + [later] * 10)
    assert not best.improved
    with pytest.raises(UserError, match=r"did not make the model better .*3\.000 before.*smaller train\.learning_rate"):
        require_improvement_(best, 1e-3)


def test_what_a_checkpoint_keeps_is_taken_up(tmp_path: Path) -> None:
    _, best = checked(tmp_path, [3.0, 1.0] + [4.0] * 9)
    again = BestWeights(
        nn.Linear(1, 1), RunFolder(tmp_path), 30, lambda: pytest.fail("it was checked twice"), checks=10
    )
    again.restore(best.state())
    assert again.check(30) == {}
    again.restore_best_()
    assert torch.equal(again.net.weight, torch.full((1, 1), 3.0))


def test_best_weights_that_are_gone_are_one_sentence(tmp_path: Path) -> None:
    _, best = checked(tmp_path, [3.0, 1.0] + [4.0] * 9)
    best.run.best.write_bytes(b"no weights")
    with pytest.raises(UserError, match="cannot be read"):
        best.restore_best_()


def test_the_rate_follows_what_there_is_to_recover() -> None:
    recipe = FinetuneRecipe()
    for start, rate in ((0.05, 5e-5), (0.4, 4e-4), (3.0, 1e-3)):
        assert peak_rate(recipe, start) == pytest.approx(rate)
    assert peak_rate(recipe.changed(["train.learning_rate=0.2"]), 0.05) == 0.2
    assert peak_rate(recipe.changed(["loss.objective=lm"]), 3.0) == 5e-4
