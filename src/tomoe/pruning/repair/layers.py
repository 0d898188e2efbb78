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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.errors import UserError
from tomoe.model.hooks import hooked, input_of
from tomoe.model.mlp import Linear, decoder_layers
from tomoe.model.offload import materialized
from tomoe.model.running import replaced_forward
from tomoe.model.structure import layer_parts, shape_of
from tomoe.pruning.masking import LayerMasks, masked, with_weight
from tomoe.pruning.repair.equations import NormalEquations, Refit, refit

CHUNK_TOKENS = 4096  # that run through a layer at once
ADDITIVE = 2e-2  # relative error, in 16 bits too, up to which a layer adds what its MLP gives
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


@dataclass(frozen=True)
class Handed:
    """What a decoder layer is called with beside the hidden states: masks, RoPE, whatever the family hands over."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@torch.no_grad()
def layer_inputs(
    model: PreTrainedModel, ids: Int[Tensor, "b S"], real: Bool[Tensor, "b S"]
) -> tuple[Float[Tensor, "b S D"], list[Handed]]:
    """What the model hands to its first layer, and what it hands to every layer beside the hidden states.

    The model's own code runs, with layers that do nothing: whatever a family computes for its layers is right.
    """
    layers, first, handed = decoder_layers(model), list[Tensor](), list[Handed]()
    extra = _returned_beside(model, ids[:1, :2])

    def idle(i: int, *args: Any, **kwargs: Any) -> Any:
        hidden = input_of(args, kwargs)
        first[:] = first or [hidden]
        handed.append(Handed(args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}))
        beside = extra[i]
        return hidden if beside is None else (hidden, *beside)

    with ExitStack() as stack:
        for i, layer in enumerate(layers):
            stack.enter_context(replaced_forward(layer, partial(idle, i)))
        mask = None if bool(real.all()) else real.long()
        model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    return first[0], handed


def _returned_beside(model: PreTrainedModel, ids: Int[Tensor, "b s"]) -> list[tuple[Any, ...] | None]:
    """What each layer returns beside the hidden states; None if it returns them alone and not in a tuple."""
    seen: list[tuple[Any, ...] | None] = []

    def note(_: nn.Module, __: Any, out: Any) -> None:
        seen.append(tuple(out[1:]) if isinstance(out, tuple | list) else None)

    with hooked(layer.register_forward_hook(note) for layer in decoder_layers(model)):
        model.base_model(input_ids=ids, use_cache=False)
    return seen


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
        self.layers, self.shape = decoder_layers(model), shape_of(model)
        self.parts = {parts.of_mlp.number: parts for parts in layer_parts(model)}
        self.share, self.device = STREAM_SHARE[settings.target], model.device
        self.gains = dict[type[nn.Module], float | None]()
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
        # Of each stream by itself: some families keep in it what later layers read of earlier ones.
        self.handed: dict[tuple[int, bool], list[Handed]] = {}
        for chunk in self.chunks:
            for stream in (self.converted, self.dense):
                first, handed = layer_inputs(model, self.ids[chunk], self.real[chunk])
                stream[chunk], self.handed[chunk.start, stream is self.converted] = first.cpu(), handed

    def run(
        self, i: int, chunk: slice, stream: Tensor, masked_too: bool, output: Refit | None = None,
        down: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Decoder layer i on one chunk of a stream: its output, and what its parts took and gave, each [b, S, size].

        `output`, `down`: matrices instead of the model's own.
        """
        parts, seen = self.parts.get(i), dict[str, Tensor]()

        def took(name: str) -> Callable[..., None]:
            return lambda _, args: seen.update({name: args[0]})

        def gave(name: str) -> Callable[..., None]:
            return lambda _, __, y: seen.update({name: y})

        with ExitStack() as stack:
            if parts is not None:
                stack.callback(parts.down.register_forward_pre_hook(took("whole h")).remove)
            if masked_too:
                stack.enter_context(masked(self.model, self.masks))
            if parts is not None:
                if output is not None:
                    stack.callback(with_weight(parts.o, output.weight).remove)
                if down is not None:
                    stack.callback(with_weight(parts.down, down).remove)
                stack.callback(parts.down.register_forward_pre_hook(took("h")).remove)
                stack.callback(parts.down.register_forward_hook(gave("mlp")).remove)
                if self.settings.output:
                    stack.callback(parts.o.register_forward_pre_hook(took("o")).remove)
                    stack.callback(parts.o.register_forward_hook(gave("attention")).remove)
            handed = self.handed[chunk.start, stream is self.converted][i]
            out = self.layers[i](stream[chunk].to(self.device), *handed.args, **handed.kwargs)
        seen["out"] = out[0] if isinstance(out, tuple | list) else out
        # Some families flatten batch and sequence before the MLP.
        return {name: t.view(*seen["out"].shape[:2], -1) for name, t in seen.items()}

    def gain(self, i: int) -> float | None:
        """How many times a layer adds what its MLP gives to the stream; None if it does more to it (a norm behind it).

        Layers of one class are alike.
        """
        kind = type(self.layers[i])
        if kind not in self.gains:
            # Much larger than the stream, so that rounding to 16 bits hides nothing.
            given = 4 * self.converted[self.chunks[0]].abs().amax().to(self.device)
            nothing, once, twice = (self._out_of_mlp_output(i, times * given) for times in (0, 1, 2))
            ratio = float((once - nothing).mean() / given)
            alike = all(
                float((out - nothing - times * ratio * given).abs().amax()) <= ADDITIVE * abs(times * ratio * given)
                for times, out in ((1, once), (2, twice))
            )
            self.gains[kind] = (1.0 if abs(ratio - 1) < ADDITIVE else ratio) if alike and ratio else None
        return self.gains[kind]

    def _out_of_mlp_output(self, i: int, value: Tensor) -> Float[Tensor, "b S D"]:
        """The output of layer i on the first chunk if its MLP gave one number everywhere."""
        with hooked([self.parts[i].down.register_forward_hook(lambda _, __, y: torch.full_like(y, float(value)))]):
            return self.run(i, self.chunks[0], self.converted, False)["out"].float()

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
        real, down, gain = self.real[chunk], self.parts[i].down, self.gain(i)
        ours = self.run(i, chunk, self.converted, True, output)
        theirs = self.run(i, chunk, self.dense, False)["out"] if self.share else None
        # A gap of the stream says nothing of the MLP where a norm comes between.
        share = self.share if gain else 0.0
        if sums is not None:
            out = ours["out"][real].float()
            lost = F.linear(ours["whole h"] - ours["h"], down.weight)
            gap = (1 - share) * lost[real].float()
            if share and theirs is not None:
                gap += share / cast(float, gain) * (theirs[real].float() - out)
            sums.add(ours["h"][real], gap, out - (gain or 0.0) * ours["mlp"][real].float())
        if theirs is not None:
            self.dense[chunk] = theirs.cpu()
        if gain:
            self.converted[chunk] = ours["out"].cpu()
        self.hidden[chunk] = ours["h"].cpu()

    def skip(self, i: int) -> None:
        """Take both streams through a layer that stays whole."""
        with _held(self.layers[i]):
            for chunk in self.chunks:
                theirs = self.run(i, chunk, self.dense, False)["out"] if self.share else None
                self.converted[chunk] = self.run(i, chunk, self.converted, False)["out"].cpu()
                if theirs is not None:
                    self.dense[chunk] = theirs.cpu()

    @torch.no_grad()
    def layer(self, i: int, say: Callable[[str], None], finished: LayerRepair | None = None) -> LayerRepair:
        """Refit layer i, unless it is `finished`, and take both streams behind it."""
        with _held(self.layers[i]):
            made = self._refit(i, say) if finished is None else self._pass(i, finished)
            change = (made.down.weight - self.parts[i].down.weight).to(self.model.dtype)
            gain = self.gain(i)
            for chunk in self.chunks:
                if gain:
                    # What the change adds to the stream; the layer need not run again.
                    added = F.linear(self.hidden[chunk].to(self.device), change)
                    self.converted[chunk] += (added if gain == 1 else gain * added).cpu()
                else:
                    out = self.run(i, chunk, self.converted, True, made.output, made.down.weight)["out"]
                    self.converted[chunk] = out.cpu()
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
    total, done = len(masks), 0
    for i in range(len(repairing.layers)):
        if i not in repairing.parts:
            repairing.skip(i)
            continue
        notes: list[str] = []
        made = repairing.layer(i, notes.append, finished(done))
        done += 1
        known: dict[str, Any] = {"error_before": made.down.error_before, "error_after": made.down.error_after}
        if notes:
            known["note"] = f"layer {i}: {'; '.join(notes)}"
        on_progress(done, total, known)
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
