"""A converted model with everything in place of what tokens choose, by the same kernel.

Beside the dense model it shows what the kernel gives, beside the model as it is what the choice gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tomoe.moe.modeling_tomoe import FEW_TOKENS, WAYS, choices_of, choose, choose_backend

ALL_INPUTS = "all inputs"
Changes = Sequence[tuple[Any, str, Any]]
"""(object, attribute, value)"""


def ways(model: Any, tokens: int) -> str:
    """Names of the ways in which a converted model runs what so many tokens at once choose; "-" for any other model."""
    if not hasattr(model.config, "tomoe_expert_backend"):
        return "-"
    choices = choices_of(model)
    with torch.no_grad():
        if choices and tokens > FEW_TOKENS:
            return ALL_INPUTS
        chosen = [
            choose("choosing product", projection, _like(model, tokens, choice.width))
            for choice in choices
            for projection in choice.projections
        ]
        chosen += [choose_backend(mlp, _like(model, tokens, mlp.up_proj.shape[1])) for mlp in model.mlps()]
    return ", ".join(dict.fromkeys(chosen))


def _like(model: Any, tokens: int, width: int) -> torch.Tensor:
    return torch.empty(tokens, width, dtype=model.dtype, device=model.device)


def everything(model: Any, way: str) -> Changes | None:
    """What to set (`set_to`), so that the model runs all experts, or all inputs, in the way that `ways` names; None if tokens
    choose nothing, or not all layers run in one way."""
    if choices := choices_of(model):
        return None if way == ALL_INPUTS else [(choice, "instead", choice.width) for choice in choices]
    if way not in WAYS["experts"]:
        return None
    config = model.config
    mlps = model.mlps()
    changes: list[tuple[Any, str, Any]] = [(config, "tomoe_expert_backend", way)]
    # What an MLP keeps is kept for both, so that no timed run makes it again.
    changes += [(mlp, "_cache", {}) for mlp in mlps]
    if config.tomoe_expert_form == "fine":
        return [*changes, (config, config.top_k_key, config.tomoe_num_experts)]
    for mlp in mlps:
        rows = torch.arange(len(mlp.up_proj), dtype=torch.int32, device=mlp.up_proj.device)
        changes.append((mlp, "expert_neurons", rows.repeat(mlp.num_experts, 1)))
    return changes


@contextmanager
def set_to(changes: Changes) -> Iterator[None]:
    """Inside the block the attributes have these values."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
