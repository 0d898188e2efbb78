"""The learned assignment: its parts against definitions, its gradients against automatic ones, and a planted partition."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tomoe as api
from conftest import make_pico, tokens
from pico_files import CommandLine, contents, ended, forked, refused, steps_of, write_pico, write_text
from tomoe.budget import BUDGET_TOLERANCE
from tomoe.cli import main
from tomoe.methods.dot_moe import DotMoE, DotMoEConfig, GroupStep, LearnedGroups, sinkhorn, transport_gradient
from tomoe.model.structure import shape_of
from tomoe.plans import Plan
from tomoe.plans.masking import masked, planned_masks
from tomoe.plans.partition.layouts import FineLayout
from tomoe.plans.routing import straight_through
from tomoe.recipe.conversion import Recipe

CAPACITIES = [4, 3, 3, 2]


def logits(dtype: torch.dtype = torch.float64, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(12, 4, generator=torch.Generator().manual_seed(5), dtype=dtype)


def unrolled(x: Tensor, capacities: Tensor, steps: int) -> Tensor:
    """Sinkhorn's iteration by its definition, in log space."""
    for _ in range(steps):
        x = x - x.logsumexp(0) + capacities.log()
        x = x - x.logsumexp(1, keepdim=True)
    return x.exp()


@pytest.mark.parametrize("spread", [0.1, 1.0, 40.0])
def test_fifty_steps_meet_both_marginals(spread: float) -> None:
    x, capacities = logits(torch.float32, spread), torch.tensor(CAPACITIES, dtype=torch.float32)
    soft = sinkhorn(x, capacities, 50)
    torch.testing.assert_close(soft.sum(1), torch.ones(12))
    if spread < 40:
        torch.testing.assert_close(soft.sum(0), capacities, rtol=1e-4, atol=1e-4)
    assert bool(soft.isfinite().all())
    torch.testing.assert_close(soft.double(), unrolled(x.double(), capacities.double(), 50), rtol=1e-3, atol=1e-5)


def test_logits_that_no_exp_can_hold_are_balanced() -> None:
    x = logits(torch.float32) + 1e4 * torch.tensor([1.0, -1.0, 0.5, 0.0])
    soft = sinkhorn(x, torch.tensor(CAPACITIES, dtype=torch.float32), 50)
    torch.testing.assert_close(soft.sum(0), torch.tensor(CAPACITIES, dtype=torch.float32), rtol=1e-3, atol=1e-3)


