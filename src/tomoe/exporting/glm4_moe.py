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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Glm4MoeConfig, PreTrainedConfig

from tomoe.exporting.fine_grained import (
    OVERLAPPING_PROBLEM,
    FineLayout,
    expert_matrices,
    experts_per_token,
    fine_layout,
    layout_words,
    router_reach,
    whole_matrices,
)
from tomoe.exporting.overlapping import QWEN_PROJECTIONS
from tomoe.exporting.proof_by_parts import StockRouter, verify_by_parts
from tomoe.exporting.stock import Places, Stock, padded
from tomoe.exporting.target import Options, Sizes
from tomoe.exporting.verification import Check, Proof
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP

# eps Z at which the error of the weights is that of the order.
BALANCED_REACH = 2.0**-9.5
# r: undoes the 1/2 that a sigmoid has at 0.
ROUTED_SCALE = 2.0
# Corrections of experts of zeros that fill up a layer: chosen before all others, or after all others. Scores are within
# [0, 1], and no other correction comes near 1.
FIRST, LAST = 1.0, -1.0


class Glm4Moe(Stock[FineLayout]):
    """Biases, norms of heads if the config says so, no windows. The first layers may be plain MLPs."""

    name, about = "glm4_moe", "Glm4Moe"
    tried_with = ("4.57.1",)
    config_class = Glm4MoeConfig
    places = Places(biased=True, normed=None, windows="no layer", silu_only=True)
    how_well = "up to the rounding of its router"

    def form_problem(self, form: str) -> str | None:
        return None if form == "fine" else OVERLAPPING_PROBLEM

    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> FineLayout:
        return fine_layout(moe, multiple)

    def config(self, moe: ToMoEForCausalLM, layout: FineLayout) -> PreTrainedConfig:
        """Output matrices are never tied: vLLM's class does not tie them."""
        attention: Any = moe.model.layers[0].self_attn
        return self.make_config(
            moe,
            rope_parameters=dict(moe.config.rope_parameters) | {"partial_rotary_factor": 1.0},
            tie_word_embeddings=False,
            attention_bias=attention.q_proj.bias is not None,
            use_qk_norm=attention.q_norm is not None,
            n_routed_experts=layout.experts,
            num_experts_per_tok=layout.top_k,
            n_shared_experts=layout.shared // layout.width,
            moe_intermediate_size=layout.width,
            routed_scaling_factor=ROUTED_SCALE,
            norm_topk_prob=False,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=layout.whole,
            num_nextn_predict_layers=0,
        )

    def mlp_tensors(self, moe: ToMoEForCausalLM, layout: FineLayout) -> Callable[[int], Iterable[tuple[str, Tensor]]]:
        scales = router_scales(moe)

        def of_layer(i: int) -> Iterable[tuple[str, Tensor]]:
            mlp = moe.model.layers[i].mlp
            if i >= layout.whole:
                return ((f"mlp.{name}", t) for name, t in moe_tensors(mlp, layout, scales[i]))
            return ((f"mlp.{n}.weight", t) for n, t in zip(QWEN_PROJECTIONS, whole_matrices(mlp), strict=True))

        return of_layer

    def output_tensors(self, moe: ToMoEForCausalLM) -> Iterator[tuple[str, Tensor]]:
        # a tensor of its own: two names of one are refused by safetensors
        yield "lm_head.weight", moe.lm_head.weight.clone()

    def bytes(self, moe: ToMoEForCausalLM, layout: FineLayout) -> int:
        """Routers are float32 in any checkpoint."""
        routers = (len(moe.model.layers) - layout.whole) * layout.experts * moe.config.hidden_size
        return super().bytes(moe, layout) + routers * (torch.float32.itemsize - moe.dtype.itemsize)

    def describe(self, moe: ToMoEForCausalLM, layout: FineLayout) -> Sizes:
        return Sizes(self.bytes(moe, layout), layout_words(moe, layout), zeros=layout.zeros)

    def verify(self, folder: Path, out: Path, options: Options, check: Check) -> Proof:
        return verify_by_parts(folder, out, check, stock_routers)


def router_scales(moe: ToMoEForCausalLM) -> list[float]:
    """eps of every layer, for the largest logit Z (without the bias) on some tokens of the vocabulary."""
    return [router_scale(z) for z in router_reach(moe)]


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


def moe_tensors(mlp: ToMoEMLP, layout: FineLayout, eps: float) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every tensor of a layer's MoE."""
    weight, corrections = router_tensors(mlp, layout, eps)
    yield "gate.weight", weight
    yield "gate.e_score_correction_bias", corrections
    for expert in (None, *range(layout.experts)):
        place = "shared_experts" if expert is None else f"experts.{expert}"
        matrices = expert_matrices(mlp, layout, expert)
        yield from ((f"{place}.{name}.weight", t) for name, t in zip(QWEN_PROJECTIONS, matrices, strict=True))


def stock_routers(exported: Any) -> dict[int, StockRouter]:
    """The routers of an export, as transformers loaded it, by number of the layer."""
    gates = {i: getattr(layer.mlp, "gate", None) for i, layer in enumerate(exported.model.layers)}
    return {
        i: (g.weight.detach().float(), g.e_score_correction_bias.float()) for i, g in gates.items() if g is not None
    }
