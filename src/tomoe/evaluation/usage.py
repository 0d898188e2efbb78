"""How an MoE routes a text: how often each expert is chosen."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from tomoe import distributed
from tomoe.evaluation.results import ExpertUsage
from tomoe.model.hooks import hooked
from tomoe.moe.modeling_tomoe import Router, ToMoEMLP, route


def routers(model: nn.Module) -> dict[Router, int | None]:
    """Return the routers of a model that choose, in order, and the experts per token; None for one of overlapping experts."""
    # families have other names for their MLPs, and what another module calls a router chooses something else
    mlps = (module for module in model.modules() if isinstance(module, ToMoEMLP))
    return {mlp.router: mlp.top_k for mlp in mlps if mlp.num_experts > 1}


class ExpertCounter:
    """Counts the choices of routers while the model runs: `with counter.watching():`."""

    def __init__(self, model: nn.Module):
        self.top_ks = routers(model)
        self.chosen: dict[nn.Module, Tensor] = {}  # 0/1 [B S, N] of the last forward pass
        self.counts: dict[nn.Module, Tensor] = {}  # [N]
        self.tokens = 0

    def watching(self) -> AbstractContextManager[None]:
        return hooked(router.register_forward_hook(self._record) for router in self.top_ks)

    def _record(self, router: Router, _args: Any, logits: Tensor) -> None:
        expert_ids, _ = route(logits, self.top_ks[router])
        self.chosen[router] = torch.zeros_like(logits, dtype=torch.long).scatter_(1, expert_ids, 1)
        # also in a process that counts no sequence
        self.counts.setdefault(router, torch.zeros(logits.shape[-1], dtype=torch.long))

    def count(self, real: Bool[Tensor, "B S"]) -> None:
        """Add the real tokens of the sequences that ran last, which may have been cut to them."""
        self.add(real)
        self.tokens += int(real.sum())

    def add(self, real: Bool[Tensor, "B S"]) -> None:
        """Add the choices since the last call, which may be of one layer, without counting the tokens."""
        for router, chosen in self.chosen.items():
            rows = chosen.view(len(real), -1, chosen.shape[-1])
            self.counts[router] += rows[real[:, : rows.shape[1]].to(rows.device)].sum(0).cpu()
        self.chosen.clear()

    def usage(self) -> ExpertUsage | None:
        """Return shares by layer, over all processes; None if the model has no router."""
        if not self.top_ks:
            return None
        counts = [self.counts[router] for router in self.top_ks]
        tokens = torch.tensor(self.tokens)
        for count in (*counts, tokens):
            distributed.all_reduce_(count)
        # of all choices: with several experts a token the shares still add up to 1
        per_token = [top_k for top_k in self.top_ks.values() if top_k is not None]
        return ExpertUsage([(row.double() / max(int(row.sum()), 1)).tolist() for row in counts], int(tokens), per_token)