def test_the_gradient_is_that_of_the_converged_iteration() -> None:
    x, capacities = logits().requires_grad_(), torch.tensor(CAPACITIES, dtype=torch.float64)
    wanted = torch.randn(12, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    soft = unrolled(x, capacities, 200)
    (automatic,) = torch.autograd.grad((soft * wanted).sum(), x)
    found = transport_gradient(soft.detach(), wanted)
    torch.testing.assert_close(found, automatic, rtol=1e-6, atol=1e-9)
    # factors of rows and columns change nothing
    torch.testing.assert_close(found.sum(0), torch.zeros(4, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(found.sum(1), torch.zeros(12, dtype=torch.float64), atol=1e-9, rtol=0)


def test_the_gradient_is_that_of_finite_differences() -> None:
    x, capacities = logits(), torch.tensor(CAPACITIES, dtype=torch.float64)
    wanted = torch.randn(12, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = transport_gradient(sinkhorn(x, capacities, 400), wanted)
    for place in ((0, 0), (5, 3), (11, 1)):
        shift = torch.zeros_like(x)
        shift[place] = 1e-5
        up, down = (float((sinkhorn(x + sign * shift, capacities, 400) * wanted).sum()) for sign in (1, -1))
        assert float(found[place]) == pytest.approx((up - down) / 2e-5, rel=1e-4, abs=1e-8)


def test_the_choice_of_experts_has_the_gradient_of_a_sigmoid() -> None:
    z = torch.tensor([[2.0, 0.5, -1.0, 1.0]], requires_grad=True)
    routing = straight_through(z, 2, 0.5)
    assert routing.assignment.tolist() == [[1.0, 0.0, 0.0, 1.0]]
    (grad,) = torch.autograd.grad((routing.assignment * torch.tensor([1.0, 10.0, 100.0, 1000.0])).sum(), z)
    s = torch.sigmoid((z.detach() - 0.75) / 0.5)
    torch.testing.assert_close(grad, torch.tensor([[1.0, 10.0, 100.0, 1000.0]]) * s * (1 - s) / 0.5)


def network(model: PreTrainedModel, shared: int = 16, top_k: int = 3) -> LearnedGroups:
    """Random affinities to eight experts of four neurons."""
    shape = shape_of(model)
    layout = FineLayout(8, 4, shared, top_k)
    assert shared + 32 == shape.mlp_size
    net = LearnedGroups(shape, layout, DotMoEConfig())
    generator = torch.Generator().manual_seed(4)
    net.affinity.data.normal_(0, 0.3, generator=generator)
    for router in net.routers:
        router.weight.data.normal_(0, 0.5, generator=generator)
    net.experts_per_token[:] = top_k
    return net


@pytest.mark.parametrize("shared", [16, 0])
def test_rounding_fills_every_expert_and_its_gradient_is_that_of_the_transport(shared: int) -> None:
    net = network(make_pico("qwen2", intermediate_size=32 + shared), shared)
    hard = net.assignment(0)
    assert hard.detach().sum(0).round().tolist() == net.capacities
    assert bool(((hard.detach() - hard.detach().round()).abs() < 1e-6).all())
    wanted = torch.randn(hard.shape, generator=torch.Generator().manual_seed(1))
    (grad,) = torch.autograd.grad((hard * wanted).sum(), net.affinity)
    expected = transport_gradient(net.soft(0).detach(), wanted) / net.config.sinkhorn_temperature
    torch.testing.assert_close(grad[0], expected)
    assert not grad[1].any()


def batch_of(ids: Tensor) -> Any:
    return SimpleNamespace(input_ids=ids, mask=torch.ones_like(ids, dtype=torch.bool))


def test_a_step_measures_what_the_plan_loses() -> None:
    """Its KL is that of the plan's masks, and all that can learn has a gradient; the frozen weights have none."""
    model = make_pico("qwen2")
    net, ids = network(model), tokens(2, 24)
    terms = GroupStep(model, net, Recipe(method={"name": "dot_moe"}))(batch_of(ids), 0, 0)
    plan = net.plan()
    assert {(c.shared_size, c.expert_size, c.top_k) for c in plan.counts} == {(16, 4, 3)}
    whole = model(ids).logits.log_softmax(-1)
    with torch.no_grad(), masked(model, planned_masks(plan)):
        found = model(ids).logits.log_softmax(-1)
    kl = (whole.exp() * (whole - found)).sum(-1).mean()
    # the plan's routers hold bfloat16 values, and so do those of training where they have biases
    assert float(terms["distill"]) == pytest.approx(float(kl), rel=1e-3)
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())
    assert all(p.grad is None for p in model.parameters())


def plant_(model: PreTrainedModel, of_neuron: Tensor) -> None:
    """Let the neurons of a group read one direction of their own, so that a token needs whole groups of them."""
    generator = torch.Generator().manual_seed(9)
    for layer in model.model.layers:
        directions = torch.linalg.qr(torch.randn(32, 32, generator=generator)).Q[: int(of_neuron.max()) + 1]
        for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
            part.weight.copy_(
                2 * directions[of_neuron] * (1 + 0.1 * torch.rand(len(of_neuron), 1, generator=generator))
            )


def test_learning_lowers_the_loss_of_a_planted_partition() -> None:
    """Neurons that belong together were dealt out to different experts; affinities alone may change that."""
    model = make_pico("qwen2", intermediate_size=32)
    plant_(model, torch.arange(32) % 8)
    net, ids = network(model, shared=0, top_k=2), tokens(4, 24)
    net.affinity.data.copy_(torch.nn.functional.one_hot(torch.arange(32) // 4, 8).float().expand(2, -1, -1))
    # each planted direction has a router row, so that routing is right once the groups are
    for router, layer in zip(net.routers, model.model.layers, strict=True):
        router.weight.data.copy_(layer.mlp.gate_proj.weight[:8])
    step, optimizer = (
        GroupStep(model, net, Recipe(method={"name": "dot_moe"})),
        torch.optim.Adam([net.affinity], lr=0.05),
    )
    losses = []
    for i in range(60):
        optimizer.zero_grad()
        losses.append(float(step(batch_of(ids), i, 0)["distill"]))
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


SIZES = {
    "train.dtype": "float32", "data.seq_len": 16, "data.tokens": 1200, "data.calibration_tokens": 128,
    "data.evaluation_tokens": 64, "experts.num_experts": 64, "train.steps": 4, "train.save_every": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dot")
    write_pico(place / "dense")
    write_text(place / "text.txt")
    return place


def command(place: Path, name: str, out: Path, *more: str) -> list[str]:
    sets = [f"--set={key}={value}" for key, value in SIZES.items()]
    words = [name, place / "dense", "--method", "dot_moe", "--active", "0.6", "--data", place / "text.txt", "-o", out]
    return [str(word) for word in (*words, *sets, *more)]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "as_shipped")
def test_a_killed_run_ends_in_the_same_bytes(place: Path, tmp_path: Path, tomoe: CommandLine) -> None:
    assert tomoe(*command(place, "train", tmp_path / "whole")).code == 0

    def killed() -> None:
        real, calls = GroupStep.__call__, [0]

        def step(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        GroupStep.__call__ = step  # type: ignore[method-assign]
        main(command(place, "train", tmp_path / "run", "--resume"))

    assert ended(forked(killed)) == -signal.SIGKILL
    assert tomoe(*command(place, "train", tmp_path / "run", "--resume")).code == 0
    assert contents(tmp_path / "run" / "masks") == contents(tmp_path / "whole" / "masks")
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")
    for name in ("run", "whole"):
        assert tomoe("plan", tmp_path / name, "-o", tmp_path / f"{name}-plan").code == 0
    assert contents(tmp_path / "run-plan") == contents(tmp_path / "whole-plan")
    refused(tomoe("plan", tmp_path / "run", "--active", "0.5", "-o", tmp_path / "x"), "needs a run of its own")


@pytest.mark.slow
def test_the_way_to_a_folder(place: Path, tmp_path: Path, tomoe: CommandLine) -> None:
    made = tomoe(*command(place, "convert", tmp_path / "moe", "--set", "method.groups=random"))
    assert made.code == 0, made.err
    plan = Plan.load(tmp_path / "moe")
    assert abs(plan.active_fraction() - 0.6) <= BUDGET_TOLERANCE
    assert plan.notes["steps"] == 4
    assert {"held_out_before", "held_out"} <= plan.notes.keys()
    refused(
        tomoe(*command(place, "convert", tmp_path / "no", "--attention", "static")), "needs attention.pruning = off"
    )
    refused(
        tomoe(*command(place, "convert", tmp_path / "no", "--set", "method.sinkhorn_steps=0")), "sinkhorn_steps is 0"
    )


def test_where_nothing_is_left_out_there_is_nothing_to_learn() -> None:
    # beside so small a router all experts are as near to the budget as one less
    recipe = {"train.steps": 1, "experts.num_experts": 2, "experts.expert_size": 128}
    with pytest.raises(api.UserError, match="dot_moe has nothing to learn"):
        api.plan(make_pico("qwen2", intermediate_size=512), DotMoE(), tokens(8, 24), active=1.0, recipe=recipe)
