"""The mask network and what its masks do to a dense model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from conftest import ATTENTION_MODES, EMBEDDING_SIZE, PAIRS, make_network, make_pico, make_plan, tokens
from tomoe.methods.tomoe.carving import carve_
from tomoe.methods.tomoe.network import MaskNetwork
from tomoe.methods.tomoe.networks import mask_network
from tomoe.methods.tomoe.objective import SampledLayerMasks, objective, sampled_masks
from tomoe.model.structure import shape_of
from tomoe.plans.masking import masked, planned_masks
from tomoe.recipe.conversion import AttentionSection, LossSection
from tomoe.training.distillation import kl_loss


def student_and_teacher(
    model: PreTrainedModel, masks: list[SampledLayerMasks], ids: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Distillation loss of the masked model, with final hidden states of student and teacher."""
    attention_mask = mask.long()
    with torch.no_grad():
        teacher = model.model(input_ids=ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    with masked(model, masks):
        student = model.model(input_ids=ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    student, teacher = student.flatten(0, 1), teacher.flatten(0, 1)
    return kl_loss(student, teacher, model.lm_head, mask.flatten()), student, teacher


def local_network(model: PreTrainedModel, attention: str) -> MaskNetwork:
    """The ablation: every layer has its own attention embedding."""
    net = make_network(model, attention)
    section = AttentionSection(pruning=attention, embedding="local")
    local = mask_network(net.shape, net.layout, EMBEDDING_SIZE, section, net.sampling, seed=0)
    local.load_state_dict(net.state_dict(), strict=False)
    return local


@pytest.mark.parametrize("attention", ATTENTION_MODES)
def test_fine_grained_masks_of_a_step_are_those_of_the_plan(attention: str) -> None:
    """There is no noise in the choice of fine-grained experts."""
    dense = make_pico("llama")
    net = make_network(dense, attention, form="fine")
    x = torch.randn(24, net.shape.hidden_size, generator=torch.Generator().manual_seed(0))
    plan = make_plan(dense, attention, form="fine")
    for router, sampled, meant in zip(net.routers, sampled_masks(net, 0), planned_masks(plan), strict=True):
        router.weight.data.copy_(meant.experts.router.weight)
        assert torch.equal(sampled.neurons(x), meant.neurons(x))


@pytest.mark.parametrize("form", ["fine", "overlapping"])
@pytest.mark.parametrize("attention", ATTENTION_MODES)
def test_carved_experts_hold_nothing_of_what_is_learned(attention: str, form: str) -> None:
    """Beside whole attention, routers and who is in which expert are all."""
    held = {name.split(".")[0] for name in make_network(make_pico("llama"), attention, form=form).state_dict()}
    default = form == "fine" and attention == "off"
    assert (held == {"routers", "expert_of_neuron", "experts_per_token"}) is default


def test_masks_are_hard_and_shared_as_the_method_says() -> None:
    """One mask per expert, one of Q and K for all tokens, one of V and O per token; rope partners share their fate."""
    dense = make_pico("phi")  # rotates 4 of 8 dims
    shape, net, ids = shape_of(dense), make_network(dense, "per_token"), tokens(2, 12)
    masks = sampled_masks(net, 0)
    with masked(dense, masks):
        dense(ids)
    for m in masks:
        assert m.experts.neuron_masks.shape == (4, shape.mlp_size)
        assert m.attention.qk_mask.shape == (shape.head_dim,)
        assert m.attention.value_masks.shape == (24, shape.head_dim)
        assert m.routing.assignment.shape == m.routing.probs.shape == (24, 4)
        for mask in (m.experts.neuron_masks, m.attention.qk_mask, m.attention.value_masks, m.routing.assignment):
            assert set(mask.unique().tolist()) <= {0.0, 1.0}
        assert torch.equal(m.attention.qk_mask[:2], m.attention.qk_mask[2:4])
        assert len(m.attention.value_masks.unique(dim=0)) > 1


class Randoms(TorchDispatchMode):
    """Remembers how many random numbers the largest draw took."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(out, Tensor):
            self.sizes.append(out.numel())
        return out


def test_no_noise_for_each_token_and_neuron() -> None:
    dense = make_pico("llama")
    net, ids = make_network(dense, "per_token"), tokens(4, 16)
    dense.set_attn_implementation("eager")  # the kernels of sdpa count as random, because they could drop out
    with Randoms() as randoms:
        masks = sampled_masks(net, 0)
        with masked(dense, masks):
            dense(ids)
    num_tokens, num_experts, mlp_size, head_dim = 64, 4, 48, 8
    assert max(randoms.sizes) == max(num_experts * mlp_size, num_tokens * num_experts, num_tokens * head_dim)


def test_seeds_decide_the_draw() -> None:
    dense = make_pico("qwen3")
    net, ids = make_network(dense, "per_token"), tokens()

    def draw(*seeds: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        masks = sampled_masks(net, *seeds)
        with masked(dense, masks):
            dense(ids)
        return (
            masks[0].experts.neuron_masks,
            masks[0].attention.qk_mask,
            masks[0].routing.assignment,
            masks[0].attention.value_masks,
        )

    one, again, other, others_tokens = draw(0), draw(0), draw(1), draw(0, 1)
    assert all(map(torch.equal, one, again))
    assert not any(map(torch.equal, one, other))
    assert [torch.equal(a, b) for a, b in zip(one, others_tokens, strict=True)] == [True, True, False, False]
    assert not torch.equal(*(m.experts.neuron_masks for m in sampled_masks(net, 0)))  # layers draw for themselves


def test_a_network_is_its_seed() -> None:
    dense = make_pico("llama")
    torch.manual_seed(3)
    one, again = (make_network(dense, "per_token").state_dict() for _ in range(2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    net = make_network(dense, "per_token")
    section = net.attention.section
    other = mask_network(net.shape, net.layout, EMBEDDING_SIZE, section, net.sampling, seed=1).state_dict()
    drawn = {
        "hypernetwork.inputs",
        "routers.0.weight",
        "neurons.0.linear.weight",
        "attention.token_embeddings.0.weight",
    }
    assert not any(torch.equal(one[name], other[name]) for name in drawn)
    assert "hypernetwork.inputs" not in dict(net.named_parameters())


@pytest.mark.parametrize("family", ["qwen2", "phi"])
def test_a_dropped_neuron_keeps_its_gradient(family: str) -> None:
    """One multiplication, behind the product of gate and up: with two, nothing dropped could ever come back."""
    dense = make_pico(family)
    net, ids = make_network(dense, "off"), tokens(4, 16)
    masks = sampled_masks(net, 0)
    for m in masks:
        m.experts.neuron_masks.retain_grad()
    loss, _, _ = student_and_teacher(dense, masks, ids, torch.ones_like(ids, dtype=torch.bool))
    loss.backward()
    for m in masks:
        used = m.routing.assignment.sum(0) > 0
        dropped = m.experts.neuron_masks.grad[used][m.experts.neuron_masks[used] == 0]
        assert len(dropped) > 10
        assert (dropped != 0).float().mean() > 0.95


@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_everything_trainable_gets_a_gradient_and_nothing_else(family: str, attention: str) -> None:
    dense = make_pico(family)
    net, ids = make_network(dense, attention), tokens(2, 12)
    weights = copy.deepcopy(dense.state_dict())
    masks = sampled_masks(net, 0)
    loss, _, _ = student_and_teacher(dense, masks, ids, torch.ones_like(ids, dtype=torch.bool))
    objective(loss, masks, net.shape, 0.5, LossSection())[0].backward()
    for name, parameter in net.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == parameter.requires_grad, name
        assert parameter.dtype == torch.float32
    untrained = {name.split(".")[-3] for name, p in net.named_parameters() if not p.requires_grad}
    expected = {"off": set(), "static": {"token_embeddings"}, "per_token": set()}
    assert untrained == expected[attention]
    torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1).step()
    assert all(parameter.grad is None for parameter in dense.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in dense.state_dict().items())


def test_local_embeddings_learn_without_the_hypernetwork() -> None:
    """The ablation: what attention keeps is each layer's own matter, and it can still be learned."""
    dense = make_pico("llama")
    net, ids = local_network(dense, "per_token"), tokens(2, 12)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in range(2):  # the first step moves the projections' biases away from zero, the second all the rest
        masks = sampled_masks(net, step)
        loss, _, _ = student_and_teacher(dense, masks, ids, torch.ones_like(ids, dtype=torch.bool))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(bool(p.grad.any()) for p in net.attention.dims.parameters())
    assert not net.attention.embeddings(net.hypernetwork()).any()


def test_a_carved_static_mask_learns_without_the_hypernetwork() -> None:
    """Its embedding is all that it is made from: were that zero, beside weights that start at zero, nothing would move."""
    model, ids = make_pico("llama"), tokens(2, 12)
    mask = torch.ones_like(ids, dtype=torch.bool)
    net = local_network(model, "static")
    carve_(net, model, ids, mask, 0.7, seed=5)
    loss, _, _ = student_and_teacher(model, sampled_masks(net, 0), ids, mask)
    loss.backward()
    assert all(bool(p.linear.weight.grad.any()) for p in net.attention.dims)
    assert len(net.attention.embeddings(net.hypernetwork()).unique(dim=0)) == 2, "the same in both layers"
    assert torch.equal(local_network(model, "static").attention.inputs, net.attention.inputs)


@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_activation_checkpointing_changes_no_gradient(family: str, attention: str) -> None:
    dense = make_pico(family)
    net, ids = make_network(dense, attention), tokens(2, 12)

    def gradients() -> list[Tensor]:
        net.zero_grad()
        masks = sampled_masks(net, 0)
        with masked(dense, masks):  # around the backward pass too: layers run again there
            student = dense.model(input_ids=ids, use_cache=False).last_hidden_state
            distill = kl_loss(student.flatten(0, 1), teacher, dense.lm_head, torch.ones(24, dtype=torch.bool))
            objective(distill, masks, net.shape, 0.5, LossSection())[0].backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    with torch.no_grad():
        teacher = dense.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    plain = gradients()
    runs: list[None] = []
    handle = dense.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(None))
    dense.train()
    # the second is the older name, which newer versions warn of
    enable = getattr(dense, "activation_checkpointing_enable", None) or dense.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    again = gradients()
    handle.remove()
    assert len(runs) == 2, "the layer did not run again in the backward pass"
    assert all(map(torch.equal, plain, again))
    assert len(plain) == len(again)


@pytest.mark.parametrize(("attention", "side"), [("off", "right"), ("static", "left"), ("per_token", "left")])
def test_padding_counts_nowhere(attention: str, side: str) -> None:
    """Other tokens under the padding: every term of the objective stays as it was."""
    dense = make_pico("llama")
    net = make_network(dense, attention)
    real = torch.stack([torch.arange(12) < n for n in (12, 7, 3)])
    real = real.flip(1) if side == "left" else real

    def terms(seed: int) -> dict[str, Tensor]:
        ids = torch.where(real, tokens(3, 12), tokens(3, 12, seed))
        masks = sampled_masks(net, 0, valid=real.flatten())
        loss, _, _ = student_and_teacher(dense, masks, ids, real)
        assert all(len(m.routing.assignment) == len(m.routing.probs) == int(real.sum()) for m in masks)
        return objective(loss, masks, net.shape, 0.5, LossSection())[1]

    one, other = terms(seed=1), terms(seed=2)
    assert set(one) == {"distill", "budget", "coverage", "balance", "active_fraction"}
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=0, msg=name)


def test_bfloat16_base_with_float32_masks() -> None:
    dense = make_pico("qwen2").bfloat16()
    net, ids = make_network(dense, "per_token"), tokens(2, 12)
    masks = sampled_masks(net, 0)
    loss, student, _ = student_and_teacher(dense, masks, ids, torch.ones_like(ids, dtype=torch.bool))
    assert student.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.neurons.parameters())
    assert masks[0].routing.probs.dtype == masks[0].experts.neuron_masks.dtype == torch.float32
