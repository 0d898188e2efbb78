"""Fine-grained experts of gemma4_text as the same class with `enable_moe_block`.

There the output of the experts is normalized twice. With x the sum of the experts and m its mean square, a dense layer adds
w x / sqrt(m + e), where e is the eps of its norms. Stored are experts whose sum is c x, and a first norm of ones; the second
norm then gives

    w c x / sqrt(c^2 m + e) / sqrt(c^2 m / (c^2 m + e) + e) = w x / sqrt(m (1 + e) + e^2 / c^2),

which for c = sqrt(e) is the dense layer's up to the factor 1 + e: 5e-7 of the output for e = 1e-6, a rounding of float32.

The MLP of the class becomes zeros, whose norm is zeros: added to the experts' it would need a norm of its own. So all neurons
are in experts, and there is no shared part. The router sees the normalized residual times a vector times D^-1/2, so the
vector is the weight of the norm before the MLP times D^1/2. A factor for each expert undoes the weights 1/k, and holds c. No
other number of experts can be asked for at load time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tomoe.exporting.stock.architecture import StockArch, StockLayout, each
from tomoe.exporting.stock.fine_grained import FineGrained, named
from tomoe.exporting.stock.routers import RouterForm
from tomoe.exporting.verify import StockRouter
from tomoe.model.offload import change_
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP

ZERO_NEURONS = 64  # neurons of the MLP of zeros: products of matrices without rows fail in some engines


class Gemma4(FineGrained):
    """Every layer has experts, and none a shared part."""

    def mlp_tensors(
        self, moe: ToMoEForCausalLM, i: int, layout: StockLayout, eps: float
    ) -> Iterator[tuple[str, Tensor]]:
        norm = moe.model.layers[i].pre_feedforward_layernorm.weight
        ones, zeros = torch.ones_like(norm), norm.new_zeros(ZERO_NEURONS, len(norm))
        yield "router.scale", norm * len(norm) ** 0.5
        yield "router.per_expert_scale", norm.new_full((layout.experts,), layout.top_k * moe.config.rms_norm_eps**0.5)
        yield "pre_feedforward_layernorm_2.weight", norm.clone()
        yield "post_feedforward_layernorm_1.weight", ones
        yield "post_feedforward_layernorm_2.weight", ones.clone()
        yield from named(each("mlp"), (zeros, zeros.clone(), zeros.t().contiguous()))
        yield from super().mlp_tensors(moe, i, layout, eps)

    def matrices(self, mlp: ToMoEMLP, layout: StockLayout, expert: int | None) -> tuple[Tensor, Tensor, Tensor]:
        return StockArch.matrices(self, mlp, layout, expert)

    def gates(self, exported: Any) -> dict[int, Any]:
        return {i: layer.router for i, layer in enumerate(exported.model.layers)}

    def stock_router(self, layer: Any, gate: Any, form: RouterForm) -> StockRouter:
        norm = layer.pre_feedforward_layernorm.weight.clone()
        factor = layer.pre_feedforward_layernorm.eps**0.5

        def choose(x: Tensor) -> tuple[Tensor, Tensor]:
            # its own norm, of what is normalized already, changes nothing
            _, weights, ids = gate(x / norm)
            return ids, weights / factor

        return StockRouter(form, choose, float(gate.proj.weight.abs().amax()))

    @torch.no_grad()
    def use_all_experts_(self, exported: Any) -> Any:
        planned = exported.config.top_k_experts
        for i, gate in self.gates(exported).items():
            layer, factor = exported.model.layers[i], len(gate.per_expert_scale) / planned
            change_(layer, gate.proj.weight, torch.zeros_like)
            change_(layer, gate.per_expert_scale, partial(torch.mul, other=factor))
        exported.config.top_k_experts = exported.config.num_experts
        return exported
