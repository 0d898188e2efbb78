"""The terms of the objective against their plain formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conftest import ATTENTION_MODES, make_network, make_pico, tokens
from tomoe.model.structure import shape_of
from tomoe.pruning import losses
from tomoe.pruning.losses import (
    CHUNK,
    active_fraction,
    balance_penalty,
    budget_penalty,
    coverage_penalty,
    kl_loss,
    language_model_loss,
    layer_widths,
    log_ratio,
    shift_targets,
)
from tomoe.pruning.mask_network import SampledLayerMasks
from tomoe.pruning.masking import masked
from tomoe.pruning.objective import objective
from tomoe.pruning.overlapping import SampledOverlapping
from tomoe.pruning.routing import ExpertRouter, Routing
from tomoe.recipe.conversion import LossSection

D, V = 16, 50
LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 37]  # around the borders of chunks


def states(length: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(length, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def head(dtype: torch.dtype = torch.float32, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(D, V, bias=bias).to(dtype).requires_grad_(False)


def padding(length: int) -> Tensor:
    """Every third token is padding; the first never is."""
    return torch.arange(length) % 3 != 2


def plain_distillation(student: Tensor, teacher: Tensor, out: nn.Module, valid: Tensor) -> Tensor:
    p, q = (out(h[valid]).log_softmax(-1) for h in (teacher, student))
    return F.kl_div(q, p, log_target=True, reduction="batchmean")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_distillation_is_the_divergence_from_the_teacher(length: int, bias: bool) -> None:
    student, teacher, valid, out = (
        states(length, 1).requires_grad_(),
        states(length, 2),
        padding(length),
        head(bias=bias),
    )
    loss = kl_loss(student, teacher, out, valid)
    expected = plain_distillation(student, teacher, out, valid)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    # a factor in front, as gradient accumulation puts there
    (actual,), (grad,) = (torch.autograd.grad(value / 3, student) for value in (loss, expected))
    torch.testing.assert_close(actual, grad, rtol=1e-4, atol=1e-7)
    assert not actual[~valid].any()


def test_distillation_gradient_by_finite_differences() -> None:
    student, teacher, valid, out = states(3, 1).requires_grad_(), states(3, 2), torch.ones(3, dtype=torch.bool), head()
    (actual,) = torch.autograd.grad(kl_loss(student, teacher, out, valid), student)
    exact, x, step = head().double(), student.detach().double(), 1e-5
    differences = torch.zeros_like(x)
    for i in range(x.numel()):
        shift = torch.zeros_like(x).index_put_((torch.tensor(i // D), torch.tensor(i % D)), torch.tensor(step).double())
        up, down = (plain_distillation(x + sign * shift, teacher.double(), exact, valid) for sign in (1, -1))
        differences.view(-1)[i] = (up - down) / (2 * step)
    torch.testing.assert_close(actual.double(), differences, rtol=1e-4, atol=1e-6)


def test_distillation_is_zero_at_the_teacher() -> None:
    student = states(20, 1).requires_grad_()
    loss = kl_loss(student, student.detach(), head(), padding(20))
    (grad,) = torch.autograd.grad(loss, student)
    assert loss.abs() < 1e-7
    assert grad.abs().max() < 1e-7


def test_distillation_with_a_bfloat16_head_computes_in_float32() -> None:
    student, teacher = states(CHUNK + 5, 1, torch.bfloat16).requires_grad_(), states(CHUNK + 5, 2, torch.bfloat16)
    valid, out = padding(CHUNK + 5), head(torch.bfloat16)
    loss = kl_loss(student, teacher, out, valid)
    expected = plain_distillation(student, teacher, lambda h: out(h).float(), valid)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    (actual,), (grad,) = (torch.autograd.grad(value, student) for value in (loss, expected))
    assert actual.dtype == torch.bfloat16
    assert (actual - grad).float().norm() <= 0.01 * grad.float().norm()  # two roundings of 2^-9 each


@pytest.mark.parametrize("length", LENGTHS)
def test_language_model_loss_is_the_cross_entropy(length: int) -> None:
    student, valid, out = states(length, 1).requires_grad_(), padding(length), head()
    targets = torch.randint(V, (length,), generator=torch.Generator().manual_seed(3))
    loss, expected = (
        language_model_loss(student, targets, out, valid),
        F.cross_entropy(out(student[valid]), targets[valid]),
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    (actual,), (grad,) = (torch.autograd.grad(value, student) for value in (loss, expected))
    torch.testing.assert_close(actual, grad, rtol=1e-4, atol=1e-7)


class Sizes(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


@pytest.mark.parametrize("kind", ["kl", "lm"])
def test_no_tensor_of_all_logits_ever_exists(kind: str) -> None:
    length = 5 * CHUNK
    student, valid, out, batches = states(length, 1).requires_grad_(), torch.ones(length, dtype=torch.bool), head(), []

    def recording(h: Tensor) -> Tensor:
        batches.append(len(h))
        return out(h)

    with Sizes() as sizes:
        if kind == "kl":
            loss = kl_loss(student, states(length, 2), recording, valid)
        else:
            loss = language_model_loss(student, torch.zeros(length, dtype=torch.long), recording, valid)
        loss.backward()
    assert student.grad is not None
    assert max(batches) <= CHUNK
    assert sizes.largest <= max(CHUNK * V, length * D)


def test_log_ratio() -> None:
    a = torch.tensor([0.2, 0.5, 0.7, 1.0])
    assert torch.equal(log_ratio(a, a.clone()), torch.zeros(4))
    torch.testing.assert_close(log_ratio(a, 0.5), log_ratio(torch.full((4,), 0.5), a))
    torch.testing.assert_close(log_ratio(3 * a, 1.5), log_ratio(a, 0.5))  # scale-free
    assert (log_ratio(torch.tensor([1.0, 0.6]), 0.5).diff() < 0).all()
    # floor: finite for an empty layer
    assert log_ratio(torch.tensor(0.0), 0.5).isfinite()
    far = torch.tensor([0.9, 0.9], requires_grad=True)
    log_ratio(far, torch.tensor([0.5, 0.1])).sum().backward()
    torch.testing.assert_close(far.grad, torch.tensor([1 / 0.9, 1 / 0.9]))  # as strong far away as near


def drawn(neuron_masks: Tensor, **others: Tensor) -> SampledLayerMasks:
    """What the penalties read of sampled masks, without a network behind them."""
    masks = object.__new__(SampledLayerMasks)
    experts = SampledOverlapping(ExpertRouter(1, len(neuron_masks)), neuron_masks, 1.0, seed=0)
    vars(masks).update(dict.fromkeys(("value_masks", "qk_mask", "static_values")) | others, experts=experts)
    return masks


def test_widths_are_those_of_the_widest_expert_and_token() -> None:
    shape = shape_of(make_pico("llama"))
    neurons, values = torch.zeros(2, 48), torch.zeros(3, 8)
    neurons[0, :5], neurons[1, 7:19] = 1.0, 1.0
    values[0, :2], values[2, 1:6] = 1.0, 1.0
    assert layer_widths(drawn(neurons, value_masks=values), shape) == (12, 8, 5)
    assert layer_widths(drawn(neurons, qk_mask=values[2], static_values=values[0]), shape) == (12, 5, 2)


def test_union_and_its_gradient() -> None:
    """d (1 - prod(1 - s_n)) / d s_n is the product of 1 - s over the others, zeros included."""
    s = torch.rand(4, 9, generator=torch.Generator().manual_seed(0))
    s[1, :3], s[2, 2:6], s[3, 4:] = 1.0, 1.0, 0.0
    s.requires_grad_()
    union = losses._union(s)
    torch.testing.assert_close(union, (1 - (1 - s[0]) * (1 - s[1]) * (1 - s[2]) * (1 - s[3])).mean())
    (grad,) = torch.autograd.grad(union, s)
    for n in range(4):
        others = [1 - s[m] for m in range(4) if m != n]
        torch.testing.assert_close(grad[n], others[0] * others[1] * others[2] / 9)


def test_coverage_is_the_mean_over_sites_that_have_it() -> None:
    half = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    whole = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    assert coverage_penalty([drawn(neuron_masks=whole)]) == pytest.approx(0.0)
    assert coverage_penalty([drawn(neuron_masks=half)]) == pytest.approx(0.6931, abs=1e-4)  # |log 1/2|
    three = [drawn(neuron_masks=half), drawn(neuron_masks=whole, value_masks=whole)]
    assert coverage_penalty(three) == pytest.approx(0.6931 / 3, abs=1e-4)


def test_balance_is_least_where_tokens_spread_evenly() -> None:
    def penalty(shares: list[float]) -> float:
        p = torch.tensor(shares)
        ids = torch.repeat_interleave(torch.arange(4), (p * 100).round().long())
        one_hot = F.one_hot(ids, 4).float()
        return float(balance_penalty([Routing(one_hot, p.expand(100, 4))]))

    assert penalty([0.25] * 4) == pytest.approx(1 / 4)
    assert 1 / 4 < penalty([0.3, 0.2, 0.25, 0.25]) < penalty([0.7, 0.1, 0.1, 0.1]) < penalty([1.0, 0, 0, 0])
    assert penalty([1.0, 0, 0, 0]) == pytest.approx(1.0)


def test_balance_pulls_probability_away_from_the_busy_expert() -> None:
    probs = torch.full((10, 2), 0.5, requires_grad=True)
    assignment = F.one_hot(torch.tensor([0] * 8 + [1] * 2), 2).float().requires_grad_()
    balance_penalty([Routing(assignment, probs)]).backward()
    torch.testing.assert_close(probs.grad, torch.tensor([0.08, 0.02]).expand(10, 2))
    assert assignment.grad is None


@pytest.mark.parametrize("attention", ATTENTION_MODES)
def test_active_fraction_of_whole_and_half_masks(attention: str) -> None:
    dense = make_pico("qwen2")
    shape = shape_of(dense)
    net = make_network(dense, attention)
    for start, expected in ((50.0, 1.0), (-50.0, 0.0)):
        for projection in (*net.neurons, *net.dims):
            projection.start.fill_(start)
        masks = net(seed=0)
        with masked(dense, masks), torch.no_grad():
            dense(tokens())
        kept_whole = 32 * 6 * 16 / (3 * 32 * 48 + 32 * 6 * 16) if attention == "off" else 0.0
        actual = active_fraction(masks, shape)
        assert actual.item() == pytest.approx(max(expected, kept_whole), abs=1e-6)


@pytest.mark.parametrize("attention", ATTENTION_MODES)
def test_budget_penalty_narrows_and_widens(attention: str) -> None:
    """Its gradient lowers every kind of mask logit above the budget, and raises it below."""
    dense = make_pico("llama")
    net = make_network(dense, attention)
    watched = [*net.neurons] if attention == "off" else [*net.neurons, *net.dims]
    for projection in watched:
        projection.linear.weight.requires_grad_(False)
        del projection._buffers["start"]
        projection.start = nn.Parameter(torch.full((4, 48) if projection in [*net.neurons] else (8 + 4,), -3.0))
    for target, sign in ((0.05, 1), (1.0, -1)):
        masks = net(seed=0)
        with masked(dense, masks):
            dense(tokens())
        fraction = active_fraction(masks, shape_of(dense))
        assert 0.05 < fraction.item() < 1.0
        starts = [projection.start for projection in watched]
        for grad in torch.autograd.grad(budget_penalty(fraction, target), starts):
            assert (sign * grad).sum() > 0
            # choices of V/O see what layers before them gave, so single neurons may count either way there
            assert attention == "per_token" or (sign * grad >= 0).all()


@pytest.mark.parametrize("off", ["budget_weight", "coverage_weight", "balance_weight"])
def test_a_weight_of_zero_is_an_ablation(off: str) -> None:
    """The term is still reported, and gives no gradient."""
    dense = make_pico("llama")
    net = make_network(dense, "per_token")
    for projection in net.neurons:
        projection.start -= 2  # few enough neurons that some are in no expert

    def gradients(weights: LossSection) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        masks = net(seed=0)
        with masked(dense, masks):
            dense(tokens())
        loss, terms = objective(torch.zeros(()), masks, shape_of(dense), 0.5, weights)
        trained = [p for p in net.parameters() if p.requires_grad]
        return list(torch.autograd.grad(loss, trained, allow_unused=True)), terms

    only = {name: 0.0 for name in ("budget_weight", "coverage_weight", "balance_weight")}
    whole, _ = gradients(LossSection(budget_weight=3.0, coverage_weight=3.0, balance_weight=3.0))
    without, terms = gradients(LossSection(**{name: 0.0 if name == off else 3.0 for name in only}))
    alone, _ = gradients(LossSection(**only | {off: 3.0}))
    assert terms[off.removesuffix("_weight")] > 0
    assert any(g is not None and g.any() for g in alone)
    for all_, rest, one in zip(whole, without, alone, strict=True):
        parts = [g for g in (rest, one) if g is not None]
        torch.testing.assert_close(
            all_ if all_ is not None else torch.zeros(()), sum(parts) if parts else torch.zeros(())
        )


def test_targets_are_the_next_tokens() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
    targets, valid = shift_targets(ids, torch.tensor([[True] * 4, [True, True, False, False]]))
    assert targets[valid].tolist() == [6, 7, 8, 6]
    assert valid.tolist() == [True, True, True, False, True, False, False, False]
    left = torch.tensor([[False, False, True, True]])
    targets, valid = shift_targets(torch.tensor([[0, 0, 5, 6]]), left)
    assert targets[valid].tolist() == [6]
