"""One stage of a conversion, tried on a model of a few layers in a process of its own, so that its peak memory is its own.

`python -m tomoe.memory.probe` reads a Trial as JSON on stdin and prints what it took as JSON. `tomoe doctor` runs two of them
with different numbers of layers: memory and time grow by the same amount with every layer, so two points give the whole model.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tomoe.conversion import finish_plan, make_network, pick_device
from tomoe.data.corpus import Blocks, Corpus
from tomoe.model.loading import fingerprint, load_dense, load_tokenizer
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.recipe.conversion import Recipe
from tomoe.training.cost import peak_memory
from tomoe.training.loop import Training
from tomoe.training.run_folder import RunFolder

Stage = Literal["carve", "train", "fold"]
STAGES: tuple[Stage, ...] = ("carve", "train", "fold")
STEPS = 3  # of training; the first one warms up and is not timed


@dataclass(frozen=True)
class Trial:
    """`folder` holds a model of a few layers, which the process may add files to."""

    stage: Stage
    folder: str
    recipe: dict[str, Any]


@dataclass(frozen=True)
class Took:
    """Bytes of main memory and of the GPU at the peak; seconds (of one step, for `train`)."""

    memory: int
    device_memory: int
    seconds: float


def corpus(recipe: Recipe, vocabulary: int) -> Corpus:
    """Random tokens: enough for calibration and a few steps."""
    generator, size = torch.Generator().manual_seed(0), recipe.data.block_size

    def blocks(tokens: int) -> Blocks:
        ids = torch.randint(vocabulary, (max(1, round(tokens / size)), size), generator=generator)
        return Blocks(ids, torch.ones_like(ids, dtype=torch.bool))

    step = size * recipe.train.batch_size
    return Corpus(blocks(step), blocks(recipe.data.calibration_tokens), blocks(size), ("random",), "none", 0)


def run(trial: Trial) -> Took:
    recipe, folder = Recipe(**trial.recipe), Path(trial.folder)
    packed = recipe.train.base != "dense"
    # what is carved and folded then are the original weights
    kind: dict[str, Any] = {"stream": recipe.stream or packed}
    if packed and trial.stage == "train":
        kind = {"base": recipe.train.base}
    model = load_dense(trial.folder, getattr(torch, recipe.train.dtype), pick_device(recipe.device), **kind)
    tokenizer = load_tokenizer(recipe.model)  # a conversion holds it too
    text = corpus(recipe, model.config.vocab_size)
    # two layers cannot meet a budget in steps of 32 neurons
    experts = recipe.experts.model_copy(update={"width_multiple": 1})
    start = recipe if trial.stage == "carve" else recipe.model_copy(update={"start": "random", "experts": experts})
    began = time.perf_counter()
    net = make_network(start, model, text.calibration)
    if trial.stage == "train":
        training = Training(model, net, recipe, text, RunFolder(folder / "run"))
        rows = [training.one_step() for _ in range(STEPS)]
        training.save()
        seconds = sum(float(row["seconds"]) for row in rows[1:]) / (STEPS - 1)
    else:
        if trial.stage == "fold":
            plan = finish_plan(net, model, start, text, 0, fingerprint(model))
            save_moe(fold(model, plan, lazily=True), plan, tokenizer, folder / "moe")
        seconds = time.perf_counter() - began
    on_device = torch.cuda.max_memory_allocated() if model.device.type == "cuda" else 0
    return Took(peak_memory() or 0, on_device, seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(run(Trial(**json.load(sys.stdin))))))
