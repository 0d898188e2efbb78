"""How big a model is: parameters in all, and those that work on one token. For dense models and MoEs alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from tomoe.budget import active_params, block_total
from tomoe.model.structure import ModelShape

_NUMBERED = re.compile(r"\.\d+\.")  # inside one of the repeated layers
_ROUTERS = re.compile(r"(\.router|\.mlp\.gate)\.")
_EXPERTS = ".experts."


class ModelFacts(TypedDict):
    """Counts of weights. A block parameter is a projection weight of attention or MLP, as in the paper's budget."""

    total_params: int  # stored, shared ones once
    active_params: int  # that work on one token: embeddings, norms, biases and routers in full
    block_params: int  # stored in the blocks
    active_block_params: int
    active_share: float | None  # active blocks against the blocks of the dense model; None where that is unknown
    bytes_on_disk: int | None
    max_positions: int | None  # tokens that the model is made for


def model_facts(model: nn.Module, path: Path | None = None) -> ModelFacts:
    """Read from the weights and, for a converted model, from the per-layer lists in its config."""
    total = sum(p.numel() for p in model.parameters())
    config: Any = getattr(model, "config", None)
    share: float | None
    if getattr(config, "expert_sizes", None) is None:
        block, active = _count_blocks(model)
        share = None if any(_EXPERTS in name for name, _ in model.named_parameters()) else 1.0
    else:
        shape = _dense_shape(model, config)
        stored = zip(config.union_sizes, config.qk_dims, config.value_dims, strict=True)
        working = zip(config.expert_sizes, config.qk_dims, config.value_top_k, strict=True)
        block, active = int(active_params(shape, stored)), int(active_params(shape, working))
        share = active / block_total(shape)
    return ModelFacts(
        total_params=total,
        active_params=total - block + active,
        block_params=block,
        active_block_params=active,
        active_share=share,
        bytes_on_disk=None if path is None else _bytes_on_disk(path),
        max_positions=getattr(config, "max_position_embeddings", None),
    )


def _dense_shape(model: Any, config: Any) -> ModelShape:
    """Sizes of the dense model that a converted one came from; its config keeps them."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        num_layers=len(config.expert_sizes),
        hidden_size=config.hidden_size,
        mlp_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        rotary_size=head_dim,  # no count depends on it
        gated=getattr(model.base_model.layers[0].mlp, "gate_proj", None) is not None,
    )


def _count_blocks(model: nn.Module) -> tuple[int, int]:
    """(stored, active) weights of two and more dims in the numbered layers; of stock experts, top-k are active."""
    config: Any = getattr(model, "config", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), 1)
    top_k = min(getattr(config, "num_experts_per_tok", None) or experts, experts)
    stored = active = 0
    for name, p in model.named_parameters():
        if p.dim() < 2 or not _NUMBERED.search(name) or _ROUTERS.search(name):
            continue
        stored += p.numel()
        active += p.numel() * top_k // experts if _EXPERTS in name else p.numel()
    return stored, active


def _bytes_on_disk(path: Path) -> int | None:
    """Of the weights: all .safetensors of a folder, or one file."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    sizes = [file.stat().st_size for file in files if file.is_file() and not file.name.startswith("plan.")]
    return sum(sizes) if sizes else None
