"""How a run holds the dense weights: whole, offloaded to disk, sharded over ranks or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.model.loading import load_dense, pick_device
from tomoe.recipe.conversion import Recipe


@dataclass(frozen=True)
class BaseWeights:
    """The dense weights of one conversion. Training may use a quantized or sharded copy; the plan is for the original."""

    model: str
    dtype: torch.dtype
    device: str
    offload: bool = False
    shards: int = 1
    """Ranks that the base is sharded over."""
    quantization: str = "none"

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """The weights that a recipe asks for, with the current ranks. Raises UserError for a device that does not exist."""
        train = recipe.train
        return cls(
            model=recipe.model,
            dtype=getattr(torch, train.dtype),
            device=pick_device(recipe.device),
            offload=recipe.offload,
            shards=distributed.world_size() if train.shard else 1,
            quantization=train.quantization,
        )

    @property
    def is_original(self) -> bool:
        """Whether the model for training has all of the original weights."""
        return self.shards == 1 and self.quantization == "none"

    def for_training(self) -> PreTrainedModel:
        """The model that calibration and training run on. Raises UserError if it cannot be loaded."""
        return load_dense(
            self.model,
            self.dtype,
            self.device,
            shards=self.shards,
            offload=self.offload,
            quantization=self.quantization,
        )

    def original(self) -> PreTrainedModel:
        """The original weights, offloaded if possible: callers need one layer at a time. Raises UserError as `load_dense`."""
        return load_dense(self.model, self.dtype, self.device, offload=None)
