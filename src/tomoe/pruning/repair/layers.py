"""Closed-form repair: the down projection of each layer is refitted to the masks that the plan gives each token.

Layer by layer, on the already converted prefix. With the masked activations h_t [F] of token t, the gap g_t [D] between
what the layer should have given and what it gives, and w_t = 1 / |residual_t|^2, the change of W_down is the minimum of

    sum_t w_t |h_t Delta^T - g_t|^2 + ridge mean(diag G) |Delta|^2,      G = sum_t w_t h_t h_t^T  [F, F],

one Cholesky factorisation a layer. All experts share the one repaired matrix, so every export holds it and speed stays
what it was. The bias of the down projection stays too. Where V/O dims are pruned, the output projection of the
attention is refitted by the same equations before the MLP that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.errors import UserError
from tomoe.model.offload import materialized
from tomoe.model.structure import Linear, decoder_layers, layer_parts, shape_of
from tomoe.pruning.masking import LayerMasks, masked, with_weight
from tomoe.pruning.repair.equations import NormalEquations, Refit, refit

CHUNK_TOKENS = 4096  # that run through a layer at once
STREAM_SHARE = {"local": 0.0, "half": 0.5}

OnProgress = Callable[[int, int, dict[str, Any]], None]
"""Called as (layers done, layers in all, what is known of the last one); `note` in it is a sentence for the user."""


@dataclass(frozen=True)
class RepairSettings:
    """How matrices are refitted."""

    target: Literal["local", "half"] = "half"
    """`local`: each part gives what the dense one gives on the same input; `half`: the mean of that and of what brings the
    stream back to the dense model's, errors of earlier layers included."""
    ridge: float = 1e-2
    """Relative to the mean of diag G; holds the matrix to the dense one."""
    rank: int = 0
    """Rank of the change, 0: whole."""
    output: bool = False
    """Refit the output projections of the attention, too: for plans that prune it."""
    memory: int = 4 * 2**30
    """Bytes of hidden states to keep in memory; if there are more, they go to a file."""


@dataclass(frozen=True)
class LayerRepair:
    """The refitted matrices of one decoder layer."""

    down: Refit
    output: Refit | None = None


def _sum_over_processes(sums: NormalEquations) -> None:
    for t in (sums.upper, sums.cross, sums.sums):
        distributed.all_reduce_(t)


def _own_blocks(count: int) -> list[int]:
    return list(distributed.rank_indices(count))


@contextmanager
def repaired(model: nn.Module, repairs: Sequence[LayerRepair | None]) -> Iterator[None]:
    """Inside the block refitted projections compute with their new matrices. With `masked` around it: the repaired model."""
    with ExitStack() as stack:
        for parts, layer in zip(layer_parts(model), repairs, strict=True):
            if layer is not None:
                stack.callback(with_weight(parts.down, layer.down.weight).remove)
            if layer is not None and layer.output is not None:
                stack.callback(with_weight(parts.o, layer.output.weight).remove)
        yield


@contextmanager
def _held(layer: nn.Module) -> Iterator[None]:
    """Inside the block the layer keeps its weights from one run to the next, also where accelerate drops them after each."""
    with materialized(layer):
        streamed, plain = layer.__dict__.get("forward"), layer.__dict__.get("_old_forward")
        try:
            if plain is not None:
                layer.__dict__["forward"] = plain
            yield
        finally:
            if plain is not None:
                layer.__dict__["forward"] = streamed


