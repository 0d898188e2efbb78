"""The carved start: routers, neurons, widths and dims from calibration tokens alone, with the budget met at step 0.

Every layer is ranked once, on dense activations (`calibration`). Attention, if it is pruned at all, keeps the same fraction of
dims in every layer, those with the most energy. What it leaves of the budget the MLPs share, by the error that each unit
saves, relative to the residual stream (`allocation`).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tomoe.budget import attention_params, decoder_params, mlp_params
from tomoe.progress import StageCallback, no_stage_progress
from tomoe.pruning.allocation import allocate, evened
from tomoe.pruning.calibration import Calibration
from tomoe.pruning.layouts import attention_units
from tomoe.pruning.learned.mask_network import MaskNetwork, start_logits


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
    found = Calibration(net, model, seed, progress)
    found.run(model, ids, mask)
    if net.rotates_values:
        net.value_rotations.copy_(torch.stack(found.rotations))
    left = active * decoder_params(net.shape) - _start_attention_(net, found.attention, active)
    units = None
    if not net.layout.uniform:
        params = [int(mlp_params(net.shape, width)) for width in net.layout.widths(net.shape.mlp_size)]
        # one more than a whole layer has: then none is left out
        most = len(params) - 1 if net.layout.leaves_whole else len(params)
        units = evened(allocate([start.loss for start in found.experts], params, left), most)
    net.start_experts_(found.experts, units, left)


def _start_attention_(
    net: MaskNetwork, importance: list[tuple[Float[Tensor, " Q"], Float[Tensor, " C"]]], active: float
) -> int:
    """Start from the most important Q/K choices and V/O dims of every layer; returns the parameters beside the MLPs."""
    s = net.shape
    if net.attention.pruning == "off":
        return s.other_params + s.num_layers * int(attention_params(s, s.head_dim, s.head_dim))
    spent = s.other_params
    choices, dims = attention_units(s, net.attention, active)
    for i, (qk, values) in enumerate(importance):
        order = qk.argsort(descending=True, stable=True)
        chosen = torch.zeros(len(qk), dtype=torch.bool).scatter_(0, order[:choices].cpu(), True)
        spent += int(attention_params(s, len(s.qk_dims(chosen)), dims))
        starts = [start_logits(_ranks(t), n, net.sampling.keep_bias) for t, n in ((values, dims), (qk, choices))]
        net.dims[i].start_at_(torch.cat(starts))
    return spent


def _ranks(importance: Float[Tensor, " size"]) -> Int[Tensor, " size"]:
    return importance.argsort(descending=True, stable=True).argsort()
