"""Before anything runs: does the model fit the method, does a conversion fit this machine, and how long will it take?

Sizes and lower bounds of memory come from the config alone, at once. On request every stage also runs on two small versions
of the model, of its true widths, with random weights, and memory and time are extrapolated to all layers.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tomoe.errors import UserError
from tomoe.memory.estimate import (
    AvailableMemory,
    MemoryEstimate,
    Sizes,
    available_memory,
    hidden_state_bytes,
    least_memory,
    sizes_of,
)
from tomoe.memory.probe import STAGES, Stage, StageCost, Trial, tried_tokens
from tomoe.model import quantized
from tomoe.model.base_weights import BaseWeights
from tomoe.model.loading import load_config, pick_device
from tomoe.progress import ProgressCallback, no_progress
from tomoe.pruning.extract import check_budget
from tomoe.recipe.conversion import Recipe

# of the two small versions: with fewer, imports and the output matrix hide what a layer adds
LAYERS = (3, 7)


@dataclass(frozen=True)
class Estimate:
    """What one stage takes for the whole model, extrapolated from trials."""

    stage: str
    memory: int  # bytes of main memory
    device_memory: int  # bytes of GPU memory; 0 on the CPU
    seconds: float  # of one step, for `train`


@dataclass(frozen=True)
class Diagnosis:
    """What a conversion needs and what this machine has. `remedies` are recipe settings with which training would fit."""

    sizes: Sizes
    least: tuple[MemoryEstimate, ...]  # bounds from below, by arithmetic
    estimates: list[Estimate]  # of carve, train, repair and fold; empty without trials
    available: AvailableMemory
    remedies: dict[str, Estimate]
    train_seconds: float  # of all steps; 0 without trials


def examine(recipe: Recipe, on_progress: ProgressCallback = no_progress, trials: bool = False) -> Diagnosis:
    """Count what converting `recipe.model` needs; its config.json is enough for that.

    With `trials`, every stage also runs in processes of its own on two models of a few layers, which takes minutes and
    the model's tokenizer. Raises UserError if the model or the budget does not fit ToMoE, or a trial fails.
    """
    config = load_config(recipe.model)
    sizes = sizes_of(config, recipe)
    check_budget(sizes.shape, recipe)
    least, available = least_memory(sizes, recipe), available_memory(pick_device(recipe.device))
    if not trials:
        return Diagnosis(sizes, least, [], available, {}, 0.0)
    num_layers = sizes.shape.num_layers
    with tempfile.TemporaryDirectory(prefix="tomoe-doctor-") as folder:
        layers = dict.fromkeys(min(n, num_layers) for n in LAYERS)
        models = {n: _write_small(config, n, Path(folder) / str(n)) for n in layers}
        left_out = {"train": not recipe.train.steps, "repair": recipe.repair.mode == "none"}
        stages = tuple(stage for stage in STAGES if not left_out.get(stage))
        done, total = itertools.count(), len(stages) * len(models)

        def tick() -> None:
            on_progress("trying on few layers", next(done), total, {})

        tick()
        costs = {stage: _try_all(stage, models, recipe, tick) for stage in stages}
        estimates = [extrapolate(stage, costs[stage], num_layers) for stage in stages]
        if "repair" in stages:
            at = stages.index("repair")
            estimates[at] = _repairing(recipe, sizes, estimates[at])
        estimates[stages.index("carve")] = _carving(config, recipe, sizes, costs["carve"], estimates[0])
        available = available_memory(pick_device(recipe.device))
        training = next((e for e in estimates if e.stage == "train"), None)
        remedies = _remedies(recipe, models, num_layers, available) if training and lacks(available, training) else {}
    seconds = training.seconds * recipe.train.steps if training else 0.0
    return Diagnosis(sizes, least, estimates, available, remedies, seconds)


def _try_all(
    stage: Stage, models: dict[int, Path], recipe: Recipe, tick: Callable[[], None] = lambda: None
) -> dict[int, StageCost]:
    """Run a stage on each small model; return the costs by number of layers. `tick` is called after each trial."""
    costs = {}
    for n, model in models.items():
        costs[n] = _try(Trial(stage, str(model), recipe.model_dump(mode="json")))
        tick()
    return costs


def extrapolate(stage: str, costs: dict[int, StageCost], num_layers: int) -> Estimate:
    """Draw a line through the smallest and the largest trial, and read it off at all layers."""
    few, more = min(costs), max(costs)
    small, large = costs[few], costs[more]

    def at(a: float, b: float) -> float:
        slope = (b - a) / (more - few) if more > few else 0.0
        return b + max(slope, 0.0) * (num_layers - more)

    memory = at(small.memory, large.memory), at(small.device_memory, large.device_memory)
    return Estimate(stage, int(memory[0]), int(memory[1]), at(small.seconds, large.seconds))


def _carving(
    config: PreTrainedConfig, recipe: Recipe, sizes: Sizes, trials: dict[int, StageCost], line: Estimate
) -> Estimate:
    """Carving holds one layer's activations at a time, and their peaks vary by more than a few layers weigh.

    So no line is drawn through them: another layer adds its weights, and on the CPU the pages of the file that they come
    from; nothing at all if layers are offloaded.
    """
    layers = max(trials)
    cost = trials[layers]
    if recipe.offload or recipe.train.quantization != "none":
        return Estimate("carve", cost.memory, cost.device_memory, line.seconds)
    weights = sizes.decoder_params // sizes.shape.num_layers * (sizes.shape.num_layers - layers)
    loaded = weights * BaseWeights.of(recipe).compute.itemsize
    read = weights * getattr(torch, str(config.dtype or "float32").removeprefix("torch.")).itemsize
    on_device = cost.device_memory + loaded if cost.device_memory else 0
    return Estimate("carve", cost.memory + read + (0 if on_device else loaded), on_device, line.seconds)


def _repairing(recipe: Recipe, sizes: Sizes, line: Estimate) -> Estimate:
    """Add the hidden states of the text that the trials left out: these grow with the text, all else with the layers."""
    tried = recipe.changed([f"repair.tokens={tried_tokens(recipe)}"])
    added = hidden_state_bytes(sizes, recipe) - hidden_state_bytes(sizes, tried)
    return replace(line, memory=line.memory + max(added, 0))


def lacks(available: AvailableMemory, e: Estimate) -> bool:
    """Whether a stage needs more than is available."""
    return e.memory > available.memory or e.device_memory > available.device_memory


def _remedies(
    recipe: Recipe, models: dict[int, Path], num_layers: int, available: AvailableMemory
) -> dict[str, Estimate]:
    """Try settings one after the other; return those with which training fits."""
    remedies = {}
    settings = ["train.gradient_checkpointing=true"]
    if recipe.data.seq_len > 256:
        settings.append(f"data.seq_len={recipe.data.seq_len // 2}")
    if recipe.train.batch_size > 1:
        settings.append("train.batch_size=1")
    if recipe.train.quantization == "none" and not recipe.train.shard:
        settings += [f"train.quantization={q}" for q in quantized.BITS if quantized.available()]
    for setting in settings:
        estimate = extrapolate("train", _try_all("train", models, recipe.changed([setting])), num_layers)
        if not lacks(available, estimate):
            remedies[setting] = estimate
    return remedies


def _write_small(config: PreTrainedConfig, layers: int, folder: Path) -> Path:
    """Write a model of the same widths with few layers and random weights, in the dtype of the whole one."""
    values = config.to_dict() | {"num_hidden_layers": layers}
    if isinstance(values.get("layer_types"), list):
        values["layer_types"] = values["layer_types"][:layers]
    small = type(config)(**values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small, dtype=getattr(config, "dtype", None) or torch.float32)
    model.save_pretrained(folder)
    return folder


def _try(trial: Trial) -> StageCost:
    finished = subprocess.run(
        [sys.executable, "-m", "tomoe.memory.probe"], input=json.dumps(asdict(trial)), capture_output=True, text=True
    )
    if finished.returncode:
        last = (finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}, so perhaps out of memory"])[
            -1
        ]
        raise UserError(
            f"the stage {trial.stage} failed on a model of only {Path(trial.folder).name} layers ({last}); "
            "change the recipe or use a machine with more memory"
        )
    values: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
    return StageCost(**values)
