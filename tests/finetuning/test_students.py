"""The equation, extended to training: pseudo-MoE and MoE get the same gradients and become the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from pseudo_moe import PseudoMoE
from torch import Tensor
from transformers import PreTrainedModel

from conftest import FAMILIES, FORMS, make_pico, make_plan, tokens
from tomoe.data.corpus import Sequences
from tomoe.errors import UserError
from tomoe.finetuning import students
from tomoe.finetuning.students import FinetuneStep, MoEStudent, check_packages
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import BACKENDS, ToMoEForCausalLM
from tomoe.plans import ALWAYS, Plan
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.training.loop import Training
from tomoe.training.run_folder import RunFolder

pytestmark = pytest.mark.slow


class Text:
    """Two fresh sequences a pass, the second with padding."""

    def batch(self, step: int, micro: int, batch_size: int, accumulation: int, seed: int) -> Sequences:
        ids = tokens(2, 12, seed=step * accumulation + micro)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[1, 9:] = False
        return Sequences(ids, mask)


def recipe(*changes: str) -> FinetuneRecipe:
    small = ["train.steps=3", "train.learning_rate=1e-2", "train.weight_decay=0.1", "loss.balance_weight=0.5"]
    return FinetuneRecipe.load(None, [*small, *changes])


def student(
    made: FinetuneRecipe, dense: PreTrainedModel, plan: Plan, backend: str = "auto", pseudo: bool = False
) -> MoEStudent:
    if pseudo:
        return PseudoMoE(dense, plan, made)
    moe = fold(dense, plan)
    moe.config.tomoe_expert_backend = backend
    return MoEStudent(moe, plan, made)


def step_of(made: FinetuneRecipe, learner: MoEStudent, teacher: PreTrainedModel) -> FinetuneStep:
    return FinetuneStep(learner, made, None if made.loss.objective == "lm" else teacher)


def trained(
    made: FinetuneRecipe, family: str, attention: str, folder: Path, pseudo: bool = False, form: str = "overlapping"
) -> tuple[ToMoEForCausalLM, Plan, ToMoEForCausalLM]:
    """(the result, its plan, the model before), after the steps of the recipe."""
    plan = make_plan(make_pico(family), attention, form=form)
    learner = student(made, make_pico(family), plan, pseudo=pseudo)
    run = RunFolder(folder, "weights")
    run.begin(made, resume=False)
    teacher = make_pico(family)
    training = Training(
        learner.model, learner.learned, made.train, made.seed, Text(), run, step_of(made, learner, teacher)
    )
    for group in training.optimizer.param_groups:
        # at 1e-8 a single weight whose gradient is rounding (8e-9) moves as far as any other
        group["eps"] = 1e-6
    training.train()
    moe, after = learner.finish("")
    return moe, after, fold(make_pico(family), plan)


def gradients(
    made: FinetuneRecipe,
    family: str,
    attention: str,
    pseudo: bool = False,
    backend: str = "auto",
    form: str = "overlapping",
) -> dict[str, Tensor]:
    """Of one pass, by names of the MoE: what the pseudo-MoE has is cut out of its dense matrices by folding them."""
    dense, plan = make_pico(family), make_plan(make_pico(family), attention, form=form)
    learner = student(made, dense, plan, backend, pseudo)
    step_of(made, learner, make_pico(family))(Text().batch(0, 0, 1, 1, 0), 0, 0)
    learned = {name.replace("/", "."): p.grad for name, p in learner.learned.named_parameters()}
    routers = {name: g for name, g in learned.items() if name.startswith("router.") and g is not None}
    with torch.no_grad():
        for p in learner.model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    moe = fold(dense, plan) if pseudo else learner.model
    return routers | {name: p.detach() for name, p in moe.named_parameters() if "router." not in name}


def assert_alike(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error, scale = (actual[name] - value).norm(), value.norm()
        assert error <= tolerance * scale + 1e-8, f"{name}: off by {error:.2g} of {scale:.2g}"


# MLPs and attention are folded apart
CELLS = [(family, "per_token", FORMS[i % 2]) for i, family in enumerate(FAMILIES)]


@pytest.mark.parametrize(
    ("family", "attention", "form"), [*CELLS, ("qwen2", "off", "fine"), ("qwen2", "static", "overlapping")]
)
def test_the_pseudo_moe_has_the_same_gradients(family: str, attention: str, form: str) -> None:
    expected = gradients(recipe(), family, attention, pseudo=True, form=form)
    # of each layer the weight and, for fine-grained experts, the bias
    assert sum(name.startswith("router.") and bool(g.any()) for name, g in expected.items()) == (
        4 if form == "fine" else 2
    )
    assert_alike(gradients(recipe(), family, attention, form=form), expected, 1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_every_backend_has_the_same_gradients(form: str) -> None:
    expected = gradients(recipe(), "llama", "off", pseudo=True, form=form)
    for backend in ("auto", *BACKENDS["experts"]):
        assert_alike(gradients(recipe(), "llama", "off", backend=backend, form=form), expected, 1e-4)


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        (["loss.objective=lm"], "overlapping"),
        (["routers=frozen"], "overlapping"),
        (["routers=frozen"], "fine"),
        (["train.gradient_checkpointing=true"], "fine"),
    ],
)
def test_so_they_have_under_other_losses_and_settings(changes: list[str], form: str) -> None:
    expected = gradients(recipe(*changes), "qwen3", "per_token", pseudo=True, form=form)
    assert_alike(gradients(recipe(*changes), "qwen3", "per_token", form=form), expected, 1e-4)


@pytest.mark.parametrize(("family", "form"), [("llama3", "fine"), ("qwen2", "overlapping"), ("phi", "overlapping")])
def test_the_pseudo_moe_becomes_the_same_model(family: str, form: str, tmp_path: Path) -> None:
    """Three steps of AdamW, noise-free: what is left between the two is rounding, far less than the way that they went."""
    moe, plan, before = trained(recipe(), family, "per_token", tmp_path / "moe", form=form)
    folded, other, _ = trained(recipe(), family, "per_token", tmp_path / "pseudo", pseudo=True, form=form)
    ids = tokens(4, 24, seed=9)
    with torch.no_grad():
        start, one, two = (model(ids).logits for model in (before, moe, folded))
    assert (one - two).norm() <= 1e-4 * (one - start).norm()
    was, theirs = dict(before.named_parameters()), dict(folded.named_parameters())
    for name, p in moe.named_parameters():
        # a bias of K shifts all scores of a query alike: its gradient is rounding, which AdamW blows up, to no effect
        if form == "fine" and name.endswith("router.weight"):
            # numbers of bfloat16: the two have trained in float32, and few lie beside a border, of which they take either side
            apart = (p - theirs[name]).abs()
            assert bool((apart <= 2**-7 * p.abs()).all()), name
            assert float((apart > 0).float().mean()) <= 0.02, name
        elif not name.endswith("k_proj.bias"):
            assert (p - theirs[name]).norm() <= 1e-3 * (p - was[name]).norm() + 1e-6, name
    for i, (a, b) in enumerate(zip(plan.layers, other.layers, strict=True)):
        router = moe.model.layers[i].mlp.router.weight
        assert torch.equal(a.router_weight, router)
        assert torch.equal(router, router.bfloat16().float()), "an export in bfloat16 could not hold it"
        assert torch.equal(b.router_weight, folded.model.layers[i].mlp.router.weight)
        assert not torch.equal(router, before.model.layers[i].mlp.router.weight)
        if form == "fine":
            bias, was_bias = (m.model.layers[i].mlp.router.bias for m in (moe, before))
            assert torch.equal(a.router_bias, bias)
            assert torch.equal(b.router_bias, folded.model.layers[i].mlp.router.bias)
            # one expert of a layer is there for every token, and stays so
            always = was_bias >= ALWAYS
            assert int(always.sum()) == 1
            assert torch.equal(bias[always], was_bias[always])
            assert bool((bias != was_bias)[~always].all())


def test_a_bias_is_learned_for_the_weights_that_the_plan_holds() -> None:
    """Routers of fine-grained experts run with bfloat16 values while they learn, and are learned in float32."""
    learner = student(recipe(), make_pico("llama"), make_plan(make_pico("llama"), "off", form="fine"))
    router = learner.routers[0]
    with torch.no_grad():
        for p in learner.learned.parameters():
            p.add_(1e-4)
    learner.learned.write_()
    master = dict(learner.learned.named_parameters())["router/0/weight"]
    assert not torch.equal(master, master.bfloat16().float())
    assert torch.equal(router.weight, master.bfloat16().float())
    _, plan = learner.finish("")
    assert torch.equal(plan.layers[0].router_weight, master.bfloat16().float())


def test_what_stays_as_it_is(tmp_path: Path) -> None:
    """Embeddings, output matrix and value routers always; routers where they are frozen. The given plan is not touched."""
    made = recipe("routers=frozen")
    plan = make_plan(make_pico("llama"), "per_token")
    kept = [layer.router_weight.clone() for layer in plan.layers]
    moe, after, before = trained(made, "llama", "per_token", tmp_path)
    was = dict(before.named_parameters())
    stays = {name for name, p in moe.named_parameters() if torch.equal(p, was[name])}
    assert stays == {name for name in was if "router." in name or "embed" in name or "lm_head" in name}
    assert all(
        torch.equal(layer.router_weight, w) for p in (plan, after) for layer, w in zip(p.layers, kept, strict=True)
    )


def test_the_balance_term_pulls_tokens_to_experts_that_have_none() -> None:
    """Its part of the last router's gradient is that of sum_i F_i P_i, the mean over layers, at the choices that tokens make.

    Two rows of a router are opposite and two are zero, so that two experts have no tokens whatever the inputs are. Routers
    before the last one have a part in what later ones see.
    """
    dense, batch = make_pico("llama"), Text().batch(0, 0, 1, 1, 0)
    plan, row = make_plan(dense, "off"), torch.linspace(-1, 1, dense.config.hidden_size)
    weight = torch.stack([row, -row, 0 * row, 0 * row])
    plan = replace(plan, layers=tuple(replace(layer, router_weight=weight) for layer in plan.layers))

    def found(balance_weight: int) -> tuple[Tensor, Tensor]:
        """The gradient of the last router, and what it sees of the tokens that count."""
        made, inputs = recipe(f"loss.balance_weight={balance_weight}"), []
        learner = student(made, make_pico("llama"), plan)
        learner.routers[-1].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
        step_of(made, learner, make_pico("llama"))(batch, 0, 0)
        return dict(learner.learned.named_parameters())["router/1/weight"].grad, inputs[0][batch.mask.flatten()]

    (with_term, x), (without, _) = found(10), found(0)
    router = weight.clone().requires_grad_()
    logits = x @ router.T
    shares = F.one_hot(logits.argmax(1), 4).float().mean(0)
    assert shares[:2].sum() == 1
    (meant,) = torch.autograd.grad((shares * logits.softmax(1).mean(0)).sum() / len(plan.layers), router)
    assert meant[2:].norm() > 1e-2 * meant.norm() > 0
    assert (with_term - without - 10 * meant).norm() <= 1e-4 * (with_term.norm() + without.norm())


def test_updates_smaller_than_a_unit_of_bfloat16_add_up() -> None:
    """One step of 1e-5 moves no bfloat16 weight of size 1; forty of them, summed in float32, move many."""
    learner = student(recipe(), make_pico("llama").bfloat16(), make_plan(make_pico("llama"), "off"))
    working = [w for _, w in learner.learned.copies]
    before = [w.clone() for w in working]
    assert len(working) > 10
    assert all(p.dtype == torch.float32 for p in learner.learned.parameters())
    moved = []
    for _ in range(40):
        with torch.no_grad():
            for p in learner.learned.parameters():
                p.add_(2e-5)
        learner.learned.write_()
        moved.append(sum(int((w != b).sum()) for w, b in zip(working, before, strict=True)))
    assert moved[-1] > 10 * moved[0]


def test_steps_are_relative_to_the_size_of_each_matrix(tmp_path: Path) -> None:
    """The first update of AdamW moves every weight by the learning rate, here by a thousandth of the matrix's RMS."""
    made = recipe("train.steps=1", "train.learning_rate=1e-3", "train.weight_decay=0", "train.warmup_steps=0")
    learner = student(made, make_pico("llama"), make_plan(make_pico("llama"), "off"))
    run, learned = RunFolder(tmp_path, "weights"), learner.learned
    run.begin(made, resume=False)
    step, before = (
        step_of(made, learner, make_pico("llama")),
        {n: p.detach().clone() for n, p in learned.named_parameters()},
    )
    Training(learner.model, learned, made.train, 0, Text(), run, step, scales=learned.scales()).train()
    moved = {
        name: (p - before[name]).abs().max() / before[name].square().mean().sqrt()
        for name, p in learned.named_parameters()
    }
    sizes = [float(w.square().mean().sqrt()) for w in before.values()]
    assert max(sizes) > 5 * min(sizes)
    assert all(9e-4 < ratio < 1.01e-3 for ratio in moved.values()), moved


