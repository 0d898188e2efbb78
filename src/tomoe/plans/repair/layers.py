"""Closed-form repair: the down projection of each layer is refitted to the masks that the plan gives each token.

Layer by layer, on the already converted prefix. With the masked activations h_t [F] of token t, the gap g_t [D] between
what the layer should have given and what it gives, and w_t = 1 / |residual_t|^2, the change of W_down is the minimum of

    sum_t w_t |h_t Delta^T - g_t|^2 + ridge mean(diag G) |Delta|^2,      G = sum_t w_t h_t h_t^T  [F, F],

one Cholesky factorisation a layer. All experts share the one repaired matrix, so every export holds it and speed stays
what it was. The bias of the down projection stays too. Where V/O dims are pruned, the output projection of the
attention is refitted by the same equations before the MLP that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.errors import UserError
from tomoe.model.layerwise import held
from tomoe.model.mlp import WeightMatrix
from tomoe.plans.masking import LayerMasks
from tomoe.plans.repair.equations import FewTokens, NormalEquations, Refit, keeps_tokens, refit
from tomoe.plans.repair.streams import Streams

STREAM_SHARE = {"local": 0.0, "half": 0.5}

Equations = NormalEquations | FewTokens

OnProgress = Callable[[int, int, dict[str, Any]], None]
"""Called as (layers done, layers in all, what is known of the last one); `note` in it is a sentence for the user."""


@dataclass(frozen=True)
class RepairSettings:
    """How matrices are refitted."""

    target: Literal["local", "half"] = "half"
    """`local`: each part gives what the dense one gives on the same input; `half`: the mean of that and of what brings the
    stream back to the dense model's, errors of earlier layers included."""
    ridge: float = 1e-2  # relative to the mean of diag G; holds the matrix to the dense one
    rank: int = 0  # rank of the change, 0: full
    output: bool = False  # refit the output projections of the attention, too: for plans that prune it


@dataclass(frozen=True)
class LayerRepair:
    """The refitted matrices of one decoder layer."""

    down: Refit
    output: Refit | None = None

    def note(self, ridge: float) -> str:
        """Say which matrices took more than this ridge."""
        return "; ".join(
            f"{of}its Gram matrix is not positive definite with a ridge of {ridge:g}, taking {fit.ridge:g}"
            for of, fit in (("its output projection: ", self.output), ("", self.down))
            if fit is not None and fit.ridge != ridge
        )


