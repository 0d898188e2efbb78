"""The paper's pseudo-MoE (Eq. 17, Appendix B.3): the dense model under the plan's masks. The reference of fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedModel

from tomoe.finetuning.students import (
    Balance,
    Fp32MasterWeights,
    MoEStudent,
    _frozen_embeddings,
    _merged,
    _trained_routers,
    _trained_weights,
    _with_routers,
)
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.plans import Plan
from tomoe.plans.masking import masked, planned_masks
from tomoe.plans.routing import balance_penalty
from tomoe.recipe.finetuning import FinetuneRecipe


class PseudoMoE(MoEStudent):
    """Learns what `MoEStudent` learns, on the dense model's own matrices; `finish` folds them again."""

    def __init__(self, dense: PreTrainedModel, plan: Plan, recipe: FinetuneRecipe):
        assert recipe.weights == "full"
        self.model, self.plan = dense, plan
        layers = [
            replace(
                layer,
                router_weight=layer.router_weight.clone(),
                router_bias=None if layer.router_bias is None else layer.router_bias.clone(),
            )
            for layer in plan.layers
        ]
        self.masks = planned_masks(replace(plan, layers=tuple(layers)), dense.device)
        self.routers = [m.experts.router.requires_grad_(False) for m in self.masks]
        if recipe.routers == "frozen":
            # a frozen router chooses, and passes no gradient on to its input
            for router in self.routers:
                router.forward = torch.no_grad()(router.forward)
        self.learned = Fp32MasterWeights(
            _trained_weights(dense, _frozen_embeddings(dense), None) + _trained_routers(self.routers, recipe)
        )

    @contextmanager
    def running(self, valid: Bool[Tensor, " T"] | None) -> Iterator[Balance]:
        with masked(self.model, self.masks):
            yield lambda: balance_penalty([m.routing.select(valid) for m in self.masks if m.routing is not None])

    def finish(self, version: str, dtype: torch.dtype = torch.float32) -> tuple[ToMoEForCausalLM, Plan]:
        dense = _merged(self.model, self.learned, None)
        plan = replace(self.plan, layers=tuple(_with_routers(self.plan, self.routers)))
        return fold(dense.to(dtype), plan, version), plan

    def write_(self) -> None:
        self.learned.write_()
