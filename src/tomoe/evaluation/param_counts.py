"""Count a model's parameters, dense or MoE: all of them, and those active for one token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from tomoe.budget import active_fraction, active_params, decoder_params
from tomoe.evaluation.results import ModelFacts
from tomoe.model.shape import max_positions
from tomoe.moe.active_experts import active_widths, dense_shape, routers_of, stored_widths
from tomoe.moe.modeling_tomoe import ToMoEConfig

_NUMBERED = re.compile(r"\.\d+\.")  # inside one of the repeated layers
_EXPERTS = ".experts."


def model_facts(model: nn.Module, path: Path | None = None) -> ModelFacts:
    """Count a model's weights; of fine-grained experts or inputs, as many are active as tokens use now. `path`: its file."""
    total = sum(p.numel() for p in model.parameters())
    config: Any = getattr(model, "config", None)
    share: float | None
    if not isinstance(config, ToMoEConfig):
        stored, active = _count_decoder(model)
        share = None if any(_EXPERTS in name for name, _ in model.named_parameters()) else 1.0
    else:
        shape = dense_shape(config)
        if config.chooses_inputs:
            stored = decoder_params(shape)
            share = config.tomoe_active
        else:
            routers = routers_of(config, shape)
            stored = int(active_params(shape, stored_widths(config, shape))) + routers
            share = active_fraction(shape, active_widths(config, shape), routers)
        active = round(share * decoder_params(shape))
    return ModelFacts(
        total_params=total,
        active_params=total - stored + active,
        block_params=stored,
        active_block_params=active,
        active_share=share,
        bytes_on_disk=None if path is None else _bytes_on_disk(path),
        max_positions=max_positions(config),
    )


def _count_decoder(model: nn.Module) -> tuple[int, int]:
    """Count (stored, active) weights of two or more dims in the numbered layers, routers included; of stock experts, top-k are
    active."""
    config: Any = getattr(model, "config", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), 1)
    top_k = min(getattr(config, "num_experts_per_tok", None) or experts, experts)
    stored = active = 0
    for name, p in model.named_parameters():
        if p.dim() < 2 or not _NUMBERED.search(name):
            continue
        stored += p.numel()
        active += p.numel() * top_k // experts if _EXPERTS in name else p.numel()
    return stored, active


def _bytes_on_disk(path: Path) -> int | None:
    """Size of the weights: all .safetensors of a folder, or one file."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    sizes = [file.stat().st_size for file in files if file.is_file() and not file.name.startswith("plan.")]
    return sum(sizes) if sizes else None
