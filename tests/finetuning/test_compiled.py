"""Fine-tuning by compiled layers: the numbers of eager ones, by one graph."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from conftest import make_pico, make_plan, tokens
from pico_files import FINE, TUNED, pico_recipe, steps_of
from tomoe.data.corpus import Sequences
from tomoe.errors import Note, UserError
from tomoe.finetuning.compiled import choice
from tomoe.finetuning.finetune import finetune, with_batch
from tomoe.finetuning.students import FinetuneStep, HeldOutLoss, MoEStudent
from tomoe.model import compiled
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEMLP, expert_probs, route
from tomoe.pipeline.convert import convert
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.training import distillation
from tomoe.training.loop import Training, make_optimizer
from tomoe.training.run_folder import RunFolder, optimizer_tensors, restore_optimizer

# PyTorch looks at gradients while it traces, and warns of it
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]
LAYERS = 3


@pytest.fixture(autouse=True)
def _graphs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of forward and backward pass are made, and run operator by operator: no compiler is waited for."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(distillation, "CHUNK", 16)
    compiled.compiled.cache_clear()
    torch.compiler.reset()
    counters.clear()


class Text:
    """Two fresh sequences a step; the second may have padding from the third step on, which needs graphs of its own."""

    def __init__(self, padded: bool):
        self.padded = padded

    def batch(self, step: int, micro: int, batch_size: int, accumulation: int, seed: int) -> Sequences:
        ids = tokens(2, 16, seed=step)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[1, 12:] = step < 2 or not self.padded
        return Sequences(ids, mask)


def tuned(folder: Path, compile: str, *changes: str) -> tuple[dict[str, Tensor], list[dict[str, object]], float]:
    """Four steps: the weights, the rows of the metrics, and the loss on held-out text afterwards."""
    settings = ("train.steps=4", "train.learning_rate=1e-3", "loss.balance_weight=0.5", f"train.compile={compile}")
    made = FinetuneRecipe.load(None, [*settings, *changes])
    dense = make_pico("qwen2", num_hidden_layers=LAYERS)
    plan = make_plan(dense, "off", form="fine")
    learner = MoEStudent(fold(dense, plan), plan, made)
    step = FinetuneStep(learner, made, dense)
    run = RunFolder(folder, "weights")
    run.begin(made, resume=False)
    # as fused, sums of squares are taken in one order
    Training(learner.model, learner.learned, made.train, 0, Text(not changes), run, step, fused=True).train()
    held_out = HeldOutLoss(step, Sequences(tokens(3, 10, seed=9), torch.ones(3, 10, dtype=torch.bool)))()
    moe, _ = learner.finish("")
    assert all(type(mlp) is ToMoEMLP for mlp in moe.mlps())
    return {name: p.detach() for name, p in moe.named_parameters()}, steps_of(folder), held_out


@pytest.mark.parametrize("changes", [(), ("routers=frozen",), ("train.gradient_checkpointing=true",)])
def test_compiled_layers_learn_what_eager_ones_learn(changes: tuple[str, ...], tmp_path: Path) -> None:
    weights, rows, held_out = tuned(tmp_path / "eager", "false", *changes)
    assert not counters["stats"]["unique_graphs"]
    same, same_rows, same_held_out = tuned(tmp_path / "compiled", "true", *changes)
    if not changes:
        assert not counters["graph_break"], counters["graph_break"]
        # one graph for all layers: of teacher, student and loss, and of the first two again for batches with padding (the loss
        # takes any length)
        assert counters["stats"]["unique_graphs"] == 2 + 2 + 1, counters["stats"]
    for row, other in zip(rows, same_rows, strict=True):
        assert other == {key: pytest.approx(value, rel=1e-5, abs=1e-6) for key, value in row.items()}
    dense = make_pico("qwen2", num_hidden_layers=LAYERS)
    start = dict(fold(dense, make_plan(dense, "off", form="fine")).named_parameters())
    for name, value in weights.items():
        # a bias of K shifts all scores of a query alike: its gradient is rounding, which AdamW blows up, to no effect
        if not name.endswith("k_proj.bias"):
            assert (same[name] - value).norm() <= 1e-2 * (value - start[name]).norm() + 1e-6, name
    assert same_held_out == pytest.approx(held_out, rel=1e-5)


@pytest.mark.parametrize("k", [1, 5, 8])
def test_a_choice_by_a_tensor_is_that_of_the_model(k: int) -> None:
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    # equal numbers: exactly k are chosen, whichever
    logits[0] = 1.0
    chosen, probs = choice(logits, torch.tensor(k))
    assert bool((chosen.sum(-1) == k).all())
    assert torch.equal(chosen[1:], torch.zeros_like(chosen).scatter(1, route(logits, k)[0], 1.0)[1:])
    torch.testing.assert_close(probs, expert_probs(logits, k))


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [("overlapping", (), "overlapping experts differ"), ("fine", ("weights=lora",), "adapters are not compiled")],
)
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
def test_what_no_graph_could_serve_is_said(
    form: str, changes: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = make_pico("llama")
    plan = make_plan(dense, "off", form=form)
    with pytest.raises(UserError, match=rf"train.compile = true needs one graph for all layers, but {words}"):
        MoEStudent(fold(dense, plan), plan, FinetuneRecipe.load(None, ["train.compile=true", *changes]))
    made = FinetuneRecipe.load(None, [*changes])
    assert not MoEStudent(fold(dense, plan), plan, made).layers
    # as on a GPU
    monkeypatch.setattr("tomoe.finetuning.compiled.asked", lambda setting, device: True)
    with pytest.warns(Note, match=f"the layers do not run compiled: {words}"):
        assert not MoEStudent(fold(dense, plan), plan, made).layers


def test_moments_in_8_bits_step_as_those_in_32_and_resume_bit_by_bit() -> None:
    pytest.importorskip("bitsandbytes")

    def stepped(name: str, cut: bool = False) -> Tensor:
        train = FinetuneRecipe.load(None, ["train.learning_rate=1e-3", f"train.optimizer={name}"]).train
        net = nn.Linear(64, 128, bias=False)
        generator = torch.Generator().manual_seed(0)
        net.weight.data.normal_(generator=generator)
        optimizer = make_optimizer(net, train)
        for step in range(6):
            net.weight.grad = torch.randn(net.weight.shape, generator=generator)
            optimizer.step()
            if cut and step == 2:
                kept = {key: t.clone() for key, t in optimizer_tensors(optimizer, net).items()}
                optimizer = make_optimizer(net, train)
                restore_optimizer(optimizer, net, kept)
        return net.weight.detach()

    exact, rounded = stepped("adamw"), stepped("adamw8bit")
    # six steps of 1e-3 each
    assert 0 < (exact - rounded).abs().max() < 3e-3
    assert (exact - rounded).norm() < 0.1 * 6e-3 * exact.numel() ** 0.5
    assert torch.equal(stepped("adamw8bit", cut=True), rounded)


@pytest.mark.usefixtures("always_better", "model", "text")
def test_a_batch_as_large_as_fits_is_said_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(pico_recipe(tmp_path, "train.steps=0", "active=0.6", *FINE), tmp_path / "out")
    words = [*TUNED, f"model={tmp_path / 'out'}", f"data.sources={tmp_path / 'text.txt'}"]
    words += ["train.steps=1", "train.batch_size=0"]
    words += ["train.optimizer=adamw8bit"] if find_spec("bitsandbytes") else []
    made = FinetuneRecipe.load(None, words)
    with pytest.warns(Note, match="1 a forward pass, 16 tokens a step; a CPU gains nothing from more"):
        finetune(made, tmp_path / "tuned")
    run = RunFolder(tmp_path / "tuned" / "run", "weights")
    assert FinetuneRecipe.load(run.recipe).train.batch_size == 1
    # on a card: what is free decides, up to 32,768 tokens; a run that goes on takes what it took
    monkeypatch.setattr("tomoe.finetuning.finetune.free_on_device", lambda device: 10**12)
    with pytest.warns(Note, match="2048 a forward pass, 32,768 tokens a step"):
        assert with_batch(made, run, resume=False).train.batch_size == 2048
    assert with_batch(made, run, resume=True).train.batch_size == 1
    monkeypatch.setattr("tomoe.finetuning.finetune.free_on_device", lambda device: 2 * 10**8)
    with pytest.warns(Note, match="200 MB are free"):
        assert 1 < with_batch(made, run, resume=False).train.batch_size < 2048
    monkeypatch.setattr("tomoe.finetuning.finetune.free_on_device", lambda device: 10**6)
    with pytest.raises(UserError, match=r"takes about .* with one sequence of 16 tokens, and 1 MB are free"):
        with_batch(made, run, resume=False)
