"""The memory that a conversion takes, computed from the config, and the memory that is free here.

A table of the largest tensors that a stage holds at once, right to MARGIN; Python and PyTorch take about 0.6 GB more. A run is
refused only if less than the sum by MARGIN is free.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from transformers import PreTrainedConfig

from tomoe import distributed
from tomoe.budget import decoder_params
from tomoe.errors import Advice, UserError
from tomoe.exporting.choice import check_target
from tomoe.files import format_bytes
from tomoe.methods.base import Method
from tomoe.methods.registry import resolve_method
from tomoe.model.base_weights import BaseWeights
from tomoe.model.checks import skeleton
from tomoe.model.layerwise import MEMORY
from tomoe.model.library_errors import usable_config
from tomoe.model.loading import free_on_device, load_config
from tomoe.model.shape import ModelShape
from tomoe.model.structure import check_without_weights, shape_of
from tomoe.moe.checkpoint import CHECKPOINT_SHARD_BYTES
from tomoe.plans.repair.equations import keeps_tokens
from tomoe.plans.repair.plan import repair_bytes
from tomoe.plans.repair.streams import CHUNK_TOKENS
from tomoe.recipe.conversion import Recipe, RepairSection
from tomoe.recipe.shared import DataSection

_CGROUPS = Path("/sys/fs/cgroup")
_FLOAT32, _FLOAT64 = 4, 8  # bytes
MARGIN = 0.2


@dataclass(frozen=True)
class ParamCounts:
    """Parameter counts, from the config alone."""

    shape: ModelShape
    total: int  # tied weights once
    decoder_params: int  # projection weights of attention and MLPs: what `active` is a share of
    output: int  # of the output matrix
    least_active: float  # the smallest share that the recipe's settings can reach

    def of_all(self, active: float) -> float:
        """Return the share of all weights that is active if the share `active` of the decoder parameters is."""
        return 1 - (1 - active) * self.decoder_params / self.total


@dataclass(frozen=True)
class MemoryEstimate:
    """What one process holds at once in one stage: bytes, by purpose."""

    stage: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def fits(self, free: int, processes: int = 1) -> bool:
        """Return whether this many of it fit in `free` bytes."""
        return (1 - MARGIN) * self.total * processes <= free


@dataclass(frozen=True)
class AvailableMemory:
    """Bytes that are free now, in main memory and on the GPU (0 without one)."""

    memory: int
    device_memory: int


def sizes_of(config: PreTrainedConfig, recipe: Recipe) -> ParamCounts:
    """Count parameters from the config. Raises UserError, with the reason, if the method or the target does not support the
    structure, or if there is no causal language model with such a config."""
    with usable_config(config.name_or_path or config.model_type):
        model = skeleton(config.name_or_path or "this", config)
    shape = shape_of(model)
    check_without_weights(model)
    check_target(recipe, model)
    total = sum(p.numel() for p in model.parameters())
    method, recipe = resolve_method(recipe)
    least = method.least_active(recipe, shape)
    return ParamCounts(shape, total, decoder_params(shape), model.get_output_embeddings().weight.numel(), least)


def least_memory(sizes: ParamCounts, method: Method, recipe: Recipe) -> tuple[MemoryEstimate, ...]:
    """Return the memory of each stage in one process, on a GPU if there is one."""
    t, shape, base = recipe.train, sizes.shape, BaseWeights.of(recipe)
    computing, name = base.compute, str(base.compute).removeprefix("torch.")
    # of a model that is read layer by layer: one layer, and what is outside of the layers
    outside = sizes.total - sizes.decoder_params
    one_layer = (outside + sizes.decoder_params // shape.num_layers) * computing.itemsize
    by_layer = base.offload or t.shard
    original = {f"weights in {name}": one_layer if by_layer else base_bytes(sizes, computing)}
    on_gpu = base.device.startswith("cuda")
    refits = {} if on_gpu else _refitted(sizes, recipe, base)
    folding = MemoryEstimate("folding", original | {"files of the model": _files(sizes, base, on_gpu)} | refits)
    start = {f"weights in {name}": one_layer if base.offload else base_bytes(sizes, computing, base.shards)}
    start |= method.peak(recipe, shape, computing, sizes.output // shape.hidden_size)
    stages = [MemoryEstimate(method.stage if t.steps or not method.trains else "carving", start)]
    if recipe.repair.mode != "none":
        states = hidden_state_bytes(shape, computing, recipe.repair, t.steps, recipe.data)
        # in both dtypes: activations, masks and differences of the MLP; inputs, outputs and differences of the layer
        chunk = shape.mlp_size * (4 * computing.itemsize + 8) + shape.hidden_size * (4 * computing.itemsize + 20)
        held = {
            "normal equations": equation_bytes(shape, fitted_tokens(recipe.repair, recipe.data), recipe.repair),
            "hidden states": states,
            "activations of one layer": min(recipe.repair.tokens, CHUNK_TOKENS) * chunk,
        }
        stages.append(MemoryEstimate("repair", original | held | refits))
    return (*stages, folding)


def main_memory(sizes: ParamCounts, recipe: Recipe) -> MemoryEstimate:
    """Return the main memory of a conversion on a GPU. The system can reclaim pages read from files."""
    base = BaseWeights.of(recipe)
    read = base_bytes(sizes, base.dtype)
    parts = {"the files that the weights are read from": read, "files of the model": _files(sizes, base, False)}
    return MemoryEstimate("a conversion", parts | _refitted(sizes, recipe, base))


def _refitted(sizes: ParamCounts, recipe: Recipe, base: BaseWeights) -> dict[str, int]:
    if recipe.repair.mode == "none":
        return {}
    return {"refitted projections": repair_bytes(sizes.shape, recipe.repair, base.dtype.itemsize)}


def _files(sizes: ParamCounts, base: BaseWeights, on_gpu: bool) -> int:
    """Bytes of the file being written and of its copy; on a GPU, of the layer being folded and of one loaded beside it."""
    if on_gpu:
        return 2 * sizes.decoder_params // sizes.shape.num_layers * base.dtype.itemsize
    return 2 * min(sizes.total * base.dtype.itemsize, CHECKPOINT_SHARD_BYTES)


def base_bytes(sizes: ParamCounts, dtype: torch.dtype, shards: int = 1) -> int:
    """Bytes of the frozen base in one process. If it is sharded, the running layer and the output matrix are complete."""
    if shards == 1:
        return sizes.total * dtype.itemsize
    layer = sizes.decoder_params // sizes.shape.num_layers + sizes.output
    return (sizes.total + (shards - 1) * layer) // shards * dtype.itemsize


def fitted_tokens(repair: RepairSection, data: DataSection) -> int:
    """Tokens that one process repairs with: as many as the recipe asks for, or all that are not held out."""
    tokens = min(repair.tokens, max(data.tokens - data.held_out_tokens, data.seq_len))
    return tokens // distributed.world_size()


def equation_bytes(shape: ModelShape, tokens: int, repair: RepairSection) -> int:
    """Bytes of one layer's normal equations: Gram matrix, right-hand side and solution in float32 and float64, and a factor; for
    few tokens, their rows and gaps, and the change twice."""
    size, hidden = shape.mlp_size, shape.hidden_size
    if keeps_tokens(tokens, size, repair.rank if repair.mode == "low_rank" else 0):
        return (tokens * (size + hidden) + 2 * size * hidden) * _FLOAT32 + 2 * tokens * tokens * _FLOAT64
    return size * (size + hidden) * (_FLOAT32 + 2 * _FLOAT64)


def hidden_state_bytes(s: ModelShape, dtype: torch.dtype, repair: RepairSection, steps: int, data: DataSection) -> int:
    """Bytes of the hidden states that repair keeps between layers; 0 if they go to a file."""
    streams = 1 if repair.target_after(steps) == "local" else 2
    size = fitted_tokens(repair, data) * (streams * s.hidden_size + s.mlp_size) * dtype.itemsize
    return 0 if size > MEMORY else size


def available_memory(device: str) -> AvailableMemory:
    """Return what is free on this machine, or of the part that this process may use."""
    return AvailableMemory(min([psutil.virtual_memory().available, *_left_in_cgroups()]), free_on_device(device))


def _left_in_cgroups(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield the free bytes of this process's control group and its parents, if they are limited. Pages of files read long ago
    count as used, but the kernel frees them when needed."""
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, kind, path = line.split(":", 2)
        if kind not in ("", "memory"):
            continue
        limit, used, idle = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if kind
            else ("memory.max", "memory.current", "inactive_file")
        )
        here = root / kind / path.strip("/")
        for group in (here, *here.parents):
            try:
                most, now = (int((group / name).read_text()) for name in (limit, used))
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # it has no limit ("max" is no number), or cannot be read from here
                continue
            yield max(0, most - now + int(stat.get(idle, 0)))


