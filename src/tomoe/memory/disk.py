"""The room on disk that a conversion takes, which is looked for before its work begins."""

from __future__ import annotations

from pathlib import Path

import torch

from tomoe.errors import UserError
from tomoe.files import format_bytes, free_on_disk
from tomoe.memory.estimate import sizes_of
from tomoe.methods.registry import resolve_method
from tomoe.model.base_weights import BaseWeights
from tomoe.model.loading import load_config
from tomoe.plans.repair.plan import repair_bytes
from tomoe.recipe.conversion import Recipe


def needed_bytes(recipe: Recipe, copies: int) -> int:
    """At most so many bytes are written for `copies` models (the converted one, and its export), for the down projections in the
    plan, and for those that the repair keeps in float32 until the model is written."""
    method, recipe = resolve_method(recipe)
    sizes = sizes_of(load_config(recipe.model), recipe)
    itemsize = BaseWeights.of(recipe).dtype.itemsize
    refits = 0
    if method.kind != "inputs":
        refits = sum(repair_bytes(sizes.shape, recipe.repair, size) for size in (itemsize, torch.float32.itemsize))
    return copies * sizes.total * itemsize + refits


def check_disk(recipe: Recipe, out: Path, copies: int) -> None:
    """Raises UserError if the disk of `out` has no room for what a conversion writes there."""
    if not recipe.model:
        return  # loading it reports that
    free = free_on_disk(out)
    needed = needed_bytes(recipe, copies)
    if needed > free:
        export = ", its export" if copies > 1 else ""
        raise UserError(
            f"the conversion writes up to {format_bytes(needed)} (the model, its plan{export} and what the repair keeps), but "
            f"the disk of {out} has only {format_bytes(free)} left",
            "free some, or name a folder on another disk",
        )
