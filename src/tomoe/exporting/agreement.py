"""How far the predictions of two models that should be equal differ.

Letters: B sequences, S tokens of one, t positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tomoe.errors import UserError
from tomoe.evaluation.perplexity import CHUNK, evaluating, forward_sequences
from tomoe.model.layerwise import pass_offloaded
from tomoe.progress import StageCallback, no_stage_progress

Positions = tuple[Tensor, Tensor, Tensor]
"""For some positions: the reference's logits or log-probs [t, V], the model's, and the tokens that came next [t]."""


@dataclass(frozen=True)
class Agreement:
    """Two models on one text. Differences are of logits, or of log-probs if the engine returns no logits."""

    positions: int
    blocks: int  # sequences
    largest_difference: float  # over all positions and tokens of the vocabulary
    # median over sequences of the largest in one: a near tie of a router spoils few sequences
    typical_difference: float
    # of log-probs, mean over positions and, with the reference's probabilities, over next tokens
    expected_difference: float
    largest_logit: float  # of the reference, absolute
    kl: float  # KL(reference || model), mean over positions, nats
    top1_agreement: float
    reference_perplexity: float
    perplexity: float


def summarize(sequences: Iterable[Iterable[Positions]]) -> Agreement:
    """Aggregate agreement over sequences of chunks of positions. Raises UserError without any, and for NaN or inf."""
    largest_in_sequence: list[float] = []
    largest_logit = 0.0
    # positions, reference nll, nll, KL, agreements, differences
    sums = torch.zeros(6, dtype=torch.float64)
    for chunks in sequences:
        largest = 0.0
        for ref_logits, logits, targets in chunks:
            ref_logits, logits = ref_logits.float(), logits.float()
            largest = max(largest, float((ref_logits - logits).abs().max()))
            largest_logit = max(largest_logit, float(ref_logits.abs().max()))
            log_p, log_q = ref_logits.log_softmax(-1), logits.log_softmax(-1)
            ref_nll, nll = (-t.gather(1, targets[:, None]).double().sum() for t in (log_p, log_q))
            kl = (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
            agreements = (log_p.argmax(-1) == log_q.argmax(-1)).sum()
            differences = (log_p.exp() * (log_p - log_q).abs()).sum(-1).double().sum()
            count = torch.tensor(float(len(targets)))
            sums += torch.stack([count, ref_nll, nll, kl, agreements, differences]).double()
        largest_in_sequence.append(largest)
    if not (total := float(sums[0])):
        raise UserError("the text holds no token to compare the models on; give more text")
    ref_loss, loss, divergence, agreed, off = (sums[1:] / total).tolist()
    if not (math.isfinite(loss) and math.isfinite(divergence)):
        raise UserError(f"the export's predictions are not finite numbers (mean loss {loss})")
    return Agreement(
        positions=int(total),
        blocks=len(largest_in_sequence),
        largest_difference=max(largest_in_sequence),
        typical_difference=sorted(largest_in_sequence)[len(largest_in_sequence) // 2],
        expected_difference=off,
        largest_logit=largest_logit,
        kl=max(0.0, divergence),
        top1_agreement=agreed,
        reference_perplexity=math.exp(min(ref_loss, 700.0)),
        perplexity=math.exp(min(loss, 700.0)),
    )


@dataclass(frozen=True)
class Recorded:
    """A model's predictions for the real tokens of a text, stored as D numbers per token, so that the model can be freed."""

    head: nn.Module
    states: list[Float[Tensor, "_ D"]]  # real tokens: rows differ in length

    def logits(self, b: int, positions: Int[Tensor, " t"]) -> Float[Tensor, "t V"]:
        """Return the logits at some positions of sequence b, on the CPU."""
        device = next(self.head.parameters()).device
        with torch.no_grad():
            return self.head(self.states[b][positions].to(device)).cpu()


@torch.no_grad()
def record(
    model: Any,
    input_ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    on_progress: StageCallback = no_stage_progress,
) -> Recorded:
    """Run a model whose logits are its output matrix times final hidden states, as every model that tomoe converts.

    Padding is at the ends, and does not run: hooks on the model, such as `RouterCheck`'s, see real tokens only.
    """
    states = []
    lengths = mask.sum(1).tolist()
    batches = [(input_ids[b : b + 1, :length], mask[b : b + 1, :length]) for b, length in enumerate(lengths)]
    with evaluating(model):
        passed = pass_offloaded(model, batches, on_progress)
        for b, (ids, real) in enumerate(batches):
            with nullcontext() if passed is None else passed.ending(b):
                states.append(forward_sequences(model, ids, real, inner=True).last_hidden_state[0].cpu())
            if passed is None:
                on_progress(b + 1, len(input_ids))
            else:
                passed.drop(b)
    return Recorded(model.get_output_embeddings(), states)


def agree(
    reference: Recorded, predicted: Recorded, input_ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]
) -> Agreement:
    """Compare two models at every real token that a real token follows."""

    def chunks(b: int) -> Iterator[Positions]:
        scored = (mask[b, :-1] & mask[b, 1:]).nonzero().squeeze(1)
        for some in scored.split(CHUNK):
            yield reference.logits(b, some), predicted.logits(b, some), input_ids[b, some + 1]

    return summarize(chunks(b) for b in range(len(input_ids)))


@dataclass(frozen=True)
class Bounds:
    """How far an export may be off before it counts as broken: in a typical sequence, relative to the largest logit (None if
    rounding is too coarse), and by its mean KL in nats."""

    difference: float | None
    kl: float


# A wrong export is off by much more than this everywhere. A near tie of a router may fall the other way in one sequence.
BOUNDS = {
    "float32": Bounds(1e-4, 1e-4),
    "bfloat16": Bounds(None, 0.05),
    "float16": Bounds(None, 0.01),
    "f32": Bounds(1e-4, 1e-4),
    "f16": Bounds(None, 1e-3),
    "bf16": Bounds(None, 0.05),
    "q8_0": Bounds(None, 0.05),
    "q6_k": Bounds(None, 0.1),
    "q4_k": Bounds(None, 0.5),
    "q4_k_m": Bounds(None, 0.5),
}


def judge(a: Agreement, bounds: Bounds, typical: str = "in a typical sequence") -> str | None:
    """Say what is wrong with an agreement, as half a sentence; None if it is within the bounds."""
    allowed = None if bounds.difference is None else bounds.difference * max(1.0, a.largest_logit)
    if allowed is not None and not a.typical_difference <= allowed:
        return f"its predictions differ by {a.typical_difference:.2g} {typical}, the limit is {allowed:.2g}"
    if not a.kl <= bounds.kl:
        return f"its predictions differ by a KL of {a.kl:.2g} nats, the limit is {bounds.kl:.2g}"
    return None
