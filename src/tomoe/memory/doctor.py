"""Before anything runs: does the model fit the method, does a conversion fit this machine, and how long will it take?

Sizes come from the config alone. Memory and time are measured, not modelled: every stage is tried on two small versions
of the model, of its true widths, with random weights, and extrapolated to all layers.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tomoe.conversion import pick_device
from tomoe.errors import UserError
from tomoe.memory.estimate import Need, Room, Sizes, free_room, least_memory, sizes_of
from tomoe.memory.probe import STAGES, Stage, Took, Trial
from tomoe.model.loading import load_config
from tomoe.model.quantized import available
from tomoe.recipe.conversion import Recipe

LAYERS = (3, 7)  # of the two small versions: with fewer, imports and the output matrix hide what a layer adds
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Estimate:
    """One stage of the whole model."""

    stage: str
    memory: int  # bytes of main memory
    device_memory: int  # bytes of GPU memory; 0 on the CPU
    seconds: float  # of one step, for `train`


@dataclass(frozen=True)
class Diagnosis:
    """All that the doctor found. `remedies` are recipe settings with which training would fit; empty where all fits."""

    sizes: Sizes
    least: tuple[Need, ...]  # bounds from below, by arithmetic
    estimates: list[Estimate]  # empty where nothing was tried
    room: Room
    remedies: dict[str, Estimate]
    train_seconds: float


def examine(recipe: Recipe, progress: Progress = lambda stage, done, total: None, trials: bool = True) -> Diagnosis:
    """Count what `recipe.model` needs, and try every stage unless `trials` is false; a config is enough for counting.

    Raises UserError where the model or the budget does not fit ToMoE, or a trial fails.
    """
    config = load_config(recipe.model)
    sizes = sizes_of(config, recipe)
    if recipe.active < sizes.least_active:
        raise UserError(
            f"active is {recipe.active}, but {sizes.least_active:.3f} of the blocks is the least that can be reached"
        )
    least, room = least_memory(sizes, recipe), free_room(pick_device(recipe.device))
    if not trials:
        return Diagnosis(sizes, least, [], room, {}, 0.0)
    whole = sizes.shape.num_layers
    with tempfile.TemporaryDirectory(prefix="tomoe-doctor-") as folder:
        layers = dict.fromkeys(min(n, whole) for n in LAYERS)
        models = {n: _write_small(config, n, Path(folder) / str(n)) for n in layers}
        # a model that is read layer by layer is not learned from
        stages = tuple(stage for stage in STAGES if stage != "train" or not recipe.stream)
        done, total = itertools.count(), len(stages) * len(models)

        def tick() -> None:
            progress("trying on few layers", next(done), total)

        tick()
        took = {stage: _try_all(stage, models, recipe, tick) for stage in stages}
        estimates = [extrapolate(stage, took[stage], whole) for stage in stages]
        estimates[stages.index("carve")] = _carving(config, recipe, sizes, took["carve"], estimates[0])
        room = free_room(pick_device(recipe.device))
        training = next((e for e in estimates if e.stage == "train"), None)
        remedies = _remedies(recipe, models, whole, room) if training and lacks(room, training) else {}
    return Diagnosis(
        sizes, least, estimates, room, remedies, training.seconds * recipe.train.steps if training else 0.0
    )


def _try_all(
    stage: Stage, models: dict[int, Path], recipe: Recipe, tick: Callable[[], None] = lambda: None
) -> dict[int, Took]:
    """What a stage took, by number of layers; `tick` is called after each trial."""
    took = {}
    for n, model in models.items():
        took[n] = _try(Trial(stage, str(model), recipe.model_dump(mode="json")))
        tick()
    return took


def extrapolate(stage: str, took: dict[int, Took], whole: int) -> Estimate:
    """The straight line through the smallest and the largest trial, at all layers."""
    few, more = min(took), max(took)
    small, large = took[few], took[more]

    def at(a: float, b: float) -> float:
        slope = (b - a) / (more - few) if more > few else 0.0
        return b + max(slope, 0.0) * (whole - more)

    memory = at(small.memory, large.memory), at(small.device_memory, large.device_memory)
    return Estimate(stage, int(memory[0]), int(memory[1]), at(small.seconds, large.seconds))


def _carving(
    config: PreTrainedConfig, recipe: Recipe, sizes: Sizes, trials: dict[int, Took], line: Estimate
) -> Estimate:
    """Carving holds one layer's activations at a time, and their peaks scatter by more than a few layers weigh.

    So no line is drawn through them: another layer adds its weights, and on the CPU the pages of the file that they come from;
    nothing at all where layers are read as they run.
    """
    layers = max(trials)
    took = trials[layers]
    if recipe.stream or recipe.train.base != "dense":
        return Estimate("carve", took.memory, took.device_memory, line.seconds)
    weights = sizes.blocks // sizes.shape.num_layers * (sizes.shape.num_layers - layers)
    held = weights * getattr(torch, recipe.train.dtype).itemsize
    read = weights * getattr(torch, str(config.dtype or "float32").removeprefix("torch.")).itemsize
    on_device = took.device_memory + held if took.device_memory else 0
    return Estimate("carve", took.memory + read + (0 if on_device else held), on_device, line.seconds)


def lacks(room: Room, e: Estimate) -> bool:
    return e.memory > room.memory or e.device_memory > room.device_memory


def _remedies(recipe: Recipe, models: dict[int, Path], whole: int, room: Room) -> dict[str, Estimate]:
    """Settings, tried one after the other, with which training fits."""
    found = {}
    settings = ["train.gradient_checkpointing=true"]
    if recipe.data.block_size > 256:
        settings.append(f"data.block_size={recipe.data.block_size // 2}")
    if recipe.train.batch_size > 1:
        settings.append("train.batch_size=1")
    if recipe.train.base == "dense" and not recipe.train.shard:
        settings += [f"train.base={base}" for base in ("bnb8", "bnb4") if available(base)]
    for setting in settings:
        estimate = extrapolate("train", _try_all("train", models, recipe.changed([setting])), whole)
        if not lacks(room, estimate):
            found[setting] = estimate
    return found


def _write_small(config: PreTrainedConfig, layers: int, folder: Path) -> Path:
    """A model of the same widths with few layers and random weights, stored in the dtype of the whole one."""
    values = config.to_dict() | {"num_hidden_layers": layers}
    if isinstance(values.get("layer_types"), list):
        values["layer_types"] = values["layer_types"][:layers]
    small = type(config)(**values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small, dtype=getattr(config, "dtype", None) or torch.float32)
    model.save_pretrained(folder)
    return folder


def _try(trial: Trial) -> Took:
    done = subprocess.run(
        [sys.executable, "-m", "tomoe.memory.probe"], input=json.dumps(asdict(trial)), capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}, so perhaps out of memory"])[-1]
        raise UserError(
            f"the stage {trial.stage} failed on a model of {Path(trial.folder).name} layers already ({last}); "
            "mend the recipe or take a machine with more memory"
        )
    values: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return Took(**values)
