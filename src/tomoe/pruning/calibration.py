"""One pass over the calibration text: the MLP of every layer is carved as soon as it has run, then its activations are freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe import distributed
from tomoe.model.hooks import hooked, input_of
from tomoe.model.mlp import Linear
from tomoe.model.running import run_model
from tomoe.model.structure import layer_parts
from tomoe.progress import StageCallback
from tomoe.pruning.network import Activations, MaskNetwork

Hooks = Callable[[int, Bool[Tensor, " BS"] | None], Iterator[RemovableHandle]]
"""From a layer's number, and which tokens are no padding (None: all), to hooks on the layer."""


def real_tokens(t: Float[Tensor, "*BS n"], valid: Bool[Tensor, " BS"] | None) -> Float[Tensor, "T n"]:
    """Flatten over tokens and leave padding out; without any nothing is copied."""
    tokens = t.flatten(0, -2)
    return tokens if valid is None else tokens[valid]


class Calibration:
    """What calibration text says about the MLP of every layer, once `run` is over."""

    def __init__(self, net: MaskNetwork, model: nn.Module, seed: int, progress: StageCallback):
        self.net, self.num_layers, self.seed, self.progress = net, net.shape.num_layers, seed, progress
        self.parts = layer_parts(model)
        self.experts: list[Any] = []  # as `net.carve` gives them

    @torch.no_grad()
    def run(
        self, model: Any, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], of_attention: Hooks | None = None
    ) -> None:
        """Run the text; padding (mask False) does not count. What looks at attention at the same time has hooks of its own."""
        valid = None if bool(mask.all()) else mask.flatten()
        kinds = [self._hooks] if of_attention is None else [self._hooks, of_attention]
        with hooked(handle for i in range(self.num_layers) for hooks in kinds for handle in hooks(i, valid)):
            run_model(model, ids, mask)
        for i, start in enumerate(self.experts):
            distributed.broadcast_(vars(start).values(), self._owner(i))

    def _owner(self, i: int) -> int:
        """Return the process that carves layer i: all of them run the text, but carving takes long, so they divide it."""
        return i % distributed.world_size()

    def _hooks(self, i: int, valid: Bool[Tensor, " BS"] | None) -> Iterator[RemovableHandle]:
        """Record what the parts of layer i read and write, and carve it as soon as it has run."""
        parts = self.parts[i]
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
            if self._owner(i) == distributed.rank():
                down_DF = parts.mlp.down.weight.float()
                seen = Activations(x_TD, activations["h"], activations["weight"], down_DF)
                self.experts.append(self.net.carve(i, seen, self.seed))
            else:
                self.experts.append(self.net.blank_start(x_TD.device))
            activations.clear()
            self.progress(i + 1, self.num_layers)

        yield parts.mlp.layer.register_forward_pre_hook(record_weight, with_kwargs=True)
        yield record_input(parts.mlp.module, "x")
        yield record_input(parts.mlp.down, "h")
        # the MLP is the last part of a layer; an offloaded layer has no weights any more after it has run
        yield parts.mlp.down.register_forward_hook(carve)
