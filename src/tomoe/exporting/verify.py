"""How near one model's predictions are to another's that should be the same: the proof of an export.

Letters: B blocks, S tokens of a block, t positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tomoe.errors import UserError
from tomoe.evaluation.perplexity import CHUNK, Progress, evaluating, forward_block

Positions = tuple[Tensor, Tensor, Tensor]
"""Of some positions: the reference's logits or log-probs [t, V], the model's, and the tokens that came next [t]."""


@dataclass(frozen=True)
class Agreement:
    """Two models on one text. Differences are of logits, or of log-probs where logits cannot be had."""

    positions: int
    blocks: int
    largest_difference: float  # over all positions and tokens of the vocabulary
    typical_difference: float  # median over blocks of the largest in a block: a near tie of a router spoils few blocks
    expected_difference: float  # of log-probs, mean over positions and over next tokens as likely as the reference says
    largest_logit: float  # of the reference, absolute
    kl: float  # KL(reference || model), mean over positions, nats
    top1_agreement: float
    reference_perplexity: float
    perplexity: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(blocks: Iterable[Iterable[Positions]]) -> Agreement:
    """Of blocks of chunks of positions, as they come. Raises UserError where there is none or a number is not finite."""
    worst: list[float] = []
    largest_logit = 0.0
    sums = torch.zeros(6, dtype=torch.float64)  # positions, reference nll, nll, KL, agreements, differences
    for block in blocks:
        difference = 0.0
        for reference, found, targets in block:
            meant, given = reference.float(), found.float()
            difference = max(difference, float((meant - given).abs().max()))
            largest_logit = max(largest_logit, float(meant.abs().max()))
            log_p, log_q = meant.log_softmax(-1), given.log_softmax(-1)
            nll, own = (-t.gather(1, targets[:, None]).double().sum() for t in (log_p, log_q))
            kl = (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
            alike = (log_p.argmax(-1) == log_q.argmax(-1)).sum()
            apart = (log_p.exp() * (log_p - log_q).abs()).sum(-1).double().sum()
            sums += torch.stack([torch.tensor(float(len(targets))), nll, own, kl, alike, apart]).double()
        worst.append(difference)
    count, reference_nll, own_nll, kl_sum, agreements, differences = sums.tolist()
    if not count:
        raise UserError("the text holds no token to compare the models on; give more text")
    if not (math.isfinite(own_nll) and math.isfinite(kl_sum)):
        raise UserError(f"the export's predictions are not finite numbers (mean loss {own_nll / count})")
    return Agreement(
        positions=int(count),
        blocks=len(worst),
        largest_difference=max(worst),
        typical_difference=sorted(worst)[len(worst) // 2],
        expected_difference=differences / count,
        largest_logit=largest_logit,
        kl=max(0.0, kl_sum / count),
        top1_agreement=agreements / count,
        reference_perplexity=math.exp(min(reference_nll / count, 700.0)),
        perplexity=math.exp(min(own_nll / count, 700.0)),
    )


@dataclass(frozen=True)
class Recorded:
    """What a model predicted for the blocks of a text, at the cost of D numbers a token: the model itself may go."""

    head: nn.Module
    states: list[Float[Tensor, "S D"]]

    def logits(self, b: int, positions: Int[Tensor, " t"]) -> Float[Tensor, "t V"]:
        """Of some positions of block b, on the CPU."""
        device = next(self.head.parameters()).device
        with torch.no_grad():
            return self.head(self.states[b][positions].to(device)).cpu()


@torch.no_grad()
def record(
    model: Any, input_ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], progress: Progress | None = None
) -> Recorded:
    """Run a model whose logits are output matrix times final hidden states (as every model that ToMoE converts)."""
    states = []
    with evaluating(model):
        for b, (ids, real) in enumerate(zip(input_ids, mask, strict=True)):
            states.append(forward_block(model, ids, real, inner=True).last_hidden_state[0].cpu())
            if progress:
                progress(b + 1, len(input_ids))
    return Recorded(model.get_output_embeddings(), states)


def agree(reference: Recorded, found: Recorded, input_ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> Agreement:
    """At every real token that a real token follows."""

    def chunks(b: int) -> Iterator[Positions]:
        scored = (mask[b, :-1] & mask[b, 1:]).nonzero().squeeze(1)
        for some in scored.split(CHUNK):
            yield reference.logits(b, some), found.logits(b, some), input_ids[b, some + 1]

    return summarise(chunks(b) for b in range(len(input_ids)))
