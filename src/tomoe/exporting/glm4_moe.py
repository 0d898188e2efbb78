"""Fine-grained experts as a Glm4Moe, which transformers, vLLM and llama.cpp know: no neuron is copied.

A converted model chooses the k experts with the largest z + b, where z = W x, and adds their outputs. Glm4Moe chooses the
k largest s + c, where s = sigmoid(u x) and c is a correction that only the choice sees, and adds r s times the outputs; all
of it in float32. Stored are

    u = eps W,    c = eps b / 4,    r = 2.

With |z| <= Z:

- The weight of an expert is 2 sigmoid(eps z) = 1 + tanh(eps z / 2), off by at most eps Z / 2.
- s + c = 1/2 + eps (z + b) / 4 up to the cubic term of the sigmoid, (eps Z)^3 / 48, and to rounding: numbers in [1/2, 1) are
  2^-24 apart, and sigmoid and sum round by at most two of that. Two experts keep their order if their z + b differ by
  more than 4 (2 x 2 x 2^-24) / eps = 2^-20 / eps.

A smaller eps makes the weights better and the order worse. Relative to Z the two errors, eps Z / 2 and 2^-20 / (eps Z), are
equal at eps Z = 2^-9.5: below 2^-10 both, half of what bfloat16 rounds off a weight. There the cubic term is 2^-34, less than
the rounding. eps is the power of two next below, one for each layer, so that bfloat16 routers lose nothing by it.

Letters: N experts, w width of an expert, S shared neurons, D hidden size, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from tomoe.exporting.stock import (
    STOCK_ARCHS,
    attention_tensors,
    check_rotary,
    kept_values,
    padded,
)
from tomoe.model.hooks import hooked, input_of
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP, route
from tomoe.recipe.conversion import FINE_MULTIPLE

ARCH = STOCK_ARCHS["glm4_moe"]
# eps Z at which the error of the weights is that of the order.
BALANCED_REACH = 2.0**-9.5
# r: undoes the 1/2 that a sigmoid has at 0.
ROUTED_SCALE = 2.0
# Tokens that Z is measured on.
PROBE_TOKENS = 256
# Corrections of experts of zeros that fill up a layer: chosen before all others, or after all others. Scores are within
# [0, 1], and no other correction comes near 1.
FIRST, LAST = 1.0, -1.0


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


def make_layout(moe: ToMoEForCausalLM, multiple: int = FINE_MULTIPLE) -> FineLayout:
    """One width, shared part and k for all layers, the smallest that hold each of them; w is a multiple of `multiple`."""
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


def glm4_config(moe: ToMoEForCausalLM, layout: FineLayout) -> PreTrainedConfig:
    """The config of the export. Output matrices are never tied: vLLM's class does not tie them."""
    attention: Any = moe.model.layers[0].self_attn
    kept = kept_values(moe, ARCH) | {
        "rope_parameters": dict(moe.config.rope_parameters) | {"partial_rotary_factor": 1.0},
        "tie_word_embeddings": False,
        "attention_bias": attention.q_proj.bias is not None,
        "use_qk_norm": attention.q_norm is not None,
        "n_routed_experts": layout.experts,
        "num_experts_per_tok": layout.top_k,
        "n_shared_experts": layout.shared // layout.width,
        "moe_intermediate_size": layout.width,
        "routed_scaling_factor": ROUTED_SCALE,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": layout.whole,
        "num_nextn_predict_layers": 0,
    }
    config: PreTrainedConfig = ARCH.config_class(**kept)
    config.dtype = moe.dtype
    check_rotary(moe, config)
    return config


@torch.no_grad()
def router_scales(moe: ToMoEForCausalLM) -> list[float]:
    """eps of every layer, for the largest logit Z (without the bias) on some tokens of the vocabulary."""
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
    return [router_scale(z) for z in reach]


def router_scale(reach: float) -> float:
    """The largest power of two eps with eps Z <= 2^-9.5; 1 for a router of zeros."""
    return 2.0 ** math.floor(math.log2(BALANCED_REACH / reach)) if reach else 1.0


def router_tensors(mlp: ToMoEMLP, layout: FineLayout, eps: float) -> tuple[Float[Tensor, "n D"], Float[Tensor, " n"]]:
    """u and c in float32, those of experts of zeros behind the others: as many as are missing to k come first."""
    needed = layout.top_k - experts_per_token(mlp)
    fillers = layout.experts - mlp.num_experts
    bias = mlp.router.bias.float()
    corrections = bias.new_full((fillers,), LAST)
    corrections[:needed] = FIRST
    return padded(eps * mlp.router.weight.float(), layout.experts, 0), torch.cat([eps / 4 * bias, corrections])


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


