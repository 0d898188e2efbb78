"""A converted model with everything active, on the backend that runs what its tokens choose.

Compared with the dense model it shows the effect of the kernel; compared with the model as it is, that of the choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tomoe.moe.kernels.inputs import InputsConv1D, InputsLinear, kernel_rows
from tomoe.moe.modeling_tomoe import BACKENDS, Choice, choices_of, choose_backend, few

ALL_INPUTS = "all inputs"
Changes = Sequence[tuple[Any, str, Any]]
"""(object, attribute, value)"""


def backends_of(model: Any, tokens: int) -> str:
    """Name the backends on which a converted model runs what this many tokens choose; "-" for other models."""
    if not hasattr(model.config, "tomoe_expert_backend"):
        return "-"
    with torch.no_grad():
        chosen = [
            _backend(projection, choice, _like(model, tokens, choice.norms.numel()))
            for choice, projections in model.choices()
            for projection in projections
        ]
        chosen += [choose_backend(mlp, _like(model, tokens, mlp.up_proj.shape[1])) for mlp in model.mlps()]
    return ", ".join(dict.fromkeys(chosen))


def _backend(projection: Any, choice: Choice, x: torch.Tensor) -> str:
    if not choice.applies(x) and not few(x):
        return ALL_INPUTS
    reads_columns = isinstance(projection, InputsLinear | InputsConv1D) and kernel_rows(projection, x) is not None
    return "native" if reads_columns else "masked"


def _like(model: Any, tokens: int, width: int) -> torch.Tensor:
    return torch.empty(tokens, width, dtype=model.dtype, device=model.device)


def run_everything(model: Any, backend: str) -> Changes | None:
    """Return what to set (`set_to`) so that the model runs all experts, or all inputs, on this backend (`backends_of`); None if
    tokens choose nothing, or the layers use several."""
    if choices_of(model):
        return None if backend == ALL_INPUTS else [(model.config, "tomoe_active", 1.0)]
    if backend not in BACKENDS["experts"]:
        return None
    config = model.config
    mlps = model.mlps()
    changes: list[tuple[Any, str, Any]] = [(config, "tomoe_expert_backend", backend)]
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
