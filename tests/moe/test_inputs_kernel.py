"""The kernels for the largest inputs of a projection, and for linear layers: against their definitions."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from conftest import pico_moe
from conftest import tokens as drawn
from tomoe.moe import modeling_tomoe
from tomoe.moe.kernels import inputs, linear
from tomoe.moe.modeling_tomoe import Choice, choose

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.skipif(inputs.kernel() is None, reason="no C++ compiler"),
]
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # error relative to the largest number


def defined(x: Tensor, norms: Tensor, count: int, weight: Tensor, bias: Tensor) -> Tensor:
    """bias + the sum over the chosen inputs, token by token and in float64, by sorting."""
    rows = []
    for token in x:
        scores = [(-abs(float(v)) * float(c), i) for i, (v, c) in enumerate(zip(token.float(), norms, strict=True))]
        chosen = [i for _, i in sorted(scores)[:count]]
        rows.append(token[chosen].double() @ weight[chosen].double() + bias.double())
    return torch.stack(rows)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("width", "columns"), [(96, 256), (97, 1), (130, 33), (70, 4128), (64, 8200), (600, 100)]
)  # odd ones, several blocks of columns, several pieces of the list
def test_it_computes_its_definition(dtype: torch.dtype, tokens: int, width: int, columns: int) -> None:
    norms = draw(width, seed=0).abs() + 0.1
    x, weight, bias = (
        draw(*shape, seed=i).to(dtype) for i, shape in enumerate([(tokens, width), (width, columns), (columns,)], 1)
    )
    for count in (1, width // 3, width // 2, width - 1, width):
        meant = defined(x, norms, count, weight, bias)
        found = inputs.kernel().product(x, norms, weight, bias, count)
        assert float((found.double() - meant).abs().max()) <= DTYPES[dtype] * float(meant.abs().max()), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_scores_are_taken_by_position(dtype: torch.dtype) -> None:
    """Scores of three values only, some of them zero: exactly as many inputs as asked for, the first of equal ones."""
    x = (torch.arange(60) * 7 % 3).to(dtype)[None]
    weight = torch.eye(60, dtype=dtype)
    order = sorted(range(60), key=lambda i: (-float(x[0, i]), i))
    for count in (1, 7, 20, 33, 40, 59):
        found = inputs.kernel().product(x, torch.ones(60), weight, None, count)
        chosen = [i for i in order[:count] if x[0, i]]
        assert found[0].nonzero().flatten().tolist() == sorted(chosen)
        for kept in (modeling_tomoe.chosen_inputs, inputs.kernel().keep):
            assert torch.equal(kept(x, torch.ones(60), count), found)


def test_any_number_of_threads_gives_the_same_bytes(set_threads: Callable[[int], None]) -> None:
    x, weight, norms = draw(2, 700, seed=1), draw(700, 4500, seed=2), torch.ones(700)
    results = []
    for threads in (1, 2, 3, 7):
        set_threads(threads)
        results.append((inputs.kernel().product(x, norms, weight, None, 400), inputs.kernel().keep(x, norms, 400)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_tokens_keeps_what_pytorch_keeps(dtype: torch.dtype) -> None:
    """Odd widths, ties, and a count of all."""
    for width in (1, 33, 130, 600):
        x, norms = draw(9, width, seed=width).to(dtype), (draw(width, seed=1).abs() + 0.1).bfloat16().float()
        x[3] = x[3].round()
        for count in {1, max(1, width // 3), max(1, width - 1), width}:
            found = inputs.kernel().keep(x[None], norms, count)
            assert torch.equal(found[0], modeling_tomoe.chosen_inputs(x, norms, count))


@pytest.mark.parametrize("dtype", [torch.float32])
def test_no_token_changes_the_bytes_of_another(dtype: torch.dtype) -> None:
    """In bfloat16 some processors add up pairs of rows."""
    x, weight, norms = draw(4, 700, seed=1).to(dtype), draw(700, 300, seed=2).to(dtype), torch.ones(700)
    product = inputs.kernel().product
    alone = torch.cat([product(x[t : t + 1], norms, weight, None, 200) for t in range(4)])
    for tokens in (2, 3, 4):
        assert torch.equal(product(x[:tokens], norms, weight, None, 200), alone[:tokens])


class Layer(nn.Module):
    """Projections that read the same input, of which a token uses so many numbers, as in a layer of a model."""

    def __init__(self, modules: Sequence[nn.Module], count: int):
        super().__init__()
        self.own = nn.ModuleList(modules)
        config: Any = SimpleNamespace(
            tomoe_active=0.5, tomoe_prompts="chosen", layer_inputs=lambda kind, layer: count if kind == "up" else 9
        )
        matrices = [modeling_tomoe.matrix_of(module) for module in modules]
        self.choice = Choice(config, "up", 0, matrices[0].shape[1])
        self.choice.norms = modeling_tomoe.column_norms(matrices)
        for module in modules:
            module.register_forward_pre_hook(self.choice.before)

    def choices(self) -> list[tuple[Choice, list[nn.Module]]]:
        return [(self.choice, list(self.own))]


def laid(layer: Layer) -> Layer:
    layer = copy.deepcopy(layer)
    inputs.prepare_(layer)
    return layer


@pytest.mark.parametrize("kind", ["linear", "conv1d", "biases on some"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_projections_compute_what_masks_compute(kind: str, dtype: torch.dtype) -> None:
    sizes, width, count = (40, 24, 72), 50, 21
    torch.manual_seed(0)
    if kind == "conv1d":
        modules: list[Any] = [Conv1D(size, width) for size in sizes]
        for module in modules:
            module.bias.normal_()
    else:
        modules = [nn.Linear(width, size, bias=kind == "linear" or size == 24) for size in sizes]
    layer = Layer([module.to(dtype).requires_grad_(False) for module in modules], count)
    fast = laid(layer)
    assert {type(module) for module in fast.own} == {inputs.InputsConv1D if kind == "conv1d" else inputs.InputsLinear}
    assert fast.state_dict().keys() == layer.state_dict().keys()
    for tokens in (1, 3, 9):
        x = draw(1, tokens, width, seed=tokens).to(dtype)
        for change in (lambda own: None, lambda own: own.weight.data.mul_(2), lambda own: own.float().to(dtype)):
            for module, expected in zip(fast.own, layer.own, strict=True):
                change(module)
                change(expected)
                meant = expected(x).float()
                assert float((module(x).float() - meant).abs().max()) <= DTYPES[dtype] * float(meant.abs().max())
    long = tuple(t.clone() for t in layer.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(fast.state_dict().values(), long, strict=True))


def test_where_it_cannot_run_masks_do() -> None:
    """float64, weights that train: the same numbers."""
    layer = Layer([nn.Linear(32, 24)], 9)
    x, fast = draw(1, 32, seed=0), laid(layer)
    with torch.enable_grad():
        fast.own[0](x).sum().backward()
    gradient = fast.own[0].weight.grad
    assert gradient is not None
    assert int((gradient[0] != 0).sum()) == 9
    torch.testing.assert_close(fast.double().own[0](x.double()), layer.double().own[0](x.double()))


def test_layers_that_are_more_than_linear_stay_as_they_are() -> None:
    """A hook or a parametrization of somebody else, float64, a class of somebody else."""

    class Another(nn.Linear):
        pass

    hooked, other = nn.Linear(50, 24).requires_grad_(False), Another(50, 24).requires_grad_(False)
    computed = nn.Linear(50, 24).requires_grad_(False)
    double, x = nn.Linear(50, 24, dtype=torch.float64).requires_grad_(False), draw(1, 50, seed=0)
    layer = Layer([hooked, other, computed, double], 20)
    hooked.register_forward_hook(lambda _, __, y: y + 1)
    parametrize.register_parametrization(computed, "weight", nn.Hardtanh(-0.05, 0.05))
    fast = laid(layer)
    assert [type(a) for a in fast.own[:2]] == [nn.Linear, Another]
    assert type(fast.own[3]) is nn.Linear
    for own, before in zip(fast.own[:3], layer.own, strict=False):
        assert torch.equal(own(x), before(x))


def test_a_weight_that_is_computed_after_it_was_laid() -> None:
    layer = Layer([nn.Linear(50, 24).requires_grad_(False)], 20)
    fast, x = laid(layer), draw(1, 50, seed=0)
    for own in (layer, fast):
        parametrize.register_parametrization(own.own[0], "weight", nn.Hardtanh(-0.05, 0.05))
    torch.testing.assert_close(fast.own[0](x), layer.own[0](x), rtol=1e-5, atol=1e-6)


def test_a_buffer_that_is_written_again_is_another_input() -> None:
    """A server that decodes from one buffer in inference mode, where tensors do not count what was written to them."""
    layer = Layer([nn.Linear(50, 24), nn.Linear(50, 8)], 20).requires_grad_(False)
    fast = laid(layer)
    with torch.inference_mode():
        x = draw(1, 50, seed=0)
        for seed in (1, 2):
            for module, slow in zip(fast.own, layer.own, strict=True):
                torch.testing.assert_close(module(x), slow(x), rtol=1e-5, atol=1e-6)
                x.copy_(draw(1, 50, seed=seed))


def test_memory_of_weights_that_were_replaced_is_free() -> None:
    """The modules alone hold their weights."""
    fast = laid(Layer([nn.Linear(50, 24).requires_grad_(False)], 20))
    fast.own[0](draw(1, 50, seed=0))
    held = weakref.ref(fast.own[0].weight.untyped_storage())
    fast.own[0].bfloat16()
    assert held() is None


def test_the_note_says_how_the_kernel_gets_its_layout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(modeling_tomoe, "NOTED", set())
    layer = Layer([nn.Linear(50, 24).requires_grad_(False)], 20)
    laid(layer).own[0](draw(1, 50, seed=0))
    layer.own[0](draw(9, 50, seed=0))
    assert not caplog.messages
    for _ in range(2):
        layer.own[0](draw(1, 50, seed=0))
    (message,) = caplog.messages
    assert message.endswith(inputs.UNPREPARED)


def test_scores_that_are_no_numbers_are_the_largest() -> None:
    """0 times inf, NaN with a sign on some processors, is one of so many inputs, not one more; nothing else is."""
    norms, weight = torch.ones(60), torch.eye(60)
    norms[7] = torch.inf
    x = draw(1, 60, seed=0)
    x[0, 7] = 0
    order = sorted(set(range(60)) - {7}, key=lambda i: -float(x[0, i].abs()))
    for found in (
        inputs.kernel().product(x, norms, weight, None, 20),
        inputs.kernel().keep(x, norms, 20),
        modeling_tomoe.chosen_inputs(x, norms, 20),
    ):
        assert found[0].nonzero().flatten().tolist() == sorted(order[:19])
    negative = torch.full((60,), -0x400000, dtype=torch.int32).view(torch.float32)
    assert bool(negative.isnan().all())
    assert inputs.kernel().product(x, negative, weight, None, 20).isfinite().all()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 32), (37, 70), (1100, 64), (2049, 33)]
)  # odd ones, several pieces of rows
def test_the_output_matrix_is_its_definition(tokens: int, rows: int, size: int) -> None:
    multiply = linear.multiplier()
    x, weight = draw(1, tokens, size, seed=0).bfloat16(), draw(rows, size, seed=1).bfloat16()
    meant = x.double() @ weight.double().t()
    # half a step of bfloat16 by the rounding, and what sums in float32 lose
    assert bool(((multiply(x, weight).double() - meant).abs() <= meant.abs() * 2**-8 + 1e-4).all())


def test_neither_threads_nor_other_tokens_change_a_byte(set_threads: Callable[[int], None]) -> None:
    multiply = linear.multiplier()
    x, weight = draw(3, 96, seed=0).bfloat16(), draw(5000, 96, seed=1).bfloat16()
    set_threads(1)
    alone = torch.cat([multiply(x[t : t + 1], weight) for t in range(3)])
    for threads in (1, 2, 3, 7):
        set_threads(threads)
        assert torch.equal(multiply(x, weight), alone)


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """For few tokens of bfloat16, of a plain linear layer that nothing learns, on processors where it was faster."""
    monkeypatch.setattr(linear, "PROCESSOR", {})
    head, x = nn.Linear(32, 48, bias=False).bfloat16().requires_grad_(False), draw(1, 1, 32, seed=0).bfloat16()

    class Another(nn.Linear):
        pass

    class Packed(Tensor):
        pass

    other = Another(32, 48, bias=False).bfloat16().requires_grad_(False)
    packed = nn.Linear(32, 48, bias=False).bfloat16().requires_grad_(False)
    packed.weight = nn.Parameter(packed.weight.data.as_subclass(Packed), requires_grad=False)
    learns = nn.Linear(32, 48, bias=False).bfloat16()
    assert choose("logits", head, x) == choose("logits", learns, x) == "native"
    for refused in ((other, x), (packed, x), (head, x.expand(1, 5, 32))):
        assert choose("logits", *refused) == "pytorch"
    assert choose("logits", head.float(), x.float()) == "pytorch"
    with torch.enable_grad():
        assert choose("logits", learns, x) == "pytorch"
    monkeypatch.setattr(linear, "PROCESSOR", {"amx_bf16": True})
    assert choose("logits", head.bfloat16(), x) == "pytorch"


def test_a_bias_is_added() -> None:
    layer, x = nn.Linear(32, 48).bfloat16().requires_grad_(False), draw(1, 2, 32, seed=0).bfloat16()
    meant = F.linear(x.float(), layer.weight.float(), layer.bias.float())
    assert (linear.product(layer, x) - meant).abs().max() <= 1e-2 * meant.abs().max()


@pytest.mark.parametrize("attention", ["off", "per_token"])
def test_attention_beside_experts_decodes_by_it(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And computes what PyTorch computes, to the roundings of bfloat16."""
    monkeypatch.setattr(linear, "PROCESSOR", {})
    moe, _ = pico_moe("qwen2", attention)
    precise = moe(ids := drawn(1, 3)).logits
    moe.to(torch.bfloat16)
    linear.prepare_(moe)
    run, ran = linear.product, set()

    def noted(module: nn.Linear, x: Tensor) -> Tensor:
        ran.add(module)
        return run(module, x)

    with monkeypatch.context() as patch:
        patch.setattr(linear, "product", noted)
        found = moe(ids).logits
    assert {name.rpartition(".")[2] for name, module in moe.named_modules() if module in ran} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
    monkeypatch.setattr(linear, "supports", lambda *_: False)
    rounding = (moe(ids).logits - precise).norm()
    assert (found - precise).norm() <= 2 * rounding