def mlp_tensors(mlp: ToMoEMLP, layout: FineLayout, eps: float) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every tensor of a layer's MoE."""
    weight, corrections = router_tensors(mlp, layout, eps)
    yield "gate.weight", weight
    yield "gate.e_score_correction_bias", corrections
    for expert in (None, *range(layout.experts)):
        place = "shared_experts" if expert is None else f"experts.{expert}"
        matrices = expert_matrices(mlp, layout, expert)
        yield from ((f"{place}.{name}.weight", t) for name, t in zip(ARCH.expert_names, matrices, strict=True))


@torch.no_grad()
def glm4_tensors(moe: ToMoEForCausalLM, layout: FineLayout) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every tensor of the checkpoint, one at a time. Routers are float32 in any checkpoint."""
    inner: Any = moe.model
    scales = router_scales(moe)
    yield "model.embed_tokens.weight", inner.embed_tokens.weight
    for i, (layer, eps) in enumerate(zip(inner.layers, scales, strict=True)):
        prefix = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", getattr(layer, name).weight
        for name, t in attention_tensors(layer.self_attn).items():
            yield f"{prefix}self_attn.{name}", t
        if i < layout.whole:
            matrices = zip(ARCH.expert_names, whole_matrices(layer.mlp), strict=True)
            yield from ((f"{prefix}mlp.{name}.weight", t) for name, t in matrices)
        else:
            yield from ((f"{prefix}mlp.{name}", t) for name, t in mlp_tensors(layer.mlp, layout, eps))
    yield "model.norm.weight", inner.norm.weight
    # a tensor of its own: two names of one are refused by safetensors
    yield "lm_head.weight", moe.lm_head.weight.clone()


StockRouter = tuple[Float[Tensor, "n D"], Float[Tensor, " n"]]
"""u and c of a layer."""


def stock_routers(exported: Any) -> dict[int, StockRouter]:
    """The routers of an export, as transformers loaded it, by number of the layer."""
    gates = {i: getattr(layer.mlp, "gate", None) for i, layer in enumerate(exported.model.layers)}
    return {
        i: (g.weight.detach().float(), g.e_score_correction_bias.float()) for i, g in gates.items() if g is not None
    }


@dataclass(frozen=True)
class RouterAgreement:
    """Routers of the converted model and of the export, on the same inputs.

    choices: tokens times layers; same: share of them in which both choose the same experts; furthest_logits: by how much the
    logit of an expert that the export leaves out is above that of one that it chooses, at most; furthest: the same in units of
    2^-20 / eps, what rounding can do; weight_error: largest distance of a weight from 1.
    """

    choices: int
    same: float
    furthest_logits: float
    furthest: float
    weight_error: float


class RouterCheck:
    """Compares the routers of an export with those of the converted model while that one runs."""

    def __init__(self, routers: Mapping[int, StockRouter], top_k: int):
        self.routers, self.top_k = routers, top_k
        self.choices = self.same = 0
        self.furthest_logits = self.furthest = self.weight_error = 0.0

    def hooks(self, moe: ToMoEForCausalLM) -> Iterator[RemovableHandle]:
        """Hooks on the layers of the converted model, each run of which is then counted."""
        for i in self.routers:
            yield moe.model.layers[i].mlp.register_forward_pre_hook(partial(self._note, i), with_kwargs=True)

    @torch.no_grad()
    def _note(self, i: int, mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(mlp, ToMoEMLP)
        x = input_of(args, kwargs).flatten(0, -2).float()
        logits = mlp.router(x).float()
        ours = torch.zeros_like(logits).scatter_(1, route(logits, experts_per_token(mlp))[0], 1.0)
        weight, corrections = (t.to(x.device) for t in self.routers[i])
        scores = (x @ weight.t()).sigmoid()
        chosen = torch.zeros_like(scores).scatter_(1, (scores + corrections).topk(self.top_k, dim=1).indices, 1.0)
        chosen = chosen[:, : mlp.num_experts]
        off = (ROUTED_SCALE * scores[:, : mlp.num_experts] - 1).abs() * chosen
        least_chosen = logits.masked_fill(chosen == 0, torch.inf).amin(1)
        best_left = logits.masked_fill(chosen == 1, -torch.inf).amax(1)
        furthest = float((best_left - least_chosen).amax().clamp_min(0))
        eps = float(weight.abs().amax()) / max(float(mlp.router.weight.abs().amax()), 1e-30)
        self.choices += len(x)
        self.same += int((chosen == ours).all(1).sum())
        self.furthest_logits = max(self.furthest_logits, furthest)
        self.furthest = max(self.furthest, furthest * eps * 2**20)
        self.weight_error = max(self.weight_error, float(off.amax()))

    def result(self) -> RouterAgreement:
        """What was counted."""
        same = self.same / max(1, self.choices)
        return RouterAgreement(self.choices, same, self.furthest_logits, self.furthest, self.weight_error)
