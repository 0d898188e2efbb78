"""A step of learning masks as a GPU runs it: few calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import make_network, make_pico, tokens
from tomoe.data.corpus import Sequences
from tomoe.methods.tomoe.objective import MaskStep
from tomoe.recipe.conversion import Recipe

pytestmark = pytest.mark.slow
# Operators that compute nothing: the same memory, seen otherwise.
VIEWS = {
    "view", "t", "transpose", "expand", "unsqueeze", "squeeze", "slice", "select", "split", "detach", "alias", "permute",
    "_unsafe_view", "as_strided", "unbind", "split_with_sizes", "_reshape_alias", "diagonal",
}  # fmt: skip


class Calls(TorchDispatchMode):
    """Counts the operators that a GPU would be called for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += func._schema.name.split("::")[1] not in VIEWS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("form", "attention", "most"), [("overlapping", "per_token", 420), ("fine", "off", 222)])
def test_a_layer_takes_few_calls(form: str, attention: str, most: int) -> None:
    """Of teacher and student, forward and backward, with noise and penalties; 511 and 231 when each layer had its own."""
    counts = []
    for layers in (2, 4):
        model = make_pico("llama", num_hidden_layers=layers)
        recipe = Recipe.load("paper", ["model=x", "active=0.5"])
        step = MaskStep(model, make_network(model, attention, form=form), recipe)
        with Calls() as calls:
            step(Sequences(tokens(2, 16), torch.ones(2, 16, dtype=torch.bool)), 1, 0)
        counts.append(calls.count)
    assert (counts[1] - counts[0]) / 2 <= most
