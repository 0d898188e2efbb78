"""Training by `torch.compile`: decoder layers, one at a time, so that one graph serves all; and functions of tensors.

Shapes are static, so sequences of one length meet one graph. What torch.compile traces has no shapes in its signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tomoe.model.hooks import hooked
from tomoe.model.mlp import named_layers

BACKEND = "inductor"  # of torch.compile: what makes code of a graph
_FUSING = ContextVar("fusing", default=False)
P = ParamSpec("P")
R = TypeVar("R")


def learning_input(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which embeddings have a gradient: a first layer whose input has none would need graphs of its own."""

    def learns(_: Any, __: tuple[Any, ...], embedded: Tensor) -> None:
        embedded.requires_grad_(torch.is_grad_enabled())

    return hooked([model.get_input_embeddings().register_forward_hook(learns)])


class CompiledLayers:
    """A model whose decoder layers run compiled inside a `with` block, and as they are outside of it."""

    def __init__(self, model: PreTrainedModel):
        self.calls: list[tuple[Any, Any]] = []
        for layer in named_layers(model)[1]:
            layer.compile(backend=BACKEND, dynamic=False)
            self.calls.append((layer, layer._compiled_call_impl))
        self.__exit__()

    def __enter__(self) -> None:
        for layer, call in self.calls:
            layer._compiled_call_impl = call

    def __exit__(self, *_: object) -> None:
        for layer, _call in self.calls:
            layer._compiled_call_impl = None


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is compiled, once for each shape of its arguments."""
    return torch.compile(function, backend=BACKEND, dynamic=False)


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of tensors: it runs compiled within `fusing`, as few calls of the device."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return (compiled(function) if _FUSING.get() else function)(*args, **kwargs)

    return run


@contextmanager
def fusing(on: bool) -> Iterator[None]:
    """Inside the block functions that are `fused` run compiled, if it is on."""
    before = _FUSING.set(on)
    try:
        yield
    finally:
        _FUSING.reset(before)


def asked(setting: bool | str, device: torch.device) -> bool:
    """Whether `train.compile` asks for it on a device: `auto` does on CUDA."""
    return device.type == "cuda" if setting == "auto" else bool(setting)
