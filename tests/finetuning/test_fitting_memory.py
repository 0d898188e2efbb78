"""Fine-tuning in little memory: moments in 8 bits, and a batch as large as fits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pico_files import FINE, TUNED, pico_recipe
from tomoe.errors import Note, UserError
from tomoe.finetuning.finetune import finetune, with_batch
from tomoe.pipeline.convert import convert
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.training.loop import make_optimizer
from tomoe.training.run_folder import RunFolder, optimizer_tensors, restore_optimizer

pytestmark = pytest.mark.slow


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
    with pytest.warns(Note, match="1 per forward pass, 16 tokens per step; a CPU gains nothing from more"):
        finetune(made, tmp_path / "tuned")
    run = RunFolder(tmp_path / "tuned" / "run", "weights")
    assert FinetuneRecipe.load(run.recipe).train.batch_size == 1
    # on a card: what is free decides, up to 32,768 tokens; a run that goes on takes what it took
    monkeypatch.setattr("tomoe.finetuning.finetune.free_on_device", lambda device: 10**12)
    with pytest.warns(Note, match="2048 per forward pass, 32,768 tokens per step"):
        assert with_batch(made, run, resume=False).train.batch_size == 2048
    assert with_batch(made, run, resume=True).train.batch_size == 1
    monkeypatch.setattr("tomoe.finetuning.finetune.free_on_device", lambda device: 2 * 10**8)
    with pytest.warns(Note, match="200 MB are free"):
        assert 1 < with_batch(made, run, resume=False).train.batch_size < 2048
    monkeypatch.setattr("tomoe.finetuning.finetune.free_on_device", lambda device: 10**6)
    with pytest.raises(UserError, match=r"takes about .* with one sequence of 16 tokens, and 1 MB are free"):
        with_batch(made, run, resume=False)
