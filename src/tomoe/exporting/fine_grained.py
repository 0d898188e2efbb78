"""Fine-grained experts as separate ones of a stock class: no neuron is copied.

All layers get one width, one shared part and one number of experts per token. A layer that uses fewer experts than another
gets experts of zeros, which its router always chooses.

Letters: N experts, w width of an expert, D hidden size, F neurons of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tomoe.exporting.stock import padded
from tomoe.model.hooks import hooked, input_of
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP
from tomoe.target_rules import FINE_MULTIPLE

# Tokens that the reach of a router is measured on.
PROBE_TOKENS = 256
OVERLAPPING_PROBLEM = (
    "its experts share neurons (experts.form = overlapping), and it has a place for fine-grained ones only"
)


@dataclass(frozen=True)
class FineLayout:
    """Sizes that every layer of the export has, but for the first ones, which may be whole.

    width: w; shared: of the shared expert, a multiple of w; experts: N and those of zeros; top_k: experts of a token, those
    of zeros included; zeros: how many of them are of zeros in the layer that needs most, because it chooses fewest itself;
    whole: how many of the first layers use all experts, and are written as plain MLPs.
    """

    width: int
    shared: int
    experts: int
    top_k: int
    zeros: int
    whole: int


def fine_layout(moe: ToMoEForCausalLM, multiple: int | None = None) -> FineLayout:
    """One width, shared part and k for all layers, the smallest that hold each of them; w is a multiple of `multiple`."""
    multiple = multiple or FINE_MULTIPLE
    every: list[ToMoEMLP] = [layer.mlp for layer in moe.model.layers]
    # engines want at least one layer with experts
    whole = 0
    while whole < len(every) - 1 and experts_per_token(every[whole]) == every[whole].num_experts:
        whole += 1
    mlps = every[whole:]
    width = -(-max(mlp.expert_rows.shape[1] for mlp in mlps) // multiple) * multiple
    shared = max(1, -(-max(mlp.shared_size for mlp in mlps) // width)) * width
    chosen = [experts_per_token(mlp) for mlp in mlps]
    zeros = max(chosen) - min(chosen)
    # the stock router looks for the two best of a group
    return FineLayout(width, shared, max(2, mlps[0].num_experts + zeros), max(chosen), zeros, whole)


def experts_per_token(mlp: ToMoEMLP) -> int:
    """k of a layer with fine-grained experts."""
    assert mlp.top_k is not None
    return mlp.top_k


def layout_words(moe: ToMoEForCausalLM, layout: FineLayout) -> str:
    """The layout in words, "64 experts of 16 neurons, 16 for each token, and a shared one of 512 in each of 30 layers"."""
    zeros = f" ({layout.zeros} of zeros)" if layout.zeros else ""
    whole = f", {layout.whole} whole before them" if layout.whole else ""
    size = max(mlp.expert_rows.shape[1] for mlp in (layer.mlp for layer in moe.model.layers))
    filled = f" (filled up from {size:,})" if layout.width > size else ""
    return (
        f"{layout.experts} experts{zeros} of {layout.width:,} neurons{filled}, {layout.top_k} for each token, and a shared one "
        f"of {layout.shared:,} in each of {len(moe.model.layers) - layout.whole} layers{whole}"
    )


@torch.no_grad()
def router_reach(moe: ToMoEForCausalLM) -> list[float]:
    """The largest logit of each layer's router, without its bias, on some tokens of the vocabulary."""
    reach = [0.0] * len(moe.model.layers)

    def note(i: int, mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(mlp, ToMoEMLP)
        x = input_of(args, kwargs).flatten(0, -2).float()
        reach[i] = max(reach[i], float((x @ mlp.router.weight.float().t()).abs().max()))

    tokens = min(PROBE_TOKENS, int(moe.config.max_position_embeddings))
    ids = torch.linspace(0, moe.config.vocab_size - 1, tokens, device=moe.device).long()
    # in an order in which neighbors differ
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)).to(ids.device)
    with hooked(
        layer.mlp.register_forward_pre_hook(partial(note, i), with_kwargs=True)
        for i, layer in enumerate(moe.model.layers)
    ):
        moe(ids[order][None], use_cache=False)
    return reach


def whole_matrices(mlp: ToMoEMLP) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up [F, D] and down [D, F] of all neurons."""
    assert mlp.gate_proj is not None
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj.t().contiguous()


def expert_matrices(mlp: ToMoEMLP, layout: FineLayout, expert: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up [w, D] and down [D, w] of an expert (zeros beyond the last), or of the shared one if it is None."""
    assert mlp.gate_proj is not None
    width = layout.shared if expert is None else layout.width
    if expert is None:
        rows = torch.arange(mlp.shared_size, device=mlp.up_proj.device)
    else:
        rows = mlp.expert_rows[expert : expert + 1].flatten().long()
    gate, up = (padded(t[rows], width, 0) for t in (mlp.gate_proj, mlp.up_proj))
    return gate, up, padded(mlp.down_proj[rows].t(), width, 1)
