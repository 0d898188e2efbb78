"""One pass over the calibration text: every layer is ranked as soon as it has run, then its activations are freed.

Experts are carved by the form of the mask network. Attention is ranked by energy: the error at its own output says little
about what the model loses, so it does not compete with the MLPs for parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe import distributed
from tomoe.model.heads import rotate_heads
from tomoe.model.hooks import hooked, input_of
from tomoe.model.mlp import Linear
from tomoe.model.running import run_model
from tomoe.model.shape import ModelShape
from tomoe.model.structure import layer_parts
from tomoe.progress import StageCallback
from tomoe.pruning.learned.mask_network import MaskNetwork
from tomoe.pruning.rotation import head_rotations


class Calibration:
    """What calibration text says about every layer, once `run` is over."""

    def __init__(self, net: MaskNetwork, model: nn.Module, seed: int, progress: StageCallback):
        self.net, self.shape, self.seed, self.progress = net, net.shape, seed, progress
        self.parts, self.pruned = layer_parts(model), net.attention.pruning != "off"
        # as `net.carve` gives them
        self.experts: list[Any] = []
        # importance of Q/K choices and of V/O dims
        self.attention: list[tuple[Tensor, Tensor]] = []
        # if values are rotated
        self.rotations: list[Tensor] = []

    @torch.no_grad()
    def run(self, model: Any, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> None:
        """Run the text; padding (mask False) does not count."""
        # None: all of it counts, and nothing is copied to leave padding out
        valid = None if bool(mask.all()) else mask.flatten()
        with hooked(handle for i in range(self.shape.num_layers) for handle in self._hooks(i, valid)):
            run_model(model, ids, mask)
        for i, start in enumerate(self.experts):
            distributed.broadcast_(vars(start).values(), self._owner(i))

    def _owner(self, i: int) -> int:
        """Return the process that carves layer i: all of them run the text, but carving takes long, so they divide it."""
        return i % distributed.world_size()

    def _hooks(self, i: int, valid: Bool[Tensor, " BS"] | None) -> Iterator[RemovableHandle]:
        """Record what the parts of layer i read and write, and rank its dims as soon as it has run."""
        parts = self.parts[i]
        activations: dict[str, Tensor] = {}

        def of_text(t: Tensor) -> Tensor:
            tokens = t.flatten(0, -2)
            return tokens if valid is None else tokens[valid]

        def record_weight(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            residual = of_text(input_of(args, kwargs)).float()
            activations["weight"] = 1 / residual.square().sum(-1).clamp_min(1e-6)

        def record_input(module: nn.Module | Linear, name: str) -> RemovableHandle:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                activations[name] = of_text(input_of(args, kwargs))

            return module.register_forward_pre_hook(hook, with_kwargs=True)

        def record_output(module: Linear, name: str) -> RemovableHandle:
            def hook(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> None:
                # some families clip these in place
                activations[name] = y.flatten(0, -2).clone() if valid is None else of_text(y)

            return module.register_forward_hook(hook)

        def carve(*_: Any) -> None:
            self._carve_experts(i, activations["x"].float(), activations["h"], activations["weight"])
            if self.pruned:
                q, k, o = (activations[name] for name in ("q", "k", "o"))
                self._rank_attention(q, k, o, parts.o.weight)
            activations.clear()
            self.progress(i + 1, self.shape.num_layers)

        yield parts.layer.register_forward_pre_hook(record_weight, with_kwargs=True)
        yield record_input(parts.mlp, "x")
        yield record_input(parts.down, "h")
        if self.pruned:
            yield record_output(parts.q, "q")
            yield record_output(parts.k, "k")
            yield record_input(parts.o, "o")
        # the MLP is the last part of a layer; an offloaded layer has no weights any more after it has run
        yield parts.down.register_forward_hook(carve)

    def _carve_experts(
        self, i: int, x: Float[Tensor, "T D"], h: Float[Tensor, "T F"], weight: Float[Tensor, " T"]
    ) -> None:
        if self._owner(i) != distributed.rank():
            self.experts.append(self.net.blank_start(x.device))
            return
        down = self.parts[i].down.weight.float()
        self.experts.append(self.net.carve(i, x, h, weight, down, self.seed))

    def _rank_attention(self, q: Tensor, k: Tensor, o: Tensor, weight: Tensor) -> None:
        if self.net.rotates_values:
            rotation = head_rotations(o, weight, self.shape.num_kv_heads, self.shape.head_dim)
            self.rotations.append(rotation)
            o, weight = rotate_heads(o, rotation), rotate_heads(weight, rotation)
        self.attention.append(attention_importance(q, k, o, weight, self.shape))


def attention_importance(
    q: Float[Tensor, "t HC"],
    k: Float[Tensor, "t GC"],
    o: Float[Tensor, "t HC"],
    weight: Float[Tensor, "D HC"],
    s: ModelShape,
) -> tuple[Float[Tensor, " Q"], Float[Tensor, " C"]]:
    """Return the importance of Q/K choices and of V/O dims, from q, k and the input `o` of the output projection.

    A Q/K choice has the root of the sum over heads of E|q|^2 E|k|^2 of its dims, a V/O dim the root of the sum over heads
    of E(o^2) |column|^2 of the output projection. (RoPE turns a pair without changing its length, so q and k are those
    before it.)
    """
    q_energy, k_energy, o_energy = (t.float().square().mean(0).view(-1, s.head_dim) for t in (q, k, o))
    pairs = s.rotary_size // 2

    def choices(energy: Float[Tensor, "h C"]) -> Float[Tensor, "h Q"]:
        return torch.cat([energy[:, :pairs] + energy[:, pairs : 2 * pairs], energy[:, 2 * pairs :]], 1)

    groups = s.num_heads // s.num_kv_heads
    qk = (choices(q_energy) * choices(k_energy).repeat_interleave(groups, 0)).sum(0).sqrt()
    columns = weight.float().square().sum(0).view_as(o_energy)
    return qk, (o_energy * columns).sum(0).sqrt()