def test_gradients_of_bfloat16_weights_are_summed_in_float32() -> None:
    made = recipe("train.gradient_accumulation_steps=2")
    learner = student(made, make_pico("llama").bfloat16(), make_plan(make_pico("llama"), "off"))
    train_step = step_of(made, learner, make_pico("llama").bfloat16())
    singles = []
    for micro in range(2):
        learner.learned.zero_grad(set_to_none=True)
        train_step(Text().batch(0, micro, 1, 2, 0), 0, micro)
        singles.append([p.grad.clone() for p in learner.learned.parameters() if p.grad is not None])
    learner.learned.zero_grad(set_to_none=True)
    for micro in range(2):
        train_step(Text().batch(0, micro, 1, 2, 0), 0, micro)
    together = [p.grad for p in learner.learned.parameters() if p.grad is not None]
    for both, one, two in zip(together, *singles, strict=True):
        assert torch.equal(both, one + two)
    assert all(weight.grad is None for _, weight in learner.learned.copies)
    # and what an optimizer does to the float32 copies is what runs next
    with torch.no_grad():
        for exact, _ in learner.learned.copies:
            exact.mul_(1.5)
    train_step(Text().batch(0, 0, 1, 2, 0), 0, 0)
    assert all(torch.equal(weight, exact.bfloat16()) for exact, weight in learner.learned.copies)