class _Repairing:
    """Refits one layer after the other on both streams of hidden states."""

    def __init__(self, streams: Streams, settings: RepairSettings):
        self.streams, self.settings, self.share = streams, settings, STREAM_SHARE[settings.target]

    def _fit(self, part: WeightMatrix, size: int, take: Callable[[slice, Equations], None]) -> Refit:
        """Refit one projection; `take` adds a chunk of tokens to the equations."""
        sums = self._equations(size)
        for chunk in self.streams.chunks:
            take(chunk, sums)
        if isinstance(sums, NormalEquations):
            for t in (sums.upper, sums.cross, sums.sums):
                distributed.all_reduce_(t)
        return refit(part.weight.detach(), sums, self.settings.ridge, self.settings.rank)

    def _equations(self, size: int) -> Equations:
        """Make the equations for a matrix of `size` inputs."""
        streams = self.streams
        hidden, tokens = streams.shape.hidden_size, int(streams.real.sum())
        if keeps_tokens(tokens, size, self.settings.rank):
            return FewTokens(size, hidden, tokens, streams.device)
        return NormalEquations(size, hidden, streams.device)

    def _add_attention(self, i: int, chunk: slice, sums: Equations) -> None:
        """Add the gap of the attention: to its dense output on the same input, or of the stream after it."""
        streams = self.streams
        real = partial(streams.real_tokens, chunk)
        x_tD = real(streams.converted[chunk].to(streams.device)).float()
        ours = streams.run(i, chunk, streams.converted, True)
        given_tD = real(ours["attention"]).float()
        same_input_tD = real(streams.run(i, chunk, streams.converted, False)["attention"]).float()
        gap_tD = (1 - self.share) * (same_input_tD - given_tD)
        if self.share:
            theirs_tD = real(streams.run(i, chunk, streams.dense, False)["attention"]).float()
            dense_tD = real(streams.dense[chunk].to(streams.device)).float()
            gap_tD += self.share * (dense_tD + theirs_tD - x_tD - given_tD)
        sums.add(real(ours["o"]), gap_tD, x_tD)

    def _add_mlp(self, i: int, output: Refit | None, chunk: slice, sums: Equations | None) -> None:
        """Add the gap of the MLP: what the masks removed, or of the stream after the layer. Both streams advance; without `sums`
        the layer is finished."""
        streams = self.streams
        real = partial(streams.real_tokens, chunk)
        gain = streams.gain(i)
        ours = streams.run(i, chunk, streams.converted, True, None if output is None else output.weight)
        theirs = streams.run(i, chunk, streams.dense, False)["out"] if self.share else None
        # A gap of the stream says nothing of the MLP where a norm comes between.
        share = self.share if gain else 0.0
        if sums is not None:
            out_tD = real(ours["out"]).float()
            lost_bSD = F.linear(ours["dense h"] - ours["h"], streams.parts[i].mlp.down.weight)
            gap_tD = (1 - share) * real(lost_bSD).float()
            if share and theirs is not None:
                gap_tD += share / cast(float, gain) * (real(theirs).float() - out_tD)
            # the stream before the MLP added to it
            residual_tD = out_tD - (gain or 0.0) * real(ours["mlp"]).float()
            sums.add(real(ours["h"]), gap_tD, residual_tD)
        if theirs is not None:
            streams.dense[chunk] = theirs
        if gain:
            streams.converted[chunk] = ours["out"]
        streams.hidden[chunk] = ours["h"]

    @torch.no_grad()
    def layer(self, i: int, finished: LayerRepair | None) -> LayerRepair:
        """Refit layer i, unless it is `finished`, and advance both streams through it."""
        streams = self.streams
        with held(streams.layers[i]):
            made = finished or self._refit(i)
            if finished is not None:
                for chunk in streams.chunks:
                    self._add_mlp(i, finished.output, chunk, None)
            change = (made.down.weight - streams.parts[i].mlp.down.weight).to(streams.model.dtype)
            gain = streams.gain(i)
            for chunk in streams.chunks:
                if gain:
                    # What the change adds to the stream; the layer need not run again.
                    added = F.linear(streams.hidden[chunk].to(streams.device), change)
                    streams.converted[chunk] += (added if gain == 1 else gain * added).to(streams.converted.device)
                else:
                    output = None if made.output is None else made.output.weight
                    out = streams.run(i, chunk, streams.converted, True, output, made.down.weight)["out"]
                    streams.converted[chunk] = out
            return made

    def _refit(self, i: int) -> LayerRepair:
        s = self.streams.shape
        parts = self.streams.parts[i]
        output = None
        if self.settings.output:
            output = self._fit(parts.attention.o, s.num_heads * s.head_dim, partial(self._add_attention, i))
        return LayerRepair(self._fit(parts.mlp.down, s.mlp_size, partial(self._add_mlp, i, output)), output)


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

    In memory are one layer, its Gram matrix and hidden states, unless they take more than MEMORY bytes: then they go to a
    temporary file in `folder`. Several processes share the blocks out and all get the same matrices. Raises UserError where
    no token is real or activations are not finite.
    """
    if not bool(real.any()):
        raise UserError("there is no calibration text to refit to: every token is padding")
    # what is mapped stays readable without its name, and a kill leaves nothing behind
    with TemporaryDirectory(prefix="tomoe-repair-", dir=folder, ignore_cleanup_errors=True) as spill:
        streams = Streams(model, masks, ids, real, STREAM_SHARE[settings.target] > 0, settings.output, Path(spill))
    repairing = _Repairing(streams, settings)
    total = len(masks)
    done = 0
    for i in range(len(streams.layers)):
        if i not in streams.parts:
            streams.skip(i)
            continue
        made = repairing.layer(i, finished(done))
        done += 1
        known: dict[str, Any] = {"error_before": made.down.error_before, "error_after": made.down.error_after}
        if note := made.note(settings.ridge):
            known["note"] = f"layer {i}: {note}"
        on_progress(done, total, known)
        yield made
