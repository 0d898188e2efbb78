"""Runs a model as its family does: final hidden states, and the logits that the family makes of them.

Shapes: B sequences, S tokens of one, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from tomoe.model.hooks import hooked
from tomoe.model.mlp import decoder_of


def run_model(
    model: PreTrainedModel, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"] | None, every_logit: bool = False
) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B s V"]]:
    """Return final hidden states, and logits of all tokens if `every_logit` is set, else of none or few (s < S). The complete
    model runs, because only that gathers the weights of a sharded one; without padding no mask is passed, for faster
    attention."""
    hidden: list[Tensor] = []
    attention_mask = None if mask is None or bool(mask.all()) else mask.long()
    options: dict[str, Any] = {}
    # Not 1: for a single token the CPU copies the whole output matrix first, a twentieth of a training step.
    if not every_logit and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = ids.new_empty(0)
    with hooked([decoder_of(model).register_forward_hook(lambda _, __, out: hidden.append(out[0]))]):
        out = model(input_ids=ids, attention_mask=attention_mask, use_cache=False, return_dict=True, **options)
    return hidden[0], out.logits


def hidden_states(
    model: PreTrainedModel, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"] | None
) -> Float[Tensor, "T D"]:
    """Return final hidden states, flattened over tokens; without a mask no token is padding."""
    return run_model(model, ids, mask)[0].flatten(0, 1)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside the block `module` runs another function; one that accelerate installed is restored afterwards."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


class StatesOnly(BaseModelOutputWithPast):
    """The output of a decoder; any other field that a family's causal model reads is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def family_head(model: PreTrainedModel) -> Callable[[Float[Tensor, "T D"]], Float[Tensor, "T V"]]:
    """Compute logits from final hidden states by the family's own code (output matrix, scales, soft caps): the causal language
    model runs on a decoder that only returns the states."""

    def head(hidden: Float[Tensor, "T D"]) -> Float[Tensor, "T V"]:
        def decoder(*_: Any, **__: Any) -> BaseModelOutputWithPast:
            return StatesOnly(last_hidden_state=hidden[None])

        with replaced_forward(decoder_of(model), decoder):
            out = model(input_ids=hidden.new_zeros(1, len(hidden)).long(), use_cache=False, return_dict=True)
        logits: Tensor = out.logits
        return logits[0]

    return head
