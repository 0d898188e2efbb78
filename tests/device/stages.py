"""Every stage on the CPU and on the fake device: what it computes in both places, and how often the host waited.

`python stages.py FOLDER` writes FOLDER/found.json; `test_device` sets the path that it needs.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_proof
import pytest
import torch
from fake_device import NAME, fake_device, unwrapped, waits
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

import pico_files
from conftest import tokens
from tomoe.evaluation.evaluate import evaluate
from tomoe.evaluation.speed.throughput import benchmark
from tomoe.exporting.export import export
from tomoe.finetuning.finetune import finetune
from tomoe.finetuning.repair import repair
from tomoe.model.generation import generate
from tomoe.model.loading import load_dense, load_model, load_tokenizer
from tomoe.model.stored import StoredModel
from tomoe.moe.modeling_tomoe import BACKENDS, CACHE
from tomoe.pipeline.convert import convert
from tomoe.plans.partition.elimination import backward_elimination
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.training.loop import Training

# Layers that stay on disk are put on a device by code of safetensors and accelerate that knows real devices only.
StoredModel.read_by_layer = property(lambda stored: False)  # type: ignore[method-assign,assignment]
Found = dict[str, dict[str, Any]]
# An operator of the device takes some hundred times as long as one of the CPU.
LITTLE = ("data.calibration_tokens=64", "data.evaluation_tokens=32")


def logits(folder: Path) -> Tensor:
    """What a folder predicts, on the CPU wherever it was made: [rows, length, V]."""
    with torch.no_grad():
        return load_dense(str(folder), torch.float32)(tokens(2, 24, seed=5)).logits


class Stages:
    """The stages of tomoe on one device, each with what it computed."""

    def __init__(self, folder: Path, device: str):
        self.inputs, self.device, self.folder = folder, device, folder / device
        self.dense, self.text, self.moe = str(folder / "dense"), str(folder / "text.txt"), self.folder / "convert"

    def made(self, name: str, *changes: str) -> Tensor:
        recipe = pico_files.pico_recipe(self.inputs, "active=0.6", f"device={self.device}", *LITTLE, *changes)
        convert(recipe, self.folder / name)
        return logits(self.folder / name)

    def load(self) -> Tensor:
        """Weights as they were read: they never were on another device."""
        load = StoredModel.load

        def checked(*args: Any, **settings: Any) -> Any:
            read = load(*args, **settings)
            assert {t.device.type for t in (*read.parameters(), *read.buffers())} == {self.device}
            return read

        with mock.patch.object(StoredModel, "load", checked):
            model = load_dense(self.dense, torch.float32, self.device)
        return torch.cat([unwrapped(t).flatten() for t in (*model.parameters(), *model.buffers())])

    def convert(self) -> Tensor:
        """Fine-grained experts, learned and repaired; what the host waits for in a step is counted."""
        one_step = Training.one_step

        def counting(training: Training) -> dict[str, Any]:
            row: dict[str, Any] = {}
            self.step_waits = counted(lambda: row.update(one_step(training)))
            return row

        with mock.patch.object(Training, "one_step", counting):
            return self.made("convert", *pico_files.FINE, "train.steps=2")

    def carve(self) -> Tensor:
        """Overlapping experts, pruned and rotated values, no learning. Neurons are given up one by one, so there are few."""
        pruned = ("attention.pruning=static", "attention.rotate_values=true", "repair.mode=full", "train.steps=0")
        return self.made("carve", f"model={self.inputs / 'narrow'}", *pruned)

    def repair(self) -> Tensor:
        repair(self.moe, self.folder / "repair", ["repair.ridge=0.5"])
        return logits(self.folder / "repair")

    def finetune(self) -> Tensor:
        changes = [f"model={self.moe}", f"data.sources={self.text}", f"device={self.device}", *LITTLE]
        changes += ["data.seq_len=16", "data.tokens=1200", "train.steps=2", "train.dtype=float32"]
        with pytest.MonkeyPatch.context() as patch:
            pico_files.always_better(patch)
            finetune(FinetuneRecipe.load(None, changes), self.folder / "finetune")
        return logits(self.folder / "finetune")

    def evaluate(self) -> Tensor:
        rows = evaluate(
            [self.dense, str(self.moe)], self.text, device=self.device, tokens=64, context=16, dtype="float32"
        )
        measured = [row.measurement for row in rows]
        return torch.tensor([measured[0].nll, measured[1].nll, measured[1].kl])

    def generate(self) -> Tensor:
        model = load_model(str(self.moe), "float32", self.device)
        written = generate(model, load_tokenizer(str(self.moe)), "the sea and a boat", max_new_tokens=6)
        return torch.tensor([float(ord(letter)) for letter in written])

    def benchmark(self) -> Tensor:
        """Not the seconds: what is counted."""
        found = benchmark(
            self.dense, str(self.moe), (2,), (8,), text=self.text, pairs=3, dtype="float32", device=self.device
        )
        assert {cell.device for cell in found.cells} == {self.device}
        return torch.tensor([[c.bound, c.dense_bytes, c.moe_bytes] for c in found.cells]).double()

    def export(self) -> Tensor:
        made = []
        for name in ("hf", "glm4_moe"):
            export(self.moe, name, self.folder / name, text=self.text, tokens=48, device=self.device)
            made.append(logits(self.folder / name))
        return torch.stack(made)

    def forward(self) -> Tensor:
        """One prefill with each way to run the experts."""
        model: Any = load_model(str(self.moe), "float32", self.device)
        made = []
        for backend in ("auto", *BACKENDS["experts"]):
            model.config.tomoe_expert_backend = backend
            with torch.no_grad():
                made.append(unwrapped(model(tokens(2, 24, seed=5).to(self.device)).logits))
        return torch.stack(made)

    def proof(self) -> Tensor:
        """What `gpu_proof.py` does without a compiler, which knows real devices only."""
        words = ["--part", "kernels", "--tiny", "--device", self.device, "--out", str(self.folder / "proof")]
        # the layouts differ in numbers alone
        with mock.patch.object(gpu_proof, "LAYOUTS", {"wide 32": gpu_proof.LAYOUTS["wide 32"]}):
            made = gpu_proof.main([*words, "--steps", "ceilings,agreement,training,equations,routers"])
        assert not [line for line in made.rows if "failed" in line], made.table()
        assert all(row.get("passes", True) for line in made.rows for row in line["rows"]), made.table()
        return torch.tensor([float(len(line["rows"])) for line in made.rows])


STAGES = [name for name in vars(Stages) if name not in ("made",) and not name.startswith("_")]


def place(name: str) -> Any:
    """The context that a stage runs in, by the device: attention sums in the same order in both."""
    return fake_device() if name == NAME else sdpa_kernel(SDPBackend.MATH)


def compare(stage: str, both: list[Stages]) -> dict[str, Any]:
    """How far the device is from the CPU, of the largest number."""
    found = []
    for stages in both:
        with place(stages.device):
            try:
                found.append(getattr(stages, stage)())
            except Exception:
                return {"error": f"on {stages.device}: {traceback.format_exc()}"}
    on_cpu, on_device = found
    if on_cpu.shape != on_device.shape:
        return {"error": f"the CPU gives {list(on_cpu.shape)} and the device {list(on_device.shape)}"}
    return {"error": None, "difference": float((on_device - on_cpu).abs().max() / on_cpu.abs().max().clamp_min(1))}


def counted(run: Callable[[], Any]) -> dict[str, int]:
    """The lines that made the host wait, and how often."""
    waits.clear()
    run()
    return dict(waits)


def host_waits(stages: Stages) -> dict[str, dict[str, int]]:
    """Of one prefill, of one decoded token after it, of the order of eight neurons, and of the last training step."""
    found: dict[str, dict[str, int]] = {}
    with fake_device(), torch.no_grad():
        model: Any = load_model(str(stages.moe), "float32", NAME)
        ids, cache = tokens(1, 40, seed=5).to(NAME), DynamicCache()
        for name, some in (("prefill", ids[:, :-1]), ("token", ids[:, -1:])):
            found[name] = counted(lambda some=some: model(some, use_cache=True, logits_to_keep=1, **{CACHE: cache}))
        error = torch.eye(8).to(NAME)
        found["elimination"] = counted(lambda: backward_elimination(error))
    return found | {"step": stages.step_waits}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    pico_files.write_pico(folder / "dense")
    pico_files.write_pico(folder / "narrow", intermediate_size=64)
    pico_files.write_text(folder / "text.txt")
    both = [Stages(folder, "cpu"), Stages(folder, NAME)]
    found: Found = {stage: compare(stage, both) for stage in STAGES}
    try:
        found["waits"] = host_waits(both[1])
    except Exception:
        found["waits"] = {"error": traceback.format_exc()}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
