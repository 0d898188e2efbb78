"""Lower bounds of the memory that a conversion needs, by arithmetic on the config, and the memory that is free here.

Nothing that could be freed, paged out or made smaller is counted, so a run is refused only if it cannot work.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tomoe import distributed
from tomoe.budget import decoder_params
from tomoe.errors import UserError
from tomoe.files import format_bytes
from tomoe.model.base_weights import BaseWeights
from tomoe.model.loading import load_config, pick_device
from tomoe.model.quantized import BITS
from tomoe.model.shape import ModelShape
from tomoe.model.structure import shape_of
from tomoe.moe.checkpoint import CHECKPOINT_SHARD_BYTES
from tomoe.pruning.forms import mask_network
from tomoe.pruning.layouts import Layout, least_active, settle_layout
from tomoe.pruning.losses import CHUNK
from tomoe.pruning.repair.layers import RepairSettings
from tomoe.pruning.repair.plan import repair_bytes
from tomoe.recipe.conversion import Recipe

_CGROUPS = Path("/sys/fs/cgroup")
# bytes
_FLOAT32, _FLOAT64 = 4, 8


@dataclass(frozen=True)
class Sizes:
    """Parameter counts, from the config alone."""

    shape: ModelShape
    total: int  # tied weights once
    decoder_params: int  # projection weights of attention and MLPs: what `active` is a share of
    output: int  # of the output matrix
    least_active: float  # the smallest share that the recipe's settings can reach

    def of_all(self, active: float) -> float:
        """The share of all weights that works on a token if the share `active` of the decoder parameters does."""
        return 1 - (1 - active) * self.decoder_params / self.total


@dataclass(frozen=True)
class MemoryEstimate:
    """The least that one process holds at once in one stage: bytes, by what they are for."""

    stage: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class AvailableMemory:
    """Bytes that are free now, in main memory and on the GPU (0 without one)."""

    memory: int
    device_memory: int


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model without weights. Raises UserError if no causal language model has such a config."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
            return model
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"transformers makes no causal language model of this config ({error})") from error


def sizes_of(config: PreTrainedConfig, recipe: Recipe) -> Sizes:
    """Count parameters from the config. Raises UserError, with the reason, if the structure does not fit ToMoE."""
    model = skeleton(config)
    shape = shape_of(model)
    total = sum(p.numel() for p in model.parameters())
    least = least_active(shape, recipe.experts, recipe.attention, recipe.target)
    return Sizes(shape, total, decoder_params(shape), model.get_output_embeddings().weight.numel(), least)


def least_memory(sizes: Sizes, recipe: Recipe, layout: Layout, shards: int = 1) -> tuple[MemoryEstimate, ...]:
    """Return what each stage needs in one process: training (or carving), with `shards` of them, repair if any, folding."""
    t = recipe.train
    quantized = t.quantization != "none"
    computing = str(_compute(recipe)).removeprefix("torch.")
    dtype = t.quantization if quantized and t.steps else computing
    training = {
        f"weights in {dtype}": layer_bytes(sizes, recipe) if recipe.offload else weight_bytes(sizes, recipe, shards),
        "masks, routers and their optimizer": trainable_bytes(sizes, recipe, layout),
    }
    if t.steps:
        training["activations for the backward pass"] = activation_bytes(sizes, recipe)
        training["logits"] = 4 * CHUNK * sizes.output // sizes.shape.hidden_size * _FLOAT32
    by_layer = recipe.offload or t.shard or quantized
    folded = int(max(recipe.active, sizes.least_active) * sizes.decoder_params * getattr(torch, t.dtype).itemsize)
    original = {f"weights in {computing}": layer_bytes(sizes, recipe) if by_layer else weight_bytes(sizes, recipe)}
    refits = refit_bytes(sizes, recipe)
    stages = [MemoryEstimate("training" if t.steps else "carving", training)]
    if recipe.repair.mode != "none":
        equations, states = equation_bytes(sizes), hidden_state_bytes(sizes, recipe)
        stages.append(
            MemoryEstimate("repair", original | {"normal equations": equations, "hidden states": states} | refits)
        )
    folding = original | {"one file of the MoE": min(folded, CHECKPOINT_SHARD_BYTES)} | refits
    return (*stages, MemoryEstimate("folding", folding))


def _compute(recipe: Recipe) -> torch.dtype:
    return BaseWeights.of(recipe).compute


def weight_bytes(sizes: Sizes, recipe: Recipe, shards: int = 1) -> int:
    """Bytes of the frozen base in one process. If it is sharded, the layer that runs is whole, and so is the output matrix."""
    itemsize = _compute(recipe).itemsize
    if recipe.train.quantization != "none":
        return (sizes.total - sizes.decoder_params) * itemsize + sizes.decoder_params * BITS[
            recipe.train.quantization
        ] // 8
    if shards == 1:
        return int(sizes.total * itemsize)
    whole = sizes.decoder_params // sizes.shape.num_layers + sizes.output
    return int((sizes.total + (shards - 1) * whole) // shards * itemsize)


def layer_bytes(sizes: Sizes, recipe: Recipe) -> int:
    """Bytes of a model that is read layer by layer: one layer, and what is outside of the layers."""
    outside = sizes.total - sizes.decoder_params
    return int((outside + sizes.decoder_params // sizes.shape.num_layers) * getattr(torch, recipe.train.dtype).itemsize)


def trainable_bytes(sizes: Sizes, recipe: Recipe, layout: Layout) -> int:
    """Bytes of the mask network in float32, and of the gradients and AdamW's two moments of its trained parameters."""
    with torch.device("meta"):
        size, sampling = recipe.experts.embedding_size, recipe.sampling
        net = mask_network(sizes.shape, layout, size, recipe.attention, sampling, recipe.seed)
    stored = sum(t.numel() for t in (*net.parameters(), *net.buffers()))
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad) if recipe.train.steps else 0
    return _FLOAT32 * (stored + 3 * trained)


