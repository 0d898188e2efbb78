"""How long the stages of a conversion take: their operations, computed from sizes, over this machine's speed, timed on matrix
products.

Operations are multiplications and additions of matrix products; what is done beside them takes the share OVERHEAD more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tomoe import distributed
from tomoe.budget import decoder_params
from tomoe.data.evaluation_text import OFFLOADED_TOKENS
from tomoe.data.sources import SELF
from tomoe.memory.estimate import ParamCounts, fitted_tokens, sizes_of
from tomoe.methods.base import Method
from tomoe.methods.registry import resolve_method
from tomoe.model.base_weights import BaseWeights
from tomoe.model.far_tokens import BEHIND
from tomoe.model.loading import load_config
from tomoe.model.shape import ModelShape
from tomoe.plans.repair.equations import equation_operations
from tomoe.recipe.conversion import Recipe

OVERHEAD = 0.3
DISK = 2e8  # bytes a second that are read and hashed, or written and read back (1.4e8 beside other work, for the text of an 8B)
TIMED_TOKENS, TIMED_SECONDS = 512, 0.2


@dataclass(frozen=True)
class Work:
    """One stage; operations: in the dtype that weights are multiplied in, stored: in the one that they are stored in, exact: in
    float64; files: bytes that are read or written."""

    stage: str
    operations: float
    stored: float = 0
    exact: float = 0
    files: float = 0


@dataclass(frozen=True)
class Speed:
    """Operations per second in matrix products of many tokens, in each dtype of `Work`."""

    operations: float
    stored: float
    exact: float

    @classmethod
    def measured(cls, shape: ModelShape, base: BaseWeights) -> Speed:
        """Time matrix products of the size of an MLP's on the device, some tenths of a second per dtype."""

        def rate(dtype: torch.dtype) -> float:
            x = torch.ones(TIMED_TOKENS, shape.hidden_size, dtype=dtype, device=base.device)
            weight = torch.ones(shape.mlp_size, shape.hidden_size, dtype=dtype, device=base.device)
            done, start = 0, math.inf
            while not done or time.perf_counter() - start < TIMED_SECONDS:
                float(torch.nn.functional.linear(x, weight)[0, 0])
                # the first product prepares
                done, start = (done + 1, start) if start < math.inf else (0, time.perf_counter())
            return 2 * done * x.numel() * shape.mlp_size / (time.perf_counter() - start)

        known = {dtype: rate(dtype) for dtype in {base.compute, base.dtype, torch.float64}}
        return cls(known[base.compute], known[base.dtype], known[torch.float64])

    def seconds(self, work: Work) -> float:
        """Estimate the seconds that a stage takes."""
        products = work.operations / self.operations + work.stored / self.stored + work.exact / self.exact
        return (1 + OVERHEAD) * products + work.files / DISK


def works_of(sizes: ParamCounts, method: Method, recipe: Recipe) -> list[Work]:
    """List the stages of a conversion in one process, in their order, except the export."""
    shape, data, base = sizes.shape, recipe.data, BaseWeights.of(recipe)
    ranks = distributed.world_size()
    weights = sizes.total * base.dtype.itemsize
    # weights are looked at before they are used, and once more for their fingerprint
    text = Work("text", 0, files=2 * weights)
    if SELF in data.sources:
        sampled = (data.tokens or data.calibration_tokens + data.held_out_tokens + recipe.fitted_tokens()) / ranks
        # the many rows that are sampled side by side are a product of many tokens
        text = Work("text", 2 * sampled * sizes.total, files=text.files)
    works = [text, Work(method.stage, method.operations(recipe, shape, sizes.output))]
    if recipe.repair.mode != "none":
        works.append(_repair(shape, recipe))
    # both models run on a few tokens
    check = 2 * (2 * BEHIND) * 2 * sizes.total
    works.append(Work("folding", 0, stored=check, files=2 * weights))
    measured = min(data.evaluation_tokens, OFFLOADED_TOKENS) if recipe.offload else data.evaluation_tokens
    # both models, and the output matrix of the dense one once more for the KL
    works.append(Work("measurement", 2 * measured / ranks * (2 * sizes.total + sizes.output)))
    return works


def _repair(shape: ModelShape, recipe: Recipe) -> Work:
    tokens, repair = fitted_tokens(recipe.repair, recipe.data), recipe.repair
    down = 2 * shape.mlp_size * shape.hidden_size
    layer = 2 * decoder_params(shape) / shape.num_layers
    streams = 1 if repair.target_after(recipe.train.steps) == "local" else 2
    plain, exact = equation_operations(
        shape.mlp_size, shape.hidden_size, tokens, repair.rank if repair.mode == "low_rank" else 0
    )
    # the streams, what the masks took away, what the change adds
    operations = tokens * (streams * layer + 2 * down) + plain
    return Work("repair", shape.num_layers * operations, exact=shape.num_layers * exact)


def estimated(recipe: Recipe) -> str:
    """Say how long a conversion takes, from the model's config alone."""
    method, recipe = resolve_method(recipe)
    return in_words(durations(sizes_of(load_config(recipe.model), recipe), method, recipe))


def durations(sizes: ParamCounts, method: Method, recipe: Recipe) -> dict[str, float]:
    """Estimate the seconds of each stage, at this machine's current speed."""
    speed = Speed.measured(sizes.shape, BaseWeights.of(recipe))
    return {work.stage: speed.seconds(work) for work in works_of(sizes, method, recipe)}


def in_words(seconds: Mapping[str, float]) -> str:
    """Describe the time of all stages together, and of each."""
    stages = ", ".join(f"{stage} {_minutes(each)}" for stage, each in seconds.items() if each >= 1)
    return f"About {_minutes(sum(seconds.values()))} as this machine computes now{f' ({stages})' if stages else ''}."


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
