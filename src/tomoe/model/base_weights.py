"""How a run holds the dense weights: in memory, offloaded to disk or sharded over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.model.compute_dtype import compute_dtype
from tomoe.model.loading import load_dense, pick_device
from tomoe.model.offload import cast_
from tomoe.recipe.conversion import Recipe


@dataclass(frozen=True)
class BaseWeights:
    """The dense weights of one conversion. Training may use a sharded copy; the plan is for the original."""

    model: str
    dtype: torch.dtype  # that the weights are stored in
    compute: torch.dtype  # that they are multiplied in
    device: str
    offload: bool = False
    shards: int = 1  # ranks that the base is sharded over

    @classmethod
    def of(cls, recipe: Recipe, model: str = "", stored: str = "") -> Self:
        """Return the weights that a recipe asks for, with the current ranks; model, stored: name and dtype if not the recipe's.
        Raises UserError for a device that does not exist."""
        train = recipe.train
        device = pick_device(recipe.device)
        dtype = getattr(torch, stored or train.dtype)
        return cls(
            model=model or recipe.model,
            dtype=dtype,
            # sharded weights keep their dtype
            compute=dtype if train.shard else compute_dtype(train.compute_dtype, dtype, device),
            device=device,
            offload=recipe.offload,
            shards=distributed.world_size() if train.shard else 1,
        )

    @property
    def is_original(self) -> bool:
        """Whether the model for training has all original weights."""
        return self.shards == 1

    def for_training(self) -> PreTrainedModel:
        """Load the model for calibration and training. Raises UserError if it cannot be loaded."""
        model = load_dense(self.model, self.dtype, self.device, shards=self.shards, offload=self.offload)
        return self.to_compute_dtype_(model)

    def original(self) -> PreTrainedModel:
        """Load the original weights for calibration and repair, offloaded if possible, unless they are computed with in another
        dtype. Raises UserError as `load_dense`."""
        if self.compute != self.dtype:
            return self.for_training()
        return load_dense(self.model, self.dtype, self.device, offload=None)

    def to_compute_dtype_(self, model: PreTrainedModel) -> PreTrainedModel:
        """Cast a model to its compute dtype in place."""
        if self.compute != self.dtype:
            cast_(model, self.compute)
        return model

    def to_stored_dtype_(self, model: PreTrainedModel) -> PreTrainedModel:
        """Undo `to_compute_dtype_`; the values are the original ones."""
        if self.compute != self.dtype:
            cast_(model, self.dtype)
        return model