def activation_bytes(sizes: Sizes, recipe: Recipe) -> int:
    """Bytes of the activations of one forward pass that are kept for the backward pass.

    For each layer and token these are, in the MLP of F neurons, 5 F numbers (gate, activated gate, up, product and mask;
    3 F without a gate), in attention q, k, v and their result, and the inputs of a norm and of the router (this one in
    float32). Nothing is kept below the first mask, so one layer less counts. With activation checkpointing it is the input
    of every layer, and all of these for one layer.
    """
    s, itemsize = sizes.shape, _compute(recipe).itemsize
    tokens = recipe.train.batch_size * recipe.data.seq_len
    heads = 2 * (s.num_heads + s.num_kv_heads) * s.head_dim
    layer = itemsize * ((5 if s.gated else 3) * s.mlp_size + heads + s.hidden_size) + _FLOAT32 * s.hidden_size
    if recipe.train.gradient_checkpointing:
        return tokens * (s.num_layers * itemsize * s.hidden_size + (layer if s.num_layers > 1 else 0))
    return tokens * (s.num_layers - 1) * layer


def equation_bytes(sizes: Sizes) -> int:
    """Bytes of one layer's normal equations while they are solved: a Gram matrix in float32, in float64, and its factor."""
    return sizes.shape.mlp_size**2 * (_FLOAT32 + 2 * _FLOAT64)


def repair_tokens(recipe: Recipe) -> int:
    """Tokens that repair fits to: as many as the recipe asks for, or all that are not held out."""
    data = recipe.data
    return min(recipe.repair.tokens, max(data.tokens - data.evaluation_tokens, data.seq_len))


