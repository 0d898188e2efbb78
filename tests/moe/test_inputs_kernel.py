"""The kernels for the largest inputs of a projection, and for linear layers: against their definitions."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace

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
from tomoe.moe.modeling_tomoe import Choice, choose, choosing_class

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
        found = inputs.kernel()(norms, weight, bias)(x, count)
        assert float((found.double() - meant).abs().max()) <= DTYPES[dtype] * float(meant.abs().max()), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_scores_are_taken_by_position(dtype: torch.dtype) -> None:
    """Scores of three values only, some of them zero: exactly as many inputs as asked for, the first of equal ones."""
    x = (torch.arange(60) * 7 % 3).to(dtype)[None]
    weight = torch.eye(60, dtype=dtype)
    order = sorted(range(60), key=lambda i: (-float(x[0, i]), i))
    for count in (1, 7, 20, 33, 40, 59):
        found = inputs.kernel()(torch.ones(60), weight, None)(x, count)
        chosen = [i for i in order[:count] if x[0, i]]
        assert found[0].nonzero().flatten().tolist() == sorted(chosen)
        masked = modeling_tomoe.chosen_inputs(x, torch.ones(60), count)
        assert torch.equal(masked, found)


def test_any_number_of_threads_gives_the_same_bytes(set_threads: Callable[[int], None]) -> None:
    x, weight, norms = draw(2, 700, seed=1), draw(700, 4500, seed=2), torch.ones(700)
    results = []
    for threads in (1, 2, 3, 7):
        set_threads(threads)
        results.append(inputs.kernel()(norms, weight, None)(x, 400))
    assert all(torch.equal(results[0], other) for other in results[1:])


def choosing(modules: Sequence[nn.Module], count: int) -> Choice:
    """Modules that read the same input, of which a token uses so many numbers."""
    choice = Choice(modules, SimpleNamespace(tomoe_active=0.5, layer_inputs=lambda kind, layer: count), "up", 0)
    for module in modules:
        module.__class__ = choosing_class(type(module))
        module.choice = choice
    return choice


@pytest.mark.parametrize("kind", ["linear", "conv1d", "biases on some"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_modules_side_by_side_give_what_each_gives_alone(kind: str, dtype: torch.dtype) -> None:
    sizes, width, count = (40, 24, 72), 50, 21
    torch.manual_seed(0)
    if kind == "conv1d":
        modules = [Conv1D(size, width) for size in sizes]
        for module in modules:
            module.bias.normal_()
    else:
        modules = [nn.Linear(width, size, bias=kind == "linear" or size == 24) for size in sizes]
    modules = [module.to(dtype).requires_grad_(False) for module in modules]
    plain = [module.state_dict() for module in modules]
    plain = [{name: t.clone() for name, t in state.items()} for state in plain]
    choice = choosing(modules, count)
    for tokens in (1, 3):
        x = draw(1, tokens, width, seed=tokens).to(dtype)
        meant = [module.masked(x) for module in modules]
        for _ in range(2):
            for module, expected in zip(modules, meant, strict=True):
                error = (module(x).float() - expected.float()).abs().max()
                assert float(error) <= DTYPES[dtype] * float(expected.float().abs().max())
        assert "ready" in choice.kept
    # the same x with other weights, and with other numbers of inputs
    for change in (
        lambda: modules[0].weight.mul_(torch.linspace(0.1, 3, width) if kind != "conv1d" else 2),
        lambda: setattr(choice, "instead", 9),
    ):
        modules[0](x)
        change()
        error = (modules[0](x).float() - modules[0].masked(x).float()).abs().max()
        assert float(error) <= DTYPES[dtype] * float(modules[0].masked(x).float().abs().max())
    choice.instead = None
    for module, state in zip(modules, plain, strict=True):
        module.load_state_dict(state)
    for module, state in zip(modules, plain, strict=True):
        assert all(torch.equal(module.state_dict()[name], t) for name, t in state.items())
    long = draw(1, 9, width, seed=9).to(dtype)
    for module, state in zip(modules, plain, strict=True):
        weight = state["weight"] if kind == "conv1d" else state["weight"].t()
        meant_long = long.float() @ weight.float() + state.get("bias", torch.zeros(1)).float()
        assert float((module(long).float() - meant_long).abs().max()) <= DTYPES[dtype] * float(meant_long.abs().max())


def test_where_it_cannot_run_masks_do() -> None:
    """float64, weights that train, no kernel: the same numbers."""
    modules = [nn.Linear(32, 24, dtype=torch.float64)]
    choosing(modules, 9)
    x = draw(1, 32, seed=0).double()
    assert torch.equal(modules[0](x), modules[0].masked(x))
    assert "ready" not in modules[0].choice.kept
    modules = [nn.Linear(32, 24)]
    choosing(modules, 9)
    with torch.enable_grad():
        modules[0](x.float()).sum().backward()
    gradient = modules[0].weight.grad
    assert gradient is not None
    assert int((gradient[0] != 0).sum()) == 9


def test_a_buffer_that_is_written_again_is_another_input() -> None:
    """A server that decodes from one buffer in inference mode, where tensors do not count what was written to them."""
    modules = [nn.Linear(50, 24), nn.Linear(50, 8)]
    for module in modules:
        module.requires_grad_(False)
    choosing(modules, 20)
    with torch.inference_mode():
        x = draw(1, 50, seed=0)
        for seed in (1, 2):
            for module in modules:
                torch.testing.assert_close(module(x), module.masked(x), rtol=1e-5, atol=1e-6)
            x.copy_(draw(1, 50, seed=seed))


def test_what_training_wrote_without_a_stamp_is_seen_after_it() -> None:
    modules = [nn.Linear(50, 24), nn.Linear(50, 8)]
    for module in modules:
        module.eval().requires_grad_(False)
    choosing(modules, 20)
    x = draw(1, 50, seed=0)
    modules[0](x)
    for module in modules:
        module.train()
        module.bias.data.add_(1)
        module.weight.data.mul_(torch.linspace(0.1, 5, 50))
    for module in modules:
        module.eval()
    fresh = Choice(modules, modules[0].choice.config, "up", 0)
    for module in modules:
        meant = module.whole(modeling_tomoe.chosen_inputs(x, fresh.norms(), 20))
        torch.testing.assert_close(module(x), meant, rtol=1e-5, atol=1e-6)


def test_weights_that_are_computed_at_each_use() -> None:
    module = nn.Linear(50, 24).requires_grad_(False)
    choice = choosing([module], 20)
    parametrize.register_parametrization(module, "weight", nn.Hardtanh(-0.05, 0.05))
    x = draw(1, 50, seed=0)
    assert torch.equal(module(x), module.masked(x))
    assert "ready" not in choice.kept


def test_memory_of_weights_that_were_replaced_is_free() -> None:
    """The modules alone hold their weights."""
    module = nn.Linear(50, 24).requires_grad_(False)
    choosing([module], 20)
    module(draw(1, 50, seed=0))
    held = weakref.ref(module.weight.untyped_storage())
    module.bfloat16()
    assert held() is None


def test_scores_that_are_no_numbers_are_the_largest() -> None:
    """0 times inf, NaN with a sign on some processors, is one of so many inputs, not one more; nothing else is."""
    norms, weight = torch.ones(60), torch.eye(60)
    norms[7] = torch.inf
    x = draw(1, 60, seed=0)
    x[0, 7] = 0
    order = sorted(set(range(60)) - {7}, key=lambda i: -float(x[0, i].abs()))
    for found in (
        inputs.kernel()(norms, weight, None)(x, 20),
        modeling_tomoe.chosen_inputs(x, norms, 20),
    ):
        assert found[0].nonzero().flatten().tolist() == sorted(order[:19])
    negative = torch.full((60,), -0x400000, dtype=torch.int32).view(torch.float32)
    assert bool(negative.isnan().all())
    assert inputs.kernel()(negative, weight, None)(x, 20).isfinite().all()


def test_threads_that_start_together_prepare_a_choice_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time would free the memory that the other one reads."""
    module = nn.Linear(50, 24).requires_grad_(False)
    choice = choosing([module], 20)
    packed, prepared = inputs._packed, []

    def slowly(own: Choice) -> Tensor:
        matrices = packed(own)
        prepared.append(own)
        time.sleep(0.1)
        return matrices

    monkeypatch.setattr(inputs, "_packed", slowly)
    tokens = [draw(1, 50, seed=seed) for seed in range(3)]
    results: dict[int, Tensor] = {}
    begin = threading.Barrier(len(tokens))

    def run(i: int) -> None:
        begin.wait()
        with torch.no_grad():
            results[i] = module(tokens[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(tokens))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert prepared == [choice]
    for i, x in enumerate(tokens):
        torch.testing.assert_close(results[i], module.masked(x), rtol=1e-5, atol=1e-6)


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
    linear.use_(moe)
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
    monkeypatch.setattr(linear, "suits", lambda *_: False)
    rounding = (moe(ids).logits - precise).norm()
    assert (found - precise).norm() <= 2 * rounding