def adapted(family: str, folder: Path, form: str) -> tuple[Float[Tensor, "B S V"], ToMoEForCausalLM]:
    """Logits while adapters stand beside the weights, and the merged result."""
    plan, made = make_plan(make_pico(family), "off", form=form), recipe("weights=lora", "lora.rank=2")
    learner = student(made, make_pico(family), plan)
    run = RunFolder(folder, "weights")
    run.begin(made, resume=False)
    step = step_of(made, learner, make_pico(family))
    Training(learner.model, learner.learned, made.train, made.seed, Text(), run, step).train()
    ids = tokens(2, 12, seed=9)
    learner.learned.write_()
    for router in learner.routers:  # as the result has them: a near tie may fall the other way
        router.weight.data = router.weight.data.bfloat16().float()
    with torch.no_grad(), learner.running(torch.ones(24, dtype=torch.bool)):
        beside = learner.model(ids).logits
    names = [name for name, _ in learner.learned.named_parameters()]
    assert all("lora_" in name or name.startswith("router/") for name in names)
    return beside, learner.finish("")[0]


@pytest.mark.filterwarnings(
    "ignore:.*is deprecated and will be removed:FutureWarning"
)  # peft asks as transformers did before
@pytest.mark.parametrize(("family", "form"), [("llama", "fine"), ("phi", "overlapping")])
def test_merged_adapters_compute_what_they_computed_beside_the_weights(family: str, form: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    beside, moe = adapted(family, tmp_path, form)
    fresh = make_pico(family)
    assert {name for name, _ in moe.named_parameters()} == {
        name for name, _ in fold(fresh, make_plan(fresh, "off", form=form)).named_parameters()
    }
    ids = tokens(2, 12, seed=9)
    with torch.no_grad():
        torch.testing.assert_close(moe(ids).logits, beside, rtol=0, atol=1e-4)
    assert not any(p.requires_grad for p in moe.parameters())


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(students, "find_spec", lambda name: None)
    check_packages(recipe())
    with pytest.raises(UserError, match=r"needs the package peft.*pip install '\.\[finetune\]'"):
        check_packages(recipe("weights=lora"))
    with pytest.raises(UserError, match=r"needs the package bitsandbytes.*pip install '\.\[quantized\]'"):
        check_packages(recipe("train.optimizer=adamw8bit"))
