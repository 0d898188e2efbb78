"""How an MoE routes a text: how often every expert is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from tomoe import distributed
from tomoe.evaluation.results import ExpertUsage
from tomoe.model.hooks import hooked
from tomoe.moe.modeling_tomoe import ToMoEMLP, route


def routers(model: nn.Module) -> dict[nn.Module, int | None]:
    """Return the routers of a model, in order, and how many experts a token uses; None for one of overlapping experts."""
    # families have other names for their MLPs, and what another module calls a router chooses something else
    owners = [module for module in model.modules() if isinstance(module, ToMoEMLP)]
    return {owner.router: owner.top_k for owner in owners}


class ExpertCounter:
    """Counts what routers chose, sequence by sequence, while others run the model: `with ExpertCounter(model) as counter:`.

    A token's experts are those that `route` gives it.
    """

    def __init__(self, model: nn.Module):
        self.top_ks = routers(model)
        self.routers = list(self.top_ks)
        self.chosen: dict[nn.Module, Tensor] = {}  # 0/1 [B S, N] of the last forward pass
        self.experts: dict[nn.Module, int] = {}
        self.counts: dict[str, dict[nn.Module, Tensor]] = {}  # by source, "" where none is named
        self.tokens: dict[str, int] = {}

    def __enter__(self) -> ExpertCounter:
        self.hooks = hooked(router.register_forward_hook(self._record) for router in self.routers)
        self.hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.__exit__(None, None, None)

    def _record(self, router: nn.Module, _args: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        logits = logits.reshape(-1, logits.shape[-1])
        self.experts[router] = logits.shape[-1]
        expert_ids, _ = route(logits, self.top_ks[router])
        self.chosen[router] = torch.zeros_like(logits, dtype=torch.long).scatter_(1, expert_ids, 1)

    def count(self, real: Bool[Tensor, "B S"], sources: Sequence[str]) -> None:
        """Add the real tokens of each of the sequences that ran last to those of its source; S may be cut to the real ones."""
        for i, (row, source) in enumerate(zip(real, sources, strict=True)):
            counts = self.counts.setdefault(source, {})
            for router, chosen in self.chosen.items():
                own = chosen.view(len(real), -1, chosen.shape[-1])[i]
                counts[router] = counts.get(router, 0) + own[row[: len(own)].to(own.device)].sum(0).cpu()
            self.tokens[source] = self.tokens.get(source, 0) + int(row.sum())
        self.chosen.clear()

    def collect(self, sources: Sequence[str]) -> None:
        """Add up what several processes counted; `sources` are those of all sequences, this process's or not."""
        if distributed.world_size() == 1 or not self.routers:
            return
        for source in sorted(set(sources)):
            counts = self.counts.setdefault(source, {})
            for router in self.routers:
                counts.setdefault(router, torch.zeros(self.experts[router], dtype=torch.long))
                distributed.all_reduce_(counts[router])
            tokens = torch.tensor(self.tokens.get(source, 0))
            distributed.all_reduce_(tokens)
            self.tokens[source] = int(tokens)

    def usage(self) -> ExpertUsage | None:
        """Shares by layer, all sources together; None if the model has no router."""
        return self._usage(list(self.counts)) if self.routers and self.counts else None

    def by_source(self) -> dict[str, ExpertUsage]:
        """Shares by layer of each source; empty unless there are at least two."""
        return (
            {source: self._usage([source]) for source in sorted(self.counts)}
            if self.routers and len(self.counts) > 1
            else {}
        )

    def _usage(self, sources: Sequence[str]) -> ExpertUsage:
        tokens = sum(self.tokens[source] for source in sources)
        counts = [torch.stack([self.counts[source][router] for source in sources]).sum(0) for router in self.routers]
        # of all choices: with several experts a token the shares still add up to 1
        per_token = [top_k for top_k in self.top_ks.values() if top_k is not None]
        return ExpertUsage([(row.double() / max(int(row.sum()), 1)).tolist() for row in counts], tokens, per_token)