@torch.no_grad()
def layer_inputs(
    model: Any, ids: Int[Tensor, "b S"], real: Bool[Tensor, "b S"]
) -> tuple[Float[Tensor, "b S D"], list[dict[str, Any]]]:
    """What the model hands to its first layer, and the arguments beside it (masks, RoPE) that it hands to every layer.

    The model's own code runs, with layers that do nothing: whatever a family computes for its layers is right.
    """
    layers, first, handed = decoder_layers(model), list[Tensor](), list[dict[str, Any]]()

    def idle(hidden_states: Tensor, *_: Any, **kwargs: Any) -> Tensor:
        first[:] = first or [hidden_states]
        handed.append(kwargs)
        return hidden_states

    kept = [layer.__dict__.get("forward") for layer in layers]  # accelerate puts its own there
    try:
        for layer in layers:
            layer.__dict__["forward"] = idle
        mask = None if bool(real.all()) else real.long()
        model.model(input_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        for layer, own in zip(layers, kept, strict=True):
            if own is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = own
    return first[0], handed


class _Repairing:
    """Both streams of hidden states, and the pass of one layer over them.

    `dense` is the stream of the dense model, `converted` that of the masked model with the matrices refitted so far, each
    [B, S, D] for the blocks of this process.
    """

    def __init__(
        self, model: PreTrainedModel, masks: Sequence[LayerMasks], ids: Int[Tensor, "B S"], real: Bool[Tensor, "B S"],
        settings: RepairSettings, folder: Path | None,
    ):  # fmt: skip
        self.model, self.masks, self.settings = model, masks, settings
        self.layers, self.parts, self.shape = decoder_layers(model), layer_parts(model), shape_of(model)
        self.share, self.device = STREAM_SHARE[settings.target], model.device
        own = _own_blocks(len(ids))
        self.ids, self.real = ids[own].to(self.device), real[own].to(self.device)
        sizes = [self.shape.hidden_size] * (2 if self.share else 1) + [self.shape.mlp_size]
        spilled = self.ids.numel() * sum(sizes) * model.dtype.itemsize > settings.memory

        def store(name: str, size: int) -> Tensor:
            shape = (*self.ids.shape, size)
            if not (spilled and folder):
                return torch.empty(shape, dtype=model.dtype)
            path = str(folder / f"{name}.bin")
            return torch.from_file(path, shared=True, size=math.prod(shape), dtype=model.dtype).view(shape)

        self.converted = store("converted", self.shape.hidden_size)
        self.dense = store("dense", self.shape.hidden_size) if self.share else self.converted
        self.hidden = store("hidden", self.shape.mlp_size)  # of one layer
        rows = max(1, CHUNK_TOKENS // ids.shape[1])
        self.chunks = [slice(a, min(a + rows, len(own))) for a in range(0, len(own), rows)]
        for chunk in self.chunks:
            first, _ = layer_inputs(model, self.ids[chunk], self.real[chunk])
            for stream in (self.converted, self.dense):
                stream[chunk] = first.cpu()

    def run(
        self, i: int, chunk: slice, stream: Tensor, masked_too: bool, output: Refit | None = None
    ) -> dict[str, Tensor]:
        """Layer i on one chunk of a stream: its output, and what its parts took and gave, each [b, S, size]."""
        parts, seen = self.parts[i], dict[str, Tensor]()

        def took(name: str) -> Callable[..., None]:
            return lambda _, args: seen.update({name: args[0]})

        def gave(name: str) -> Callable[..., None]:
            return lambda _, __, y: seen.update({name: y})

        with ExitStack() as stack:
            stack.callback(parts.down.register_forward_pre_hook(took("whole h")).remove)
            if masked_too:
                stack.enter_context(masked(self.model, self.masks))
            if output is not None:
                stack.callback(with_weight(parts.o, output.weight).remove)
            for part, name in ((parts.down, "h"), (parts.o, "o")):
                stack.callback(part.register_forward_pre_hook(took(name)).remove)
            for part, name in ((parts.mlp, "mlp"), (parts.o, "attention")):
                stack.callback(part.register_forward_hook(gave(name)).remove)
            _, handed = layer_inputs(self.model, self.ids[chunk], self.real[chunk])
            out = self.layers[i](stream[chunk].to(self.device), **handed[i])
        seen["out"] = out[0] if isinstance(out, tuple) else out
        return seen

    def fit(
        self, part: Linear, i: int, size: int, take: Callable[[int, slice, NormalEquations], None],
        say: Callable[[str], None],
    ) -> Refit:  # fmt: skip
        """Refit one projection of layer i: `take` gives the equations what a chunk of tokens says."""
        sums = NormalEquations(size, self.shape.hidden_size, self.device)
        for chunk in self.chunks:
            take(i, chunk, sums)
        _sum_over_processes(sums)
        return refit(part.weight.detach(), sums, self.settings.ridge, self.settings.rank, say)

    def take_attention(self, i: int, chunk: slice, sums: NormalEquations) -> None:
        """Gap of the attention: to its dense self on the same input, or of the stream behind it."""
        real = self.real[chunk]
        x = self.converted[chunk].to(self.device)[real].float()
        ours = self.run(i, chunk, self.converted, True)
        given = ours["attention"][real].float()
        same_input = self.run(i, chunk, self.converted, False)["attention"][real].float()
        gap = (1 - self.share) * (same_input - given)
        if self.share:
            theirs = self.run(i, chunk, self.dense, False)["attention"][real].float()
            gap += self.share * (self.dense[chunk].to(self.device)[real].float() + theirs - x - given)
        sums.add(ours["o"][real], gap, x)

    def take_mlp(self, i: int, chunk: slice, sums: NormalEquations | None, output: Refit | None) -> None:
        """Gap of the MLP: what the masks took away, or of the stream behind the layer. Both streams go on.

        Without `sums` nothing is fitted: the streams go through a layer that is finished.
        """
        real, down = self.real[chunk], self.parts[i].down
        ours = self.run(i, chunk, self.converted, True, output)
        theirs = self.run(i, chunk, self.dense, False)["out"] if self.share else None
        if sums is not None:
            out = ours["out"][real].float()
            lost = F.linear(ours["whole h"] - ours["h"], down.weight)
            gap = (1 - self.share) * lost[real].float()
            if theirs is not None:
                gap += self.share * (theirs[real].float() - out)
            sums.add(ours["h"][real], gap, out - ours["mlp"][real].float())
        if theirs is not None:
            self.dense[chunk] = theirs.cpu()
        self.converted[chunk], self.hidden[chunk] = ours["out"].cpu(), ours["h"].cpu()

    @torch.no_grad()
    def layer(self, i: int, say: Callable[[str], None], finished: LayerRepair | None = None) -> LayerRepair:
        """Refit layer i, unless it is `finished`, and take both streams behind it."""
        with _held(self.layers[i]):
            made = self._refit(i, say) if finished is None else self._pass(i, finished)
            change = (made.down.weight - self.parts[i].down.weight).to(self.model.dtype)
            for chunk in self.chunks:  # what the change adds to the stream; the layer need not run again
                self.converted[chunk] += F.linear(self.hidden[chunk].to(self.device), change).cpu()
            return made

    def _refit(self, i: int, say: Callable[[str], None]) -> LayerRepair:
        parts, output = self.parts[i], None
        if self.settings.output:
            size = self.shape.num_heads * self.shape.head_dim
            output = self.fit(parts.o, i, size, self.take_attention, lambda said: say(f"its output projection: {said}"))

        def take(i: int, chunk: slice, sums: NormalEquations) -> None:
            self.take_mlp(i, chunk, sums, output)

        return LayerRepair(self.fit(parts.down, i, self.shape.mlp_size, take, say), output)

    def _pass(self, i: int, finished: LayerRepair) -> LayerRepair:
        for chunk in self.chunks:
            self.take_mlp(i, chunk, None, finished.output)
        return finished


def repair_layers(
    model: PreTrainedModel,
    masks: Sequence[LayerMasks],
    ids: Int[Tensor, "B S"],
    real: Bool[Tensor, "B S"],
    settings: RepairSettings = RepairSettings(),
    on_progress: OnProgress = lambda done, total, known: None,
    folder: Path | None = None,
    finished: Callable[[int], LayerRepair | None] = lambda i: None,
) -> Iterator[LayerRepair]:
    """Refit layer after layer to the masks, on calibration blocks; `real` is False on padding. The model stays as it is.

    `finished` gives layers that the same repair has refitted already: they are yielded as they are.

    In memory are one layer, its Gram matrix and hidden states as far as `settings.memory` allows; more of them go to a
    temporary file in `folder`. Several processes share the blocks out and all get the same matrices. Raises UserError where
    no token is real or activations are not finite.
    """
    if not bool(real.any()):
        raise UserError("there is no calibration text to refit to: every token is padding")
    # what is mapped stays readable without its name, and a kill leaves nothing behind
    with TemporaryDirectory(prefix="tomoe-repair-", dir=folder, ignore_cleanup_errors=True) as spill:
        repairing = _Repairing(model, masks, ids, real, settings, Path(spill))
    total = len(repairing.layers)
    for i in range(total):
        notes: list[str] = []
        made = repairing.layer(i, notes.append, finished(i))
        known: dict[str, Any] = {"error_before": made.down.error_before, "error_after": made.down.error_after}
        if notes:
            known["note"] = f"layer {i}: {'; '.join(notes)}"
        on_progress(i + 1, total, known)
        yield made


def repair(
    model: PreTrainedModel,
    masks: Sequence[LayerMasks],
    ids: Int[Tensor, "B S"],
    real: Bool[Tensor, "B S"],
    settings: RepairSettings = RepairSettings(),
    on_progress: OnProgress = lambda done, total, known: None,
    folder: Path | None = None,
) -> list[LayerRepair]:
    """All layers of `repair_layers` at once: float32 copies of all refitted matrices are in memory together."""
    return list(repair_layers(model, masks, ids, real, settings, on_progress, folder))
