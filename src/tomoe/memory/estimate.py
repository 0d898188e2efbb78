"""Will it fit? What a conversion certainly needs, by arithmetic on the config alone, and what is free here.

The bounds are from below: nothing that could be freed, paged out or made smaller is counted. So they refuse a run only
where it cannot work. How much it takes in truth is found out by trying (`doctor.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tomoe import distributed
from tomoe.budget import block_total
from tomoe.conversion import pick_device
from tomoe.errors import UserError
from tomoe.model.loading import load_config
from tomoe.model.quantized import BITS
from tomoe.model.structure import ModelShape, shape_of
from tomoe.moe.checkpoint import SHARD
from tomoe.pruning.extract import least_active
from tomoe.pruning.losses import CHUNK
from tomoe.pruning.mask_network import MaskNetwork
from tomoe.recipe.conversion import Recipe

_CGROUPS = Path("/sys/fs/cgroup")
_FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Sizes:
    """Parameter counts, from the config alone."""

    shape: ModelShape
    total: int  # tied weights once
    blocks: int  # projection weights of attention and MLPs: what `active` is a share of
    output: int  # of the output matrix
    least_active: float  # the smallest share that the recipe's settings can reach

    def of_all(self, active: float) -> float:
        """The share of all weights that works on a token when `active` of the blocks do."""
        return 1 - (1 - active) * self.blocks / self.total


@dataclass(frozen=True)
class Need:
    """What one process holds at once in one stage, at the least: bytes, by what they are for."""

    stage: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Room:
    """Bytes that are free now."""

    memory: int
    device_memory: int


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without weights. Raises UserError where no causal language model has such a config."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
            return model
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"transformers makes no causal language model of this config ({error})") from error


def sizes_of(config: PreTrainedConfig, recipe: Recipe) -> Sizes:
    """Raises UserError, with the reason, where the structure does not fit ToMoE."""
    model = skeleton(config)
    shape = shape_of(model)
    total = sum(p.numel() for p in model.parameters())
    least = least_active(shape, recipe.experts.width_multiple, recipe.experts.attention)
    return Sizes(shape, total, block_total(shape), model.get_output_embeddings().weight.numel(), least)


def least_memory(sizes: Sizes, recipe: Recipe, shares: int = 1) -> tuple[Need, Need]:
    """What one of `shares` processes that share the base out needs for learning (or carving), and process 0 for folding."""
    packed = recipe.train.base if recipe.train.base != "dense" and recipe.train.steps else recipe.train.dtype
    learning = {
        f"weights in {packed}": layer_bytes(sizes, recipe) if recipe.stream else weight_bytes(sizes, recipe, shares),
        "what is learned": learned_bytes(sizes, recipe),
    }
    if recipe.train.steps:
        learning["what the backward pass needs"] = kept_bytes(sizes, recipe)
        learning["logits"] = 4 * CHUNK * sizes.output // sizes.shape.hidden_size * _FLOAT32
    a_weight = getattr(torch, recipe.train.dtype).itemsize
    streamed = recipe.stream or recipe.train.shard or recipe.train.base != "dense"
    folded = int(max(recipe.active, sizes.least_active) * sizes.blocks * a_weight)
    folding = {
        f"weights in {recipe.train.dtype}": layer_bytes(sizes, recipe) if streamed else weight_bytes(sizes, recipe),
        "what is written at a time": min(folded, SHARD),
    }
    return Need("learning" if recipe.train.steps else "carving", learning), Need("folding", folding)


def weight_bytes(sizes: Sizes, recipe: Recipe, shares: int = 1) -> int:
    """Of the frozen base. Where it is shared out, the layer that runs is whole, and so is the output matrix."""
    a_weight = getattr(torch, recipe.train.dtype).itemsize
    if recipe.train.base != "dense":
        return (sizes.total - sizes.blocks) * a_weight + sizes.blocks * BITS[recipe.train.base] // 8
    if shares == 1:
        return int(sizes.total * a_weight)
    whole = sizes.blocks // sizes.shape.num_layers + sizes.output
    return int((sizes.total + (shares - 1) * whole) // shares * a_weight)


def layer_bytes(sizes: Sizes, recipe: Recipe) -> int:
    """Of a model that is read layer by layer: one layer, and what lies around the layers."""
    around = sizes.total - sizes.blocks
    return int((around + sizes.blocks // sizes.shape.num_layers) * getattr(torch, recipe.train.dtype).itemsize)


def learned_bytes(sizes: Sizes, recipe: Recipe) -> int:
    """The mask network in float32; of what is trained also gradient and AdamW's two moments."""
    with torch.device("meta"):
        net = MaskNetwork(sizes.shape, recipe.experts, recipe.sampling, recipe.seed)
    held = sum(t.numel() for t in (*net.parameters(), *net.buffers()))
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad) if recipe.train.steps else 0
    return _FLOAT32 * (held + 3 * trained)


