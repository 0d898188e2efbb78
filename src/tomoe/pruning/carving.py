"""The carved start: experts, routers and widths from calibration tokens alone, with the budget met at step 0.

In one pass every layer is carved once, on dense activations, which are freed as soon as it has run. What attention leaves of the
budget the MLPs share, by the error that each unit saves, relative to the residual stream (`allocation`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe import distributed
from tomoe.budget import attention_params, decoder_params, mlp_params
from tomoe.model.hooks import hooked, input_of
from tomoe.model.mlp import Linear
from tomoe.model.running import run_model
from tomoe.model.structure import LayerParts, layer_parts
from tomoe.progress import StageCallback, no_stage_progress
from tomoe.pruning.allocation import allocate, evened
from tomoe.pruning.forms import AnyNetwork
from tomoe.pruning.learned.attention_carving import AttentionRanking
from tomoe.pruning.network import Activations, real_tokens


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
    """Give `net` a carved start: its noise-free plan meets the active fraction `active`, and so does sampling on average.

    Padding (mask False) does not count. A uniform layout makes all layers exactly equally wide. Otherwise layers that the
    error would leave whole stay whole, and the others get equally many units, up to one: a layer's own error is not what the
    model loses (docs/lab/log.md). In a layout for a GPU all layers do.
    """
    s = net.shape
    valid = None if bool(mask.all()) else mask.flatten()
    ranking = None if net.attention is None else AttentionRanking(net.attention, model)
    starts: list[Any] = []  # as `net.carve` gives them

    def hooks() -> Iterator[RemovableHandle]:
        for i, parts in enumerate(layer_parts(model)):
            yield from _mlp_hooks(net, i, parts, valid, seed, starts, progress)
            if ranking is not None:
                yield from ranking.hooks(i, valid)

    with hooked(hooks()):
        run_model(model, ids, mask)
    for i, start in enumerate(starts):
        distributed.broadcast_(vars(start).values(), _owner(i))
    whole = s.num_layers * int(attention_params(s, s.head_dim, s.head_dim))
    left = active * decoder_params(s) - (s.other_params + (whole if ranking is None else ranking.start_(active)))
    units = None
    if not net.layout.uniform:
        params = [int(mlp_params(s, width)) for width in net.layout.widths(s.mlp_size)]
        # one more than a whole layer has: then none is left out
        most = len(params) - 1 if net.layout.leaves_whole else len(params)
        units = evened(allocate([start.loss for start in starts], params, left), most)
    net.start_experts_(starts, units, left)


def _owner(i: int) -> int:
    """Return the process that carves layer i: all of them run the text, but carving takes long, so they divide it."""
    return i % distributed.world_size()


def _mlp_hooks(
    net: AnyNetwork,
    i: int,
    parts: LayerParts,
    valid: Bool[Tensor, " BS"] | None,
    seed: int,
    starts: list[Any],
    progress: StageCallback,
) -> Iterator[RemovableHandle]:
    """Record what the parts of layer i read and write, and carve it as soon as it has run."""
    activations: dict[str, Tensor] = {}

    def record_weight(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # an error counts relative to the residual stream that it is added to, which grows from layer to layer
        residual = real_tokens(input_of(args, kwargs), valid).float()
        activations["weight"] = 1 / residual.square().sum(-1).clamp_min(1e-6)

    def record_input(module: nn.Module | Linear, name: str) -> RemovableHandle:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            activations[name] = real_tokens(input_of(args, kwargs), valid)

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def carve(*_: Any) -> None:
        x_TD = activations["x"].float()
        if _owner(i) == distributed.rank():
            down_DF = parts.mlp.down.weight.float()
            starts.append(net.carve(i, Activations(x_TD, activations["h"], activations["weight"], down_DF), seed))
        else:
            starts.append(net.blank_start(x_TD.device))
        activations.clear()
        progress(i + 1, net.shape.num_layers)

    yield parts.mlp.layer.register_forward_pre_hook(record_weight, with_kwargs=True)
    yield record_input(parts.mlp.module, "x")
    yield record_input(parts.mlp.down, "h")
    # the MLP is the last part of a layer; an offloaded layer has no weights any more after it has run
    yield parts.mlp.down.register_forward_hook(carve)
