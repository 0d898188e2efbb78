"""Hooks on a model inside a `with` block, and the input that a decoder part was called with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Keep hooks inside a `with` block. If registering fails halfway, those already registered are removed, too."""
    with ExitStack() as registered:
        for handle in handles:
            registered.enter_context(handle)
        yield


def input_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states that a layer, MLP or attention was called with, by position or by name."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def own_rows(model: Any) -> RemovableHandle:
    """Copy the rows that become logits first, until removed (`with own_rows(model):`): for a slice, as `logits_to_keep=1` makes
    it, PyTorch on a CPU copies the complete output matrix, once per sequence."""
    return model.get_output_embeddings().register_forward_pre_hook(
        lambda _, args: (args[0].clone(memory_format=torch.contiguous_format), *args[1:])
    )
