"""The loop: schedules, accumulation, objectives, and that it learns what it is asked to learn."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from conftest import make_pico, mask_step, tokens
from tomoe import distributed
from tomoe.errors import UserError
from tomoe.methods.registry import resolve_method
from tomoe.methods.tomoe.network import MaskNetwork
from tomoe.methods.tomoe.networks import mask_network
from tomoe.model.base_weights import BaseWeights
from tomoe.model.structure import shape_of
from tomoe.pipeline.steps import open_dense
from tomoe.plans.partition.layouts import OverlappingLayout
from tomoe.recipe.conversion import Recipe
from tomoe.training.loop import StepRow, Training, learning_rate
from tomoe.training.run_folder import RunFolder


class Text:
    """Sequences of random tokens, a few of which come again and again."""

    def __init__(self, rows: int = 4, length: int = 16) -> None:
        self.ids = tokens(rows, length)

    def batch(self, step: int, micro: int, batch_size: int, accumulation: int, seed: int) -> SimpleNamespace:
        first = (step * accumulation + micro) * batch_size
        ids = self.ids[[i % len(self.ids) for i in range(first, first + batch_size)]]
        return SimpleNamespace(input_ids=ids, mask=torch.ones_like(ids, dtype=torch.bool))


def small_recipe(*changes: str) -> Recipe:
    experts = [
        f"experts.{key}" for key in ("form=overlapping", "num_experts=4", "embedding_size=16", "width_multiple=1")
    ]
    return Recipe.load(None, [*experts, "train.dtype=float32", *changes])


def network(model: PreTrainedModel, recipe: Recipe) -> MaskNetwork:
    layout, size = OverlappingLayout(recipe.experts.num_experts, width_multiple=1), recipe.experts.embedding_size
    return mask_network(shape_of(model), layout, size, recipe.attention, recipe.sampling, recipe.seed)


def train(model: PreTrainedModel, folder: Path, *changes: str) -> tuple[MaskNetwork, list[StepRow]]:
    recipe = small_recipe(*changes)
    net = network(model, recipe)
    run, rows = RunFolder(folder), []
    run.begin(recipe, resume=False)
    step = mask_step(model, net, recipe)
    Training(model, net, recipe.train, recipe.seed, Text(), run, step).train(rows.append)
    return net, rows


def test_learning_rate_follows_its_schedule() -> None:
    cosine = small_recipe("train.steps=100", "train.warmup_steps=10").train
    assert learning_rate(cosine, 0, 1.0) == pytest.approx(0.1)
    assert learning_rate(cosine, 50, 1.0) == pytest.approx(0.5)
    assert learning_rate(cosine, 99, 1.0) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.99)))
    constant = small_recipe("train.steps=100", "train.schedule=constant").train
    assert {learning_rate(constant, step, 1.0) for step in range(100)} == {1.0}


def test_the_budget_warms_up_from_the_whole_model() -> None:
    recipe = small_recipe("active=0.6", "train.budget_warmup_steps=10")
    model = make_pico("llama")
    warming = mask_step(model, network(model, recipe), recipe)
    assert [warming.target(step) for step in (0, 5, 10, 500)] == pytest.approx([1.0, 0.8, 0.6, 0.6])
    cold = small_recipe("active=0.6")
    assert mask_step(model, network(model, cold), cold).target(0) == pytest.approx(0.6)


@pytest.mark.slow
@pytest.mark.usefixtures("as_shipped")
def test_a_random_start_learns_the_budget_and_leaves_the_base_alone(tmp_path: Path) -> None:
    model = make_pico("llama")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    changes = ["active=0.7", "train.steps=120", "train.learning_rate=1e-2", "attention.pruning=per_token"]
    _, rows = train(model, tmp_path / "run", *changes)
    assert rows[0]["active_fraction"] > 0.9
    # 0.656 to 0.744 over eight seeds and three kinds of attention
    assert rows[-1]["active_fraction"] == pytest.approx(0.7, abs=0.06)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("as_shipped")
def test_masks_learn_which_neurons_matter(tmp_path: Path) -> None:
    """Half of the neurons have no output: the objective finds them, since dropping them changes no prediction. Attention is
    whole, so that the budget is met by neurons alone."""
    model = make_pico("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj.weight[:, 24:] = 0
    weights = ["loss.coverage_weight=0.0", "loss.budget_weight=2.0", "experts.num_experts=1"]
    speed = ["train.steps=200", "train.learning_rate=3e-2", "train.gradient_clip=0.0"]
    net, rows = train(model, tmp_path / "run", "active=0.75", *weights, *speed)
    assert rows[0]["active_fraction"] > 0.9
    # 0.752 to 0.757 over four seeds
    assert rows[-1]["active_fraction"] == pytest.approx(0.75, abs=0.06)
    embeddings = net.hypernetwork()
    for i, projection in enumerate(net.neurons):
        logits = projection(embeddings[2 * i + 1]).detach()
        # 0.89 to 5.2 over eight seeds
        assert float(logits[:, :24].mean()) > float(logits[:, 24:].mean()) + 0.5


def test_accumulated_micro_batches_are_one_batch() -> None:
    """Two micro-batches of one sequence against one batch of both: same gradient, where no token draws for itself."""
    model = make_pico("mistral")
    text = Text(2)

    def gradients(size: int, accumulation: int) -> list[torch.Tensor]:
        changes = [f"train.batch_size={size}", f"train.gradient_accumulation_steps={accumulation}"]
        recipe = small_recipe(*changes, "experts.num_experts=1", "loss.balance_weight=0.0")
        net = network(model, recipe)
        for micro in range(accumulation):
            mask_step(model, net, recipe)(text.batch(0, micro, size, accumulation, 0), 0, micro)
        return [p.grad for name, p in net.named_parameters() if p.grad is not None and "router" not in name]

    for one, two in zip(gradients(2, 1), gradients(1, 2), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_accumulation_that_does_not_divide_is_refused_before_the_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    recipe = small_recipe("train.steps=1", "train.gradient_accumulation_steps=4", "model=nowhere")
    with pytest.raises(UserError, match=r"a step has 4 forward passes .* which 3 processes cannot share evenly"):
        open_dense(*resolve_method(recipe), BaseWeights.of(recipe))
    recipe = recipe.changed(["train.gradient_accumulation_steps=6"])
    with pytest.raises(UserError, match="nowhere"):
        open_dense(*resolve_method(recipe), BaseWeights.of(recipe))


@pytest.mark.slow
@pytest.mark.parametrize("change", ["loss.objective=lm", "attention.embedding=local", "train.dtype=bfloat16"])
def test_every_ablation_trains(change: str, tmp_path: Path) -> None:
    model = make_pico("qwen2").to(torch.float32)
    _, rows = train(model, tmp_path / "run", "train.steps=3", "attention.pruning=per_token", change)
    assert len(rows) == 3
    assert all(math.isfinite(row["loss"]) and not row["skipped"] for row in rows)
    assert not model.training


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_an_update_that_is_not_finite_is_never_saved(
    llama: PreTrainedModel, tmp_path: Path, last: bool, stopped: bool
) -> None:
    recipe = small_recipe("train.steps=4", "train.save_every=2")
    net = network(llama, recipe)
    run, broken = RunFolder(tmp_path), 4 if last else 2
    run.begin(recipe, resume=False)
    training = Training(llama, net, recipe.train, recipe.seed, Text(), run, mask_step(llama, net, recipe))
    update = training.optimizer.step

    def overflow(*_: object) -> None:
        update()
        if training.step + 1 == broken:
            next(net.parameters()).data.fill_(math.inf)

    training.optimizer.step = overflow  # type: ignore[assignment]

    def stop(row: StepRow) -> None:
        if stopped and row["step"] == broken:
            raise KeyboardInterrupt

    expected = KeyboardInterrupt if stopped else UserError
    with pytest.raises(
        expected, match=None if stopped else f"not finite after step {broken}.*smaller train.learning_rate"
    ):
        training.train(stop)
    checkpoint = run.last()
    assert checkpoint is not None
    assert checkpoint.step == broken - 2