def check_memory(recipe: Recipe, folds: bool) -> None:
    """Raise UserError if training, or with `folds` also repair and folding, cannot fit in free memory. All processes of a run
    call it: those on one machine share its main memory, and each has its own GPU."""
    distributed.on_rank_zero(lambda: _check(recipe, folds))


def _check(recipe: Recipe, folds: bool) -> None:
    if not recipe.model:
        return  # loading it reports that
    base = BaseWeights.of(recipe)
    on_gpu = base.device.startswith("cuda")
    sizes = sizes_of(load_config(recipe.model, checked=True), recipe)
    training, *repair, folding = least_memory(sizes, *resolve_method(recipe))
    available = available_memory(base.device)
    free = available.device_memory if on_gpu else available.memory
    local = 1 if on_gpu else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # all processes measure dense model and MoE beside each other, unless the base was sharded
    for need in (training, *repair, folding) if folds else (training,):
        processes = 1 if need is folding and recipe.train.shard else local
        if not need.fits(free, processes):
            parts = ", ".join(f"{format_bytes(size)} for {name}" for name, size in need.parts.items())
            offload = Advice("offload", "to hold one layer at a time")
            leave_out = Advice("repair.mode", "to leave it out", "none")
            kind = ("GPU" if on_gpu else "main") + " memory"
            each = f" in each of {processes} processes" if processes > 1 else ""
            raise UserError(
                f"{need.stage} needs about {format_bytes(need.total)} of {kind}{each} ({parts}), but only "
                f"{format_bytes(free)} are free",
                *([] if recipe.offload or recipe.train.steps else [offload]),
                *([leave_out] if need.stage == "repair" else []),
                f"see what would help by `tomoe doctor {shlex.quote(recipe.model)}`",
                Advice("skip_memory_check", "to start anyway"),
            )
