"""How an MoE routes a text: the share of tokens of every expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from tomoe import distributed

ROUTER = ".mlp.router"


@dataclass(frozen=True)
class ExpertUsage:
    """Share of the tokens that every expert of every layer got; each row sums to 1."""

    shares: list[list[float]]  # [layer][expert]
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ExpertUsage:
        return cls(**values)


class ExpertCounter:
    """Counts what routers chose, block by block, while others run the model: `with ExpertCounter(model) as counter:`.

    A router is a module whose name ends in `.mlp.router`, and a token belongs to the largest of its outputs.
    """

    def __init__(self, model: nn.Module):
        self.routers = [module for name, module in model.named_modules() if name.endswith(ROUTER)]
        self.chosen: dict[nn.Module, Tensor] = {}  # one-hot [S, N] of the last forward pass
        self.experts: dict[nn.Module, int] = {}
        self.counts: dict[str, dict[nn.Module, Tensor]] = {}  # by source, "" where none is named
        self.tokens: dict[str, int] = {}

    def __enter__(self) -> ExpertCounter:
        self.hooks = [router.register_forward_hook(self._note) for router in self.routers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _note(self, router: nn.Module, _args: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        logits = logits.reshape(-1, logits.shape[-1])
        self.experts[router] = logits.shape[-1]
        self.chosen[router] = nn.functional.one_hot(logits.argmax(-1), logits.shape[-1])

    def count(self, real: Bool[Tensor, " S"], source: str = "") -> None:
        """Add the real tokens of the block that ran last, to those of its source."""
        own = self.counts.setdefault(source, {})
        for router, chosen in self.chosen.items():
            own[router] = own.get(router, 0) + chosen[real.to(chosen.device)].sum(0).cpu()
        self.tokens[source] = self.tokens.get(source, 0) + int(real.sum())
        self.chosen.clear()

    def collect(self, sources: Sequence[str]) -> None:
        """Add up what several processes counted; `sources` are those of all blocks, this process's or not."""
        if distributed.size() == 1 or not self.routers:
            return
        for source in sorted(set(sources)):
            own = self.counts.setdefault(source, {})
            for router in self.routers:
                own.setdefault(router, torch.zeros(self.experts[router], dtype=torch.long))
                distributed.collect_(own[router])
            tokens = torch.tensor(self.tokens.get(source, 0))
            distributed.collect_(tokens)
            self.tokens[source] = int(tokens)

    def usage(self) -> ExpertUsage | None:
        """Shares by layer, all sources together; None where the model has no router."""
        return self._usage(list(self.counts)) if self.routers and self.counts else None

    def by_source(self) -> dict[str, ExpertUsage]:
        """Shares by layer of each source; empty unless there are two at least."""
        return (
            {source: self._usage([source]) for source in sorted(self.counts)}
            if self.routers and len(self.counts) > 1
            else {}
        )

    def _usage(self, sources: Sequence[str]) -> ExpertUsage:
        tokens = sum(self.tokens[source] for source in sources)
        counts = [torch.stack([self.counts[source][router] for source in sources]).sum(0) for router in self.routers]
        return ExpertUsage([(row.double() / max(tokens, 1)).tolist() for row in counts], tokens)