def kept_bytes(sizes: Sizes, recipe: Recipe) -> int:
    """Activations of one forward pass that wait for the backward pass.

    Of a layer and token: in the MLP of F neurons 5 F numbers (gate, activated gate, up, product and mask; 3 F without a
    gate), in attention q, k, v and their result, the inputs of a norm and of the router (this one in float32). Nothing
    is kept below the first mask, so one layer less counts. With activation checkpointing: the input of every layer, and
    one layer's own.
    """
    s, a_number = sizes.shape, getattr(torch, recipe.train.dtype).itemsize
    tokens = recipe.train.batch_size * recipe.data.block_size
    heads = 2 * (s.num_heads + s.num_kv_heads) * s.head_dim
    layer = a_number * ((5 if s.gated else 3) * s.mlp_size + heads + s.hidden_size) + _FLOAT32 * s.hidden_size
    if recipe.train.gradient_checkpointing:
        return tokens * (s.num_layers * a_number * s.hidden_size + (layer if s.num_layers > 1 else 0))
    return tokens * (s.num_layers - 1) * layer


def free_room(device: str) -> Room:
    """What this machine, or the part of it that this process may use, has left."""
    on_device = torch.cuda.mem_get_info()[0] if device.startswith("cuda") else 0
    return Room(min([psutil.virtual_memory().available, *_left_in_cgroups()]), on_device)


def _left_in_cgroups(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """What containers and schedulers leave of the machine's memory: of this process's group and of those around it.

    Pages of files that were read long ago count as used, but are given up when memory is wanted.
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
    """None where the group has no limit, or is not to be seen from here."""
    try:
        most, now = int((group / limit).read_text()), int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, most - now + int(stat.get(idle, 0)))
    except (OSError, ValueError):  # "max" is no number
        return None


def check_room(recipe: Recipe, folds: bool) -> None:
    """Raises UserError where learning, or folding if it comes too, cannot fit into what is free.

    To be called by all processes of a run: those on one machine share its main memory, and each has a GPU of its own.
    """
    distributed.first(lambda: _check(recipe, folds))


def _check(recipe: Recipe, folds: bool) -> None:
    if not recipe.model:
        return  # said by whoever loads it
    device = pick_device(recipe.device)
    on_gpu = device.startswith("cuda")
    sizes = sizes_of(load_config(recipe.model, vetted=True), recipe)
    learning, folding = least_memory(sizes, recipe, distributed.size() if recipe.train.shard else 1)
    room = free_room(device)
    free = room.device_memory if on_gpu else room.memory
    beside = 1 if on_gpu else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # all processes measure dense model and MoE beside each other, unless the base was shared out
    for need, times in ((learning, beside), (folding, 1 if recipe.train.shard else beside))[: 2 if folds else 1]:
        if need.total * times > free:
            parts = ", ".join(f"{gb(size)} for {name}" for name, size in need.parts.items())
            hint = "" if recipe.stream or recipe.train.steps else "--stream holds one layer at a time, "
            where = ("GPU" if on_gpu else "main") + " memory" + (f" in each of {times} processes" if times > 1 else "")
            raise UserError(
                f"{need.stage} needs {gb(need.total)} of {where} at the very least ({parts}), and only {gb(free)} are "
                f"free; {hint}`tomoe doctor {recipe.model}` says what would help, --try-anyway begins all the same"
            )


def gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
