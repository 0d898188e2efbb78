"""Neurons split at random, as in LLaMA-MoE: the best of the splits that its authors trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tomoe.methods.base import Method
from tomoe.methods.registry import method
from tomoe.plans.partition.activations import Activations
from tomoe.plans.partition.experts import SHARED, Experts, Room


@method("random_split", paper="https://arxiv.org/abs/2406.16554")
class RandomSplit(Method):
    """Splits neurons into random experts without a shared part, and fits a router.

    The authors route at random at first and train all weights on hundreds of billions of tokens. Here nothing is trained, so any
    other way to group neurons should do better than this one.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"experts.shared": 0.0}

    def experts(self, seen: Activations, room: Room) -> Experts:
        # drawn on the CPU, so that a seed deals alike whatever the device
        order_F = torch.randperm(seen.h_TF.shape[1], generator=torch.Generator().manual_seed(room.seed))
        numbers_F = (torch.arange(len(order_F)) - room.shared).div(room.expert_size, rounding_mode="floor")
        expert_F = torch.empty_like(order_F).index_copy_(0, order_F, numbers_F.clamp_min(SHARED))
        return Experts(expert_F.to(seen.x_TD.device))
