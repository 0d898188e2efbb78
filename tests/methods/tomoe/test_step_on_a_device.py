"""A step of learning masks as a GPU runs it: few calls, and compiled the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import make_network, make_pico, tokens
from tomoe.data.corpus import Sequences
from tomoe.errors import UserError
from tomoe.methods.tomoe.objective import MaskStep
from tomoe.model import compiled
from tomoe.recipe.conversion import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]
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


def step_of(family: str, layers: int, form: str, attention: str, compile: bool, rotate: bool = False) -> MaskStep:
    model = make_pico(family, num_hidden_layers=layers)
    recipe = Recipe.load("paper", ["model=x", "active=0.5", f"train.compile={str(compile).lower()}"])
    net = make_network(model, attention, form=form, rotate=rotate)
    return MaskStep(model, net, recipe)


def batch(padding: int = 0) -> Sequences:
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 16 - padding :] = padding == 0
    return Sequences(tokens(2, 16), mask)


@pytest.mark.parametrize(("form", "attention", "most"), [("overlapping", "per_token", 420), ("fine", "off", 222)])
def test_a_layer_takes_few_calls(form: str, attention: str, most: int) -> None:
    """Of teacher and student, forward and backward, with noise and penalties; 511 and 231 when each layer had its own."""
    counts = []
    for layers in (2, 4):
        step = step_of("llama", layers, form, attention, False)
        with Calls() as calls:
            step(batch(), 1, 0)
        counts.append(calls.count)
    assert (counts[1] - counts[0]) / 2 <= most


# Of the layers of the teacher one, and of the student one where one graph serves all of its layers; two for batches with
# padding, too. The others are of functions, one for each shape that they meet.
@pytest.mark.parametrize(
    ("family", "form", "attention", "rotate", "padding", "graphs"),
    [
        ("phi", "overlapping", "per_token", True, 0, 2 + 4),
        ("qwen2", "overlapping", "static", False, 4, 4 + 5),
        ("phi", "overlapping", "off", False, 0, 2 + 2),
        ("qwen2", "fine", "off", False, 4, 2 + 1),
    ],
)
def test_a_compiled_step_computes_what_an_eager_one_computes(
    family: str,
    form: str,
    attention: str,
    rotate: bool,
    padding: int,
    graphs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    compiled.compiled.cache_clear()
    torch.compiler.reset()
    counters.clear()
    found = []
    for compile in (False, True):
        step = step_of(family, 3, form, attention, compile, rotate)
        classes = [type(module) for module in step.model.modules()]
        rows: list[dict[str, Tensor]] = [step(batch(), 1, 0), step(batch(padding), 2, 0)]
        assert step.student_in_graphs == (compile and form == "overlapping")
        assert [type(module) for module in step.model.modules()] == classes
        found.append((rows, {name: p.grad for name, p in step.net.named_parameters() if p.grad is not None}))
    (rows, gradients), (same_rows, same_gradients) = found
    for row, other in zip(rows, same_rows, strict=True):
        assert other == {name: pytest.approx(float(value), rel=1e-5, abs=1e-7) for name, value in row.items()}
    assert gradients.keys() == same_gradients.keys()
    for name, gradient in gradients.items():
        assert (same_gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_base_that_cannot_be_compiled() -> None:
    with pytest.raises(UserError, match="not sharded"):
        Recipe.load("paper", ["model=x", "train.compile=true", "train.shard=true"])
    model = make_pico("llama")
    recipe = Recipe.load("paper", ["model=x", "train.shard=true"])
    assert not MaskStep(model, make_network(model, "off"), recipe).compiled
