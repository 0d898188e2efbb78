"""Tokens that test what a short text does not reach: beyond sliding windows, and beyond the original context.

Letters: S tokens, t of them compared, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tomoe.model.hooks import hooked
from tomoe.model.mlp import decoder_layers, decoder_of, named_layers
from tomoe.model.shape import max_positions, text_config

BEHIND = 32  # tokens behind the edge of a window or of the original context
MAX_WINDOW = 2**13  # windows that are tried: the masks of longer ones take gigabytes
# Operations for which all layers run, seconds on a laptop; otherwise the first ones, each kind of layer among them.
PROBE_OPERATIONS = 10**12


@dataclass(frozen=True)
class FarTokens:
    """Random tokens at some positions, to run through the first layers."""

    what: str
    ids: Int[Tensor, "1 S"]
    positions: Int[Tensor, "1 S"]
    layers: int

    @torch.no_grad()
    def run(self, model: Any) -> Float[Tensor, "t V"]:
        """Return the logits of the last tokens, on the CPU."""
        device = next(model.parameters()).device
        arguments: dict[str, Any] = {"input_ids": self.ids.to(device), "use_cache": False}
        # not where tokens have no positions
        if "position_ids" in inspect.signature(model.forward).parameters:
            arguments["position_ids"] = self.positions.to(device)
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            arguments["logits_to_keep"] = BEHIND
        with first_layers(model, self.layers):
            logits: Tensor = model(**arguments).logits
        return logits[0, -BEHIND:].cpu()


def near_tokens(model: Any) -> FarTokens:
    """A few tokens from the first position, for all layers."""
    return _drawn("on its first tokens", text_config(model.config), 0, 2 * BEHIND, len(decoder_layers(model)))


def far_tokens(model: Any) -> list[FarTokens]:
    """Return what to test a model on: one run for each of its limits."""
    config = text_config(model.config)
    layers = decoder_layers(model)
    found = []
    for window in sorted(windows(config)):
        size = sum(p.numel() for p in layers.parameters())
        affordable = len(layers) * PROBE_OPERATIONS // (2 * size * (window + BEHIND))
        kinds = list(getattr(config, "layer_types", None) or ["one kind"])[: len(layers)]
        of_all_kinds = max(kinds.index(kind) for kind in set(kinds)) + 1
        count = min(len(layers), max(affordable, of_all_kinds))
        found.append(_drawn(f"beyond the window of {window:,} tokens", config, 0, window + BEHIND, count))
    context = original_context(config)
    if context is not None:
        what = f"beyond the original context of {context:,} tokens"
        found.append(_drawn(what, config, context, 2 * BEHIND, len(layers)))
    return found


def _drawn(what: str, config: PreTrainedConfig, start: int, count: int, layers: int) -> FarTokens:
    ids = torch.randint(config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
    return FarTokens(what, ids, torch.arange(start, start + count)[None], layers)


def windows(config: PreTrainedConfig) -> set[int]:
    """Return the sliding windows of the layers, by the config, as far as they are worth a run."""
    found = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    longest = min(MAX_WINDOW, (max_positions(config) or MAX_WINDOW) - BEHIND)
    return {w for w in found if isinstance(w, int) and 0 < w <= longest}


def original_context(config: PreTrainedConfig) -> int | None:
    """Return the position at which rotary embeddings or scales change, if longer contexts are allowed."""
    rope = getattr(config, "rope_parameters", None) or {}
    # one for all layers, or one for each kind of them
    parameters = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    found = [p.get("original_max_position_embeddings") for p in parameters]
    found.append(getattr(config, "original_max_position_embeddings", None))
    positions = max_positions(config) or MAX_WINDOW
    contexts = [c for c in found if isinstance(c, int) and c + 2 * BEHIND <= positions]
    # it scales as soon as a text is longer than all that the config allows
    if any(p.get("rope_type") == "dynamic" for p in parameters):
        contexts.append(positions)
    return max(contexts, default=None)


@contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """Inside the block the model has only this many decoder layers."""
    path, layers = named_layers(model)
    parent, name = decoder_of(model), path.rpartition(".")[2]
    setattr(parent, name, nn.ModuleList(list(layers)[:count]))
    try:
        yield
    finally:
        setattr(parent, name, layers)


@torch.no_grad()
def layer_outputs(model: Any, ids: Int[Tensor, "1 S"]) -> list[Float[Tensor, "S _"]]:
    """Return the outputs of every decoder layer for some tokens, on the CPU."""
    outputs: list[Tensor] = []

    def note(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
        outputs.append((out[0] if isinstance(out, tuple) else out)[0].float().cpu())

    with hooked(layer.register_forward_hook(note) for layer in decoder_layers(model)):
        model(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    return outputs


def first_difference(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> str:
    """Name the first layer whose outputs differ, and how much relative to their size."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not (a - b).norm() <= tolerance * a.norm():
            return f"layer {i} is the first to differ"
    return "no layer differs, so it is the output matrix or what is done before it"
