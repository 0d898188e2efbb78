"""Hidden states that a repair keeps between layers, and the pass of one layer over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.model.hooks import hooked
from tomoe.model.layerwise import MEMORY, Handed, held, layer_inputs, returned_by_layers
from tomoe.model.loading import free_on_device
from tomoe.model.mlp import decoder_layers, refuse
from tomoe.model.structure import layer_parts, shape_of
from tomoe.plans.masking import LayerMasks, mask_hooks, with_weight

CHUNK_TOKENS = 4096  # tokens that run through a layer at once
ADDITIVE = 2e-2  # relative error, in 16 bits too, up to which a layer adds what its MLP gives


class Streams:
    """Both streams of hidden states, each [B, S, D] for the blocks of this process.

    `dense` is that of the dense model, `converted` that of the masked model with the matrices refitted so far. Without `both`
    there is `converted` alone; with `attention`, `run` tells what output projections take and give, too.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        masks: Sequence[LayerMasks],
        ids: Int[Tensor, "B S"],
        real: Bool[Tensor, "B S"],
        both: bool,
        attention: bool,
        folder: Path | None,
    ):
        self.model, self.both, self.attention = model, both, attention
        self.layers, self.shape = decoder_layers(model), shape_of(model)
        self.parts = {parts.mlp.number: parts for parts in layer_parts(model)}
        self.masks = dict(zip(self.parts, masks, strict=True))
        self.device = model.device
        self.gains = dict[type[nn.Module], float | None]()
        own = list(distributed.rank_indices(len(ids)))
        self.ids, self.real = ids[own].to(self.device), real[own].to(self.device)
        self.padded = not bool(self.real.all())
        sizes = [self.shape.hidden_size] * (2 if both else 1) + [self.shape.mlp_size]
        total = self.ids.numel() * sum(sizes) * model.dtype.itemsize
        # The other half of a device is for a layer and its Gram matrix.
        place = self.device if total <= free_on_device(self.device) // 2 else torch.device("cpu")
        spilled = place.type == "cpu" and total > MEMORY
        pinned = place != self.device and self.device.type == "cuda"

        def store(name: str, size: int) -> Tensor:
            shape = (*self.ids.shape, size)
            if not (spilled and folder):
                return torch.empty(shape, dtype=model.dtype, device=place, pin_memory=pinned)
            path = str(folder / f"{name}.bin")
            return torch.from_file(path, shared=True, size=math.prod(shape), dtype=model.dtype).view(shape)

        self.converted = store("converted", self.shape.hidden_size)
        self.dense = store("dense", self.shape.hidden_size) if both else self.converted
        self.hidden = store("hidden", self.shape.mlp_size)  # of one layer
        rows = max(1, CHUNK_TOKENS // ids.shape[1])
        self.chunks = [slice(a, min(a + rows, len(own))) for a in range(0, len(own), rows)]
        # Of each stream by itself: some families keep in it what later layers read of earlier ones.
        self.handed: dict[tuple[int, bool], list[Handed]] = {}
        returned = returned_by_layers(model)
        if returned is None:
            raise refuse(model, "its decoder does more than to run one layer after the other", "repair")
        for chunk in self.chunks:
            for stream in (self.converted, self.dense):
                first, handed = layer_inputs(model, self.ids[chunk], self.real[chunk], returned)
                stream[chunk], self.handed[chunk.start, stream is self.converted] = first, handed

    def run(
        self,
        i: int,
        chunk: slice,
        stream: Tensor,
        masked_too: bool,
        output: Tensor | None = None,
        down: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run decoder layer i on one chunk of a stream: return its output, and inputs and outputs of its parts, each [b, S,
        size]; `output` and `down` replace its own matrices."""
        parts = self.parts.get(i)
        seen = dict[str, Tensor]()

        def took(name: str) -> Callable[..., None]:
            return lambda _, args: seen.update({name: args[0]})

        def gave(name: str) -> Callable[..., None]:
            return lambda _, __, y: seen.update({name: y})

        with ExitStack() as stack:
            if parts is not None:
                stack.callback(parts.mlp.down.register_forward_pre_hook(took("dense h")).remove)
                if masked_too:
                    stack.enter_context(hooked(mask_hooks(parts, self.masks[i])))
                if output is not None:
                    stack.callback(with_weight(parts.attention.o, output).remove)
                if down is not None:
                    stack.callback(with_weight(parts.mlp.down, down).remove)
                stack.callback(parts.mlp.down.register_forward_pre_hook(took("h")).remove)
                stack.callback(parts.mlp.down.register_forward_hook(gave("mlp")).remove)
                if self.attention:
                    stack.callback(parts.attention.o.register_forward_pre_hook(took("o")).remove)
                    stack.callback(parts.attention.o.register_forward_hook(gave("attention")).remove)
            args, kwargs = self.handed[chunk.start, stream is self.converted][i]
            out = self.layers[i](stream[chunk].to(self.device), *args, **kwargs)
        seen["out"] = out[0] if isinstance(out, tuple | list) else out
        # Some families flatten batch and sequence before the MLP.
        return {name: t.view(*seen["out"].shape[:2], -1) for name, t in seen.items()}

    def real_tokens(self, chunk: slice, x: Float[Tensor, "b S n"]) -> Float[Tensor, "t n"]:
        """Select the rows of real tokens of a chunk, without a copy if all are."""
        return x[self.real[chunk]] if self.padded else x.flatten(0, 1)

    def gain(self, i: int) -> float | None:
        """The factor by which a layer adds its MLP's output to the stream; None if it does more to it (a norm after it)."""
        # layers of one class are alike
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
        """The output of layer i on the first chunk if its MLP returned one constant."""
        with hooked([self.parts[i].mlp.down.register_forward_hook(lambda _, __, y: torch.full_like(y, float(value)))]):
            return self.run(i, self.chunks[0], self.converted, False)["out"].float()

    def skip(self, i: int) -> None:
        """Advance both streams through a layer that stays dense."""
        with held(self.layers[i]):
            for chunk in self.chunks:
                theirs = self.run(i, chunk, self.dense, False)["out"] if self.both else None
                self.converted[chunk] = self.run(i, chunk, self.converted, False)["out"]
                if theirs is not None:
                    self.dense[chunk] = theirs
