"""Runs all sequences of a text through one decoder layer after the other: weights on disk are read once per text, not once per
sequence.

The family's own code makes what every layer is called with (masks, rotary embeddings) and what becomes of the last layer's
output; in between its layers run one by one, on hidden states that are kept.

Letters: b sequences that run together, S tokens of one, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.utils import align_module_device
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from tomoe.model.hooks import input_of
from tomoe.model.mlp import decoder_layers
from tomoe.model.running import replaced_forward

MEMORY = 4 * 2**30
"""Bytes of hidden states to keep in main memory; if there are more, they go to a file."""
PROBE = 2  # tokens that show what layers return

Handed = tuple[tuple[Any, ...], dict[str, Any]]
"""What a decoder layer is called with beside the hidden states: masks, RoPE, whatever the family hands over."""
Returned = list[tuple[Any, ...] | None]
"""What each layer returns beside the hidden states; None if it returns them alone and not in a tuple."""
Batch = tuple[Int[Tensor, "b S"], Bool[Tensor, "b S"]]


@contextmanager
def held(layer: nn.Module) -> Iterator[None]:
    """Inside the block the layer keeps its weights between runs, even if accelerate drops them after each."""
    with align_module_device(layer):
        streamed, plain = layer.__dict__.get("forward"), layer.__dict__.get("_old_forward")
        try:
            if plain is not None:
                layer.__dict__["forward"] = plain
            yield
        finally:
            if plain is not None:
                layer.__dict__["forward"] = streamed


def is_offloaded(model: nn.Module) -> bool:
    """Whether the model's layers read their weights each time they run."""
    # what wraps a model is measured, too
    return isinstance(model, PreTrainedModel) and any(hasattr(layer, "_hf_hook") for layer in decoder_layers(model))


@torch.no_grad()
def returned_by_layers(model: Any) -> Returned | None:
    """Return what the layers return, from a run of a few tokens in which one layer of each class runs; None if the decoder does
    more than pass each layer's output to the next, each once."""
    layers = decoder_layers(model)
    returned: Returned = []
    of_class: dict[type[nn.Module], tuple[Any, ...] | None] = {}
    last: list[Tensor] = []
    plain = True

    def note(i: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal plain
        hidden, kind = input_of(args, kwargs), type(layers[i])
        plain = plain and i == len(returned) and (not last or hidden is last[0])
        if kind not in of_class:
            out = run(*args, **kwargs)
            of_class[kind] = tuple(out[1:]) if isinstance(out, tuple | list) else None
        beside = of_class[kind]
        returned.append(beside)
        last[:] = [hidden]
        return hidden if beside is None else (hidden, *beside)

    with ExitStack() as stack:
        for i, layer in enumerate(layers):
            stack.enter_context(replaced_forward(layer, partial(note, i, layer.forward)))
        ids = torch.zeros(1, PROBE, dtype=torch.long, device=model.device)
        model.base_model(input_ids=ids, use_cache=False)
    return returned if plain and len(returned) == len(layers) else None


@contextmanager
def _idle_layers(
    model: Any,
    returned: Returned,
    given: Tensor | None = None,
    note: Callable[[Any, Any], None] = lambda args, kwargs: None,
) -> Iterator[None]:
    """Inside the block layers do nothing, except that the last one returns `given` if set; `note` receives the arguments of
    each."""
    layers = decoder_layers(model)

    def idle(i: int, *args: Any, **kwargs: Any) -> Any:
        note(args, kwargs)
        ends = given is not None and i == len(layers) - 1
        hidden = given if ends else input_of(args, kwargs)
        beside = returned[i]
        return hidden if beside is None else (hidden, *beside)

    with ExitStack() as stack:
        for i, layer in enumerate(layers):
            stack.enter_context(replaced_forward(layer, partial(idle, i)))
        yield


@torch.no_grad()
def layer_inputs(
    model: Any, ids: Int[Tensor, "b S"], real: Bool[Tensor, "b S"], returned: Returned
) -> tuple[Float[Tensor, "b S D"], list[Handed]]:
    """Return the first layer's input, and the other arguments of every layer: the model's own code runs, with idle layers."""
    first = list[Tensor]()
    handed = list[Handed]()

    def note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first[:] = first or [input_of(args, kwargs)]
        handed.append((args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}))

    with _idle_layers(model, returned, note=note):
        mask = None if bool(real.all()) else real.long().to(model.device)
        model.base_model(input_ids=ids.to(model.device), attention_mask=mask, use_cache=False)
    return first[0], handed


