"""Run one stage of a conversion on a model of a few layers, in a process of its own, so that its peak memory is its own.

`python -m tomoe.memory.probe` reads a Trial as JSON on stdin and prints its StageCost as JSON. `tomoe doctor --trial` runs two
of them with different numbers of layers: memory and time grow by the same amount with every layer, so two points give the
whole model.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tomoe.conversion import empty_network, finish_plan, make_network
from tomoe.data.corpus import Corpus, Sequences
from tomoe.memory.estimate import repair_tokens
from tomoe.model.base_weights import BaseWeights
from tomoe.model.loading import fingerprint, load_dense, load_tokenizer
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.pruning.objective import mask_step
from tomoe.pruning.repair import CHUNK_TOKENS
from tomoe.pruning.repaired_plan import repair_plan
from tomoe.recipe.conversion import Recipe, RepairSection
from tomoe.training.cost import peak_memory
from tomoe.training.loop import Training
from tomoe.training.run_folder import RunFolder

Stage = Literal["carve", "train", "repair", "fold"]
STAGES: tuple[Stage, ...] = ("carve", "train", "repair", "fold")
STEPS = 3  # training steps; the first one warms up and is not timed


@dataclass(frozen=True)
class Trial:
    """What to run. `folder` holds a model of a few layers, and the process may add files to it."""

    stage: Stage
    folder: str
    recipe: dict[str, Any]


@dataclass(frozen=True)
class StageCost:
    """Peak bytes of main memory and of the GPU; seconds of the stage (of one step, for `train`; of all text, for `repair`)."""

    memory: int
    device_memory: int
    seconds: float


def tried_tokens(recipe: Recipe) -> int:
    """Tokens that a trial of `repair` fits to: its time grows with them, and all of them would take too long."""
    return min(CHUNK_TOKENS, repair_tokens(recipe))


def random_corpus(recipe: Recipe, vocabulary: int) -> Corpus:
    """Random tokens: enough for calibration, a few steps and a trial of repair."""
    generator, seq_len = torch.Generator().manual_seed(0), recipe.data.seq_len

    def sequences(tokens: int) -> Sequences:
        ids = torch.randint(vocabulary, (max(1, round(tokens / seq_len)), seq_len), generator=generator)
        return Sequences(ids, torch.ones_like(ids, dtype=torch.bool))

    step = seq_len * recipe.train.batch_size
    train = max(step, tried_tokens(recipe)) if recipe.repair.mode != "none" else step
    calibration = sequences(recipe.data.calibration_tokens)
    return Corpus(sequences(train), calibration, sequences(seq_len), ("random",), "none", 0)


def run_trial(trial: Trial) -> StageCost:
    """Run a stage and measure what it takes; training runs STEPS steps."""
    recipe, folder = Recipe(**trial.recipe), Path(trial.folder)
    quantized = recipe.train.quantization != "none"
    # a quantized base is carved and folded from the original weights
    options: dict[str, Any] = {"offload": recipe.offload or quantized}
    if quantized and trial.stage == "train":
        options = {"quantization": recipe.train.quantization}
    base = BaseWeights.of(recipe, trial.folder)
    model = base.computing_(load_dense(trial.folder, base.dtype, base.device, **options))
    tokenizer = load_tokenizer(recipe.model)  # a conversion has it in memory, too
    text = random_corpus(recipe, model.config.vocab_size)
    # two layers cannot meet a budget in steps of 32 neurons
    experts = recipe.experts.model_copy(update={"width_multiple": 1})
    # only calibration divides neurons into fine-grained experts
    beginning = "carved" if experts.form == "fine" else "random"
    bare = {"start": beginning, "experts": experts, "repair": RepairSection(mode="none")}
    start = recipe if trial.stage == "carve" else recipe.model_copy(update=bare)
    began = time.perf_counter()
    calibrated = trial.stage == "carve" or experts.form == "fine"
    net = make_network(start, model, text.calibration) if calibrated else empty_network(start, model)
    if trial.stage == "train":
        training = Training(model, net, recipe, text, RunFolder(folder / "run"), mask_step(model, net, recipe))
        rows = [training.one_step() for _ in range(STEPS)]
        training.save()
        seconds = sum(float(row["seconds"]) for row in rows[1:]) / (STEPS - 1)
    elif trial.stage == "carve":
        seconds = time.perf_counter() - began
    elif trial.stage == "repair":
        plan, fitted = (
            finish_plan(net, model, start, text, 0, "", stored=base.dtype),
            text.train.truncate(tried_tokens(recipe)),
        )
        began = time.perf_counter()
        repair_plan(plan, model, fitted.input_ids, fitted.mask, recipe.repair, folder=folder, stored=base.dtype)
        seconds = (time.perf_counter() - began) * repair_tokens(recipe) / tried_tokens(recipe)
    else:
        plan = finish_plan(net, model, start, text, 0, fingerprint(model), stored=base.dtype)
        save_moe(fold(base.stored_(model), plan, lazily=True), plan, tokenizer, folder / "moe")
        seconds = time.perf_counter() - began
    on_device = torch.cuda.max_memory_allocated() if model.device.type == "cuda" else 0
    return StageCost(peak_memory() or 0, on_device, seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(run_trial(Trial(**json.load(sys.stdin))))))