def hidden_state_bytes(sizes: Sizes, recipe: Recipe) -> int:
    """Bytes of main memory for the hidden states that repair keeps between layers; 0 if they go to a file.

    With a GPU they are 0 as well: what is compared with its memory should not count main memory.
    """
    s, streams = sizes.shape, 1 if recipe.repair.target_after(recipe.train.steps) == "local" else 2
    a_token = (streams * s.hidden_size + s.mlp_size) * _compute(recipe).itemsize
    size = repair_tokens(recipe) * a_token
    size //= distributed.world_size()
    return 0 if size > RepairSettings.memory or pick_device(recipe.device).startswith("cuda") else size


def refit_bytes(sizes: Sizes, recipe: Recipe) -> dict[str, int]:
    """What repair adds to the plan, in main memory: nothing to count without repair or with a GPU."""
    if recipe.repair.mode == "none" or pick_device(recipe.device).startswith("cuda"):
        return {}
    itemsize = getattr(torch, recipe.train.dtype).itemsize
    return {"refitted projections": repair_bytes(sizes.shape, recipe.repair, itemsize)}


def available_memory(device: str) -> AvailableMemory:
    """Return what is free on this machine, or of the part of it that this process may use."""
    on_device = torch.cuda.mem_get_info()[0] if device.startswith("cuda") else 0
    return AvailableMemory(min([psutil.virtual_memory().available, *_left_in_cgroups()]), on_device)


def _left_in_cgroups(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield the bytes left in this process's control group and in those around it, if containers or schedulers limit them.

    Pages of files that were read long ago count as used, but the kernel frees them when memory is needed.
    """
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, kind, path = line.split(":", 2)
        if kind not in ("", "memory"):
            continue
        top = root / kind
        limit, used, idle = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if kind
            else ("memory.max", "memory.current", "inactive_file")
        )
        here = top / path.strip("/")
        for group in (here, *here.parents):
            left = _left(group, limit, used, idle)
            if left is not None:
                yield left
            if group == top:
                break


def _left(group: Path, limit: str, used: str, idle: str) -> int | None:
    """None if the group has no limit, or cannot be read from here."""
    try:
        most, now = int((group / limit).read_text()), int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, most - now + int(stat.get(idle, 0)))
    except (OSError, ValueError):  # "max" is no number
        return None


def check_memory(recipe: Recipe, folds: bool) -> None:
    """Raise UserError if training, or with `folds` also repair and folding, cannot fit into what is free.

    All processes of a run call it: those on one machine share its main memory, and each has a GPU of its own.
    """
    distributed.on_rank_zero(lambda: _check(recipe, folds))


def _check(recipe: Recipe, folds: bool) -> None:
    if not recipe.model:
        return  # loading it reports that
    device = pick_device(recipe.device)
    on_gpu = device.startswith("cuda")
    sizes = sizes_of(load_config(recipe.model, checked=True), recipe)
    layout = settle_layout(recipe, sizes.shape)
    training, *repair, folding = least_memory(
        sizes, recipe, layout, distributed.world_size() if recipe.train.shard else 1
    )
    available = available_memory(device)
    free = available.device_memory if on_gpu else available.memory
    local = 1 if on_gpu else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # all processes measure dense model and MoE beside each other, unless the base was sharded
    needs = [(training, local)]
    if folds:
        needs += [*((need, local) for need in repair), (folding, 1 if recipe.train.shard else local)]
    for need, processes in needs:
        if need.total * processes > free:
            parts = ", ".join(f"{format_bytes(size)} for {name}" for name, size in need.parts.items())
            hint = "" if recipe.offload or recipe.train.steps else "--offload holds one layer at a time, "
            hint += "--repair none leaves it out, " if need.stage == "repair" else ""
            kind = ("GPU" if on_gpu else "main") + " memory"
            each = f" in each of {processes} processes" if processes > 1 else ""
            raise UserError(
                f"{need.stage} needs at least {format_bytes(need.total)} of {kind}{each} ({parts}), but only "
                f"{format_bytes(free)} are free; {hint}`tomoe doctor {shlex.quote(recipe.model)}` shows what would help, "
                "--skip-memory-check starts anyway"
            )
