"""Inputs, activations and outputs of a dense model's MLPs on calibration tokens: one pass, one layer in memory at a time.

Shapes, and the letters at the ends of names: T tokens, D hidden size, F neurons of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe import distributed
from tomoe.model.hooks import hooked, input_of
from tomoe.model.mlp import Mlp, WeightMatrix
from tomoe.model.running import run_model
from tomoe.model.structure import layer_parts
from tomoe.progress import StageCallback, no_stage_progress


@dataclass(frozen=True)
class Activations:
    """The MLP of one layer on T calibration tokens, without padding."""

    mlp: Mlp
    """Its projections (`gate`, `up`, `down`, each with `weight` [out, in] and `bias`) and its `activation`."""
    x_TD: Float[Tensor, "T D"]
    """What the MLP reads, float32."""
    h_TF: Float[Tensor, "T F"]
    """What its down projection reads, in the dtype of the model."""
    weight_T: Float[Tensor, " T"]
    """1 / |residual|^2 of each token: errors count relative to the residual stream that they are added to."""
    down_DF: Float[Tensor, "D F"]
    """The weight of its down projection, float32."""
    sequence_T: Int[Tensor, " T"]
    """The number of the sequence that each token is from."""

    def energy_TF(self, neurons: Int[Tensor, " n"] | slice = slice(None)) -> Float[Tensor, "T n"]:
        """Squared length of each neuron's contribution to the output of each token, weighted by `weight_T`."""
        norms_F = self.down_DF.norm(dim=0)
        return (self.h_TF[:, neurons] * norms_F[neurons]).square_().mul_(self.weight_T[:, None])

    def gate_TF(self) -> Float[Tensor, "T F"]:
        """act(gate x), or act(up x) without a gate, in float32."""
        projection = self.mlp.gate or self.mlp.up
        bias = projection.bias
        gate_TF = nn.functional.linear(self.x_TD, projection.weight.float(), None if bias is None else bias.float())
        return self.mlp.activation(gate_TF)


def real_tokens(t: Float[Tensor, "*BS n"], valid: Bool[Tensor, " BS"] | None) -> Float[Tensor, "T n"]:
    """Flatten over tokens and drop padding; without any (None) nothing is copied."""
    tokens = t.flatten(0, -2)
    return tokens if valid is None else tokens[valid]


MoreHooks = Callable[[int, Bool[Tensor, " BS"] | None], Iterator[RemovableHandle]]


def visit_layers(
    model: Any,
    ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    visit: Callable[[int, Activations], Any],
    blank: Callable[[torch.device], Any],
    progress: StageCallback = no_stage_progress,
    more_hooks: MoreHooks | None = None,
) -> list[Any]:
    """Run the model on calibration text and call `visit` with the activations of each layer as soon as it has run.

    They are freed when `visit` returns. Returns what it returned, layer by layer: objects whose attributes are tensors. Padding
    (mask False) is left out. Under torchrun all processes run the text and divide the visits; `blank` makes an object with
    tensors of the same shapes to receive those of another process. `more_hooks` registers other hooks on layer i.
    """
    valid = None if bool(mask.all()) else mask.flatten()
    sequence = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    visited: list[Any] = []

    layers = layer_parts(model)

    def result(i: int, mlp: Mlp, activations: dict[str, Tensor]) -> Any:
        if _owner(i) != distributed.rank():
            return blank(ids.device)
        x_TD, down_DF = activations["x"].float(), mlp.down.weight.float()
        sequence_T = sequence if valid is None else sequence[valid]
        return visit(i, Activations(mlp, x_TD, activations["h"], activations["weight"], down_DF, sequence_T))

    def hooks() -> Iterator[RemovableHandle]:
        for i, parts in enumerate(layers):

            def seen(activations: dict[str, Tensor], mlp: Mlp = parts.mlp, i: int = i) -> None:
                visited.append(result(i, mlp, activations))
                progress(i + 1, len(layers))

            yield from _mlp_hooks(parts.mlp, valid, seen)
            if more_hooks is not None:
                yield from more_hooks(i, valid)

    with hooked(hooks()):
        run_model(model, ids, mask)
    for i, made in enumerate(visited):
        distributed.broadcast_(vars(made).values(), _owner(i))
    return visited


def _owner(i: int) -> int:
    """Return the process that visits layer i: all processes run the text, and divide the visits, which may be slow."""
    return i % distributed.world_size()


def _mlp_hooks(
    mlp: Mlp, valid: Bool[Tensor, " BS"] | None, seen: Callable[[dict[str, Tensor]], None]
) -> Iterator[RemovableHandle]:
    """Record inputs and outputs of the parts of a layer; `seen` receives them as soon as the layer has run."""
    activations: dict[str, Tensor] = {}

    def record_weight(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # an error counts relative to the residual stream that it is added to, which grows from layer to layer
        residual = real_tokens(input_of(args, kwargs), valid).float()
        activations["weight"] = 1 / residual.square().sum(-1).clamp_min(1e-6)

    def record_input(module: nn.Module | WeightMatrix, name: str) -> RemovableHandle:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            activations[name] = real_tokens(input_of(args, kwargs), valid)

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def finish(*_: Any) -> None:
        seen(activations)
        activations.clear()

    yield mlp.layer.register_forward_pre_hook(record_weight, with_kwargs=True)
    yield record_input(mlp.module, "x")
    yield record_input(mlp.down, "h")
    # the MLP is the last part of a layer; an offloaded layer has no weights any more after it has run
    yield mlp.down.register_forward_hook(finish)