class _Shared:
    """Stores equal tensors of several batches once: masks and rotary embeddings of sequences of one length."""

    def __init__(self) -> None:
        self.latest: dict[tuple[torch.Size, torch.dtype, int], Tensor] = {}

    def handed(self, handed: list[Handed]) -> list[Handed]:
        known: dict[int, Tensor] = {}

        def share(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(share(part) for part in value)
            if not isinstance(value, Tensor):
                return value
            if id(value) not in known:
                # by the order in which a batch has them: sines after cosines
                key = (value.shape, value.dtype, len(known))
                same = self.latest.get(key)
                self.latest[key] = value if same is None or not torch.equal(same, value) else same
                known[id(value)] = self.latest[key]
            return known[id(value)]

        return [(share(args), {name: share(value) for name, value in kwargs.items()}) for args, kwargs in handed]


def kept_states(shapes: Sequence[Sequence[int]], dtype: torch.dtype, folder: Path | None) -> list[Tensor]:
    """Allocate hidden states of these shapes, in a file in `folder` if given and they exceed MEMORY."""
    sizes = [math.prod(shape) for shape in shapes]
    if folder is None or sum(sizes) * dtype.itemsize <= MEMORY:
        return [torch.empty(tuple(shape), dtype=dtype) for shape in shapes]
    whole = torch.from_file(str(folder / "states.bin"), shared=True, size=sum(sizes), dtype=dtype)
    return [part.view(tuple(shape)) for part, shape in zip(whole.split(sizes), shapes, strict=True)]


class LayerPass:
    """Batches of sequences after the last layer of a model: inside `with passed.ending(n)` the model's own forward pass of batch
    n uses the result without running a layer."""

    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        batches: Sequence[Batch],
        returned: Returned,
        on_layer: Callable[[int, int], object] = lambda done, total: None,
        on_batch: Callable[[int], object] = lambda batch: None,
    ):
        """Run all batches; `on_layer` is called as (layers done, all layers), `on_batch` after every batch in each layer."""
        self.model, self.returned = model, returned
        shared, handed = _Shared(), list[list[Handed]]()
        layers = decoder_layers(model)
        # what is mapped stays readable without its name, and a kill leaves nothing behind
        with TemporaryDirectory(prefix="tomoe-states-", ignore_cleanup_errors=True) as folder:
            self.states = list[Tensor | None]()
            for n, (ids, real) in enumerate(batches):
                first, own = layer_inputs(model, ids, real, returned)
                if n == 0:
                    shapes = [(*ids.shape, first.shape[-1]) for ids, _ in batches]
                    self.states = list(kept_states(shapes, first.dtype, Path(folder)))
                state = self.states[n]
                assert state is not None
                state.copy_(first)
                handed.append(shared.handed(own))
        for i, layer in enumerate(layers):
            with held(layer):
                for n, state in enumerate(self.states):
                    assert state is not None
                    args, kwargs = handed[n][i]
                    out = layer(state.to(model.device), *args, **kwargs)
                    state.copy_(out[0] if isinstance(out, tuple | list) else out)
                    on_batch(n)
            on_layer(i + 1, len(layers))

    @contextmanager
    def ending(self, batch: int) -> Iterator[None]:
        """Inside the block layers do nothing, and the last one returns the states of this batch."""
        state = self.states[batch]
        assert state is not None, "dropped"
        with _idle_layers(self.model, self.returned, state.to(self.model.device)):
            yield

    def drop(self, batch: int) -> None:
        """Free the memory of a batch."""
        self.states[batch] = None


def pass_offloaded(
    model: Any,
    batches: Sequence[Batch],
    on_layer: Callable[[int, int], object],
    on_batch: Callable[[int], object] = lambda batch: None,
) -> LayerPass | None:
    """Pass batches through a model that reads its layers each time they run; None for other models, and if the decoder does more
    than run its layers."""
    returned = returned_by_layers(model) if is_offloaded(model) else None
    return None if returned is None else LayerPass(model, batches, returned, on_layer, on_batch)


@contextmanager
def without_layers(model: Any) -> Iterator[None]:
    """Inside the block the layers of an offloaded model do nothing: for questions that do not depend on them."""
    returned = returned_by_layers(model) if is_offloaded(model) else None
    if returned is None:
        yield
        return
    with _idle_layers(model, returned):
        yield
