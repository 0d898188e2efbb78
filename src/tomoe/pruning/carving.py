"""The carved start: experts, routers and widths from calibration tokens alone, with the budget met at step 0.

Every layer is carved once, on dense activations (`calibration`). What attention leaves of the budget the MLPs share, by the
error that each unit saves, relative to the residual stream (`allocation`).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tomoe.budget import attention_params, decoder_params, mlp_params
from tomoe.progress import StageCallback, no_stage_progress
from tomoe.pruning.allocation import allocate, evened
from tomoe.pruning.calibration import Calibration
from tomoe.pruning.learned.attention_carving import AttentionRanking
from tomoe.pruning.network import MaskNetwork


@torch.no_grad()
def carve_(
    net: MaskNetwork,
    model: Any,
    ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    active: float,
    seed: int,
    progress: StageCallback = no_stage_progress,
) -> None:
    """Give `net` a carved start: its noise-free plan meets the active fraction `active`, and so does sampling on average.

    A uniform layout makes all layers exactly equally wide. Otherwise layers that the error would leave whole stay whole, and
    the others get equally many units, up to one: a layer's own error is not what the model loses (docs/lab/log.md). In a
    layout for a GPU all layers do.
    """
    s = net.shape
    found = Calibration(net, model, seed, progress)
    if net.attention is None:
        found.run(model, ids, mask)
        attention = s.num_layers * int(attention_params(s, s.head_dim, s.head_dim))
    else:
        ranking = AttentionRanking(net.attention, model)
        found.run(model, ids, mask, ranking.hooks)
        attention = ranking.start_(active)
    left = active * decoder_params(s) - (s.other_params + attention)
    units = None
    if not net.layout.uniform:
        params = [int(mlp_params(s, width)) for width in net.layout.widths(s.mlp_size)]
        # one more than a whole layer has: then none is left out
        most = len(params) - 1 if net.layout.leaves_whole else len(params)
        units = evened(allocate([start.loss for start in found.experts], params, left), most)
    net.start_experts_(found.experts, units, left)
