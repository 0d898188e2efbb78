"""The carved start: experts, routers and widths from calibration tokens alone, with the budget met at step 0.

In one pass every layer is carved once, on dense activations, which are freed as soon as it has run. What attention leaves of the
budget the MLPs share, by the error that each unit saves, relative to the residual stream (`allocation`).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tomoe.budget import attention_params, decoder_params
from tomoe.methods.tomoe.attention import AttentionRanking
from tomoe.methods.tomoe.networks import AnyNetwork
from tomoe.plans.partition.activations import Activations, visit_layers
from tomoe.plans.partition.experts import units_of_layers
from tomoe.progress import StageCallback, no_stage_progress


@torch.no_grad()
def carve_(
    net: AnyNetwork,
    model: Any,
    ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    active: float,
    seed: int,
    progress: StageCallback = no_stage_progress,
) -> None:
    """Initialize `net` to a carved start: its noise-free plan meets the active fraction `active`; sampling does on average.

    Padding (mask False) does not count. `units_of_layers` divides what attention leaves of the budget among the MLPs.
    """
    s = net.shape
    ranking = None if net.attention is None else AttentionRanking(net.attention, model)

    def carve(i: int, seen: Activations) -> Any:
        return net.carve(i, seen, seed)

    more_hooks = None if ranking is None else ranking.hooks
    starts = visit_layers(model, ids, mask, carve, net.blank_start, progress, more_hooks)
    dense = s.num_layers * int(attention_params(s, s.head_dim, s.head_dim)), False
    attention, cut = dense if ranking is None else ranking.initialize_(active)
    left = active * decoder_params(s) - (s.other_params + attention + net.counted_routers(cut))
    units = units_of_layers([start.loss for start in starts], net.layout, s, left)
    net.initialize_experts_(starts, units, left)
