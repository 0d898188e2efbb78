"""How far two models' predictions differ that should be the same: the proof of an export.

The proof runs in float32. Who loads the export runs it in the dtype that it is stored in, so a few tokens run in that, too.

Letters: B sequences, S tokens of one, t positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tomoe.data.evaluation_text import EvaluationText
from tomoe.errors import UserError
from tomoe.evaluation.perplexity import CHUNK, evaluating, forward_sequence
from tomoe.model.far_tokens import FarTokens, first_difference, layer_outputs
from tomoe.model.loading import load_dense, pick_device
from tomoe.moe.checkpoint import load_moe
from tomoe.progress import ProgressCallback, StageCallback, no_stage_progress, stage_callback

Positions = tuple[Tensor, Tensor, Tensor]
"""For some positions: the reference's logits or log-probs [t, V], the model's, and the tokens that came next [t]."""


@dataclass(frozen=True)
class Agreement:
    """Two models on one text. Differences are of logits, or of log-probs if the engine gives no logits."""

    positions: int
    # sequences
    blocks: int
    # over all positions and tokens of the vocabulary
    largest_difference: float
    # median over sequences of the largest in one: a near tie of a router spoils few sequences
    typical_difference: float
    # of log-probs, mean over positions and, with the reference's probabilities, over next tokens
    expected_difference: float
    # of the reference, absolute
    largest_logit: float
    # KL(reference || model), mean over positions, nats
    kl: float
    top1_agreement: float
    reference_perplexity: float
    perplexity: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(sequences: Iterable[Iterable[Positions]]) -> Agreement:
    """The agreement over sequences of chunks of positions, taken one by one.

    Raises UserError if there is no position, or if a number is not finite.
    """
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
    return _agreement(sums.tolist(), largest_in_sequence, largest_logit)


def _agreement(sums: list[float], largest_in_sequence: list[float], largest_logit: float) -> Agreement:
    count, ref_nll, nll, kl_sum, agreements, differences = sums
    if not count:
        raise UserError("the text holds no token to compare the models on; give more text")
    if not (math.isfinite(nll) and math.isfinite(kl_sum)):
        raise UserError(f"the export's predictions are not finite numbers (mean loss {nll / count})")
    return Agreement(
        positions=int(count),
        blocks=len(largest_in_sequence),
        largest_difference=max(largest_in_sequence),
        typical_difference=sorted(largest_in_sequence)[len(largest_in_sequence) // 2],
        expected_difference=differences / count,
        largest_logit=largest_logit,
        kl=max(0.0, kl_sum / count),
        top1_agreement=agreements / count,
        reference_perplexity=math.exp(min(ref_nll / count, 700.0)),
        perplexity=math.exp(min(nll / count, 700.0)),
    )


@dataclass(frozen=True)
class Recorded:
    """What a model predicted for the sequences of a text, kept as D numbers a token, so that the model itself may go."""

    head: nn.Module
    states: list[Float[Tensor, "S D"]]

    def logits(self, b: int, positions: Int[Tensor, " t"]) -> Float[Tensor, "t V"]:
        """The logits at some positions of sequence b, on the CPU."""
        device = next(self.head.parameters()).device
        with torch.no_grad():
            return self.head(self.states[b][positions].to(device)).cpu()


@torch.no_grad()
def record(
    model: Any, input_ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"],
    on_progress: StageCallback = no_stage_progress,
) -> Recorded:  # fmt: skip
    """Run a model whose logits are its output matrix times final hidden states, as in every model that ToMoE converts."""
    states = []
    with evaluating(model):
        for b, (ids, real) in enumerate(zip(input_ids, mask, strict=True)):
            states.append(forward_sequence(model, ids, real, inner=True).last_hidden_state[0].cpu())
            on_progress(b + 1, len(input_ids))
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
    """How far an export may be off before it counts as broken.

    difference: in a typical sequence, as a share of the largest logit, or None if rounding is too coarse to say; kl: mean, in
    nats.
    """

    difference: float | None
    kl: float


# A wrong export is off by much more than this everywhere. A near tie of a router may fall the other way in one sequence.
BOUNDS = {
    "float32": Bounds(1e-4, 1e-4), "bfloat16": Bounds(None, 0.05), "float16": Bounds(None, 0.01),
    "f32": Bounds(1e-4, 1e-4), "f16": Bounds(None, 1e-3), "bf16": Bounds(None, 0.05), "q8_0": Bounds(None, 0.05),
    "q6_k": Bounds(None, 0.1), "q4_k": Bounds(None, 0.5),
}  # fmt: skip
# Tokens that run in the dtype of the file, and how far (KL in nats) they may be from the proof's. Near ties of routers brought
# 0.11 in bfloat16 (SmolLM2 at 50 %, fine-grained); what overflows or is cast wrongly is off by much more.
STORED_TOKENS, STORED_KL = 32, 1.0
# Of far tokens, which are few: one near tie of a router weighs more among them than in a text.
FAR_KL = 0.05
# Of a layer's output, relative: more is not rounding, but where a difference begins.
LAYER_DIFFERENCE = 1e-3


def judge(a: Agreement, bounds: Bounds, typical: str = "in a typical sequence") -> str | None:
    """What is wrong with an agreement, as half a sentence; None if it is within the bounds."""
    allowed = None if bounds.difference is None else bounds.difference * max(1.0, a.largest_logit)
    if allowed is not None and not a.typical_difference <= allowed:
        return f"its predictions differ by {a.typical_difference:.2g} {typical}, the limit is {allowed:.2g}"
    if not a.kl <= bounds.kl:
        return f"its predictions differ by a KL of {a.kl:.2g} nats, the limit is {bounds.kl:.2g}"
    return None


@dataclass(frozen=True)
class StoredRun:
    """A few tokens in the dtype that the export is stored in, beside its own run in that of the proof.

    kl: KL(proof's dtype || stored dtype), mean over positions, nats; None if the run failed with `error`.
    """

    dtype: str
    tokens: int
    kl: float | None
    error: str | None = None

    @property
    def problem(self) -> str | None:
        """What is wrong, as half a sentence; None if nothing is."""
        if self.kl is None:
            return f"it does not run in {self.dtype}, in which it is stored: {self.error}"
        if not self.kl <= STORED_KL:
            return (
                f"in {self.dtype}, in which it is stored, its predictions differ from its own in the dtype of the proof by a "
                f"KL of {self.kl:.2g} nats, the limit is {STORED_KL:.2g}"
            )
        return None

    @property
    def result(self) -> str:
        """The number, in words."""
        return f"{self.dtype}, as stored: KL {self.kl or 0.0:.2g} nats to that on {self.tokens} tokens"


@dataclass(frozen=True)
class FarAgreement:
    """Two models on tokens that a short text does not reach; each position counts as a sequence."""

    what: str
    tokens: int
    agreement: Agreement

    def problem(self, bounds: Bounds) -> str | None:
        """What is wrong, as half a sentence; None if it is within the bounds."""
        wrong = judge(self.agreement, Bounds(bounds.difference, max(bounds.kl, FAR_KL)), "at a typical position")
        return f"{self.what} {wrong}" if wrong else None


@dataclass(frozen=True)
class Proof:
    """How far the export's predictions are from the converted model's.

    problem: what is wrong with them, or None; how: "float32 in transformers"; written: what both write after one prompt;
    far: on tokens beyond windows and the original context; stored: None if the proof ran in the stored dtype.
    """

    agreement: Agreement
    problem: str | None
    how: str
    written: dict[str, str] | None = None
    far: Sequence[FarAgreement] = field(default=(), kw_only=True)
    stored: StoredRun | None = field(default=None, kw_only=True)

    @property
    def result(self) -> str:
        """One line of numbers."""
        far = "".join(f"; {f.what} largest difference {f.agreement.largest_difference:.2g}" for f in self.far)
        return self.compared + far + (f"; {self.stored.result}" if self.stored else "")

    @property
    def compared(self) -> str:
        """The line without the run in the stored dtype."""
        a = self.agreement
        return (
            f"largest difference {a.largest_difference:.2g} (largest logit {a.largest_logit:.1f}), expected difference of a "
            f"log-prob {a.expected_difference:.2g}, KL {a.kl:.2g} nats, same top-1 {a.top1_agreement:.2%}, "
            f"{self.perplexities}, {a.positions:,} positions, {self.how}"
        )

    @property
    def perplexities(self) -> str:
        """Of both models, in words."""
        a = self.agreement
        return f"perplexity {a.perplexity:.4f} (converted folder: {a.reference_perplexity:.4f})"

    def to_dict(self) -> dict[str, Any]:
        """As export.json holds it."""
        outcome = {"same": self.problem is None, "problem": self.problem, "how": self.how, **self.agreement.to_dict()}
        outcome |= self.parts()
        outcome["far"] = [asdict(far) for far in self.far]
        outcome["as_stored"] = self.stored and asdict(self.stored)
        return outcome | ({"written": self.written} if self.written else {})

    def parts(self) -> dict[str, Any]:
        """What else export.json holds, where parts were proved one by one."""
        return {}


@dataclass(frozen=True)
class Check:
    """How an export is verified in transformers: on which text, in which dtype, on which device.

    stored: the dtype of the converted folder's weights; far: what both models run beside the text.
    """

    text: EvaluationText
    dtype: str
    stored: torch.dtype
    device: str
    on_progress: ProgressCallback
    far: Sequence[FarTokens] = ()

    @property
    def how(self) -> str:
        """In words."""
        return f"{self.dtype} in transformers {transformers.__version__}"

    def load(self, folder: Path, num_experts_per_tok: int | None = None) -> Any:
        """An export, fresh from its folder."""
        dtype, device = getattr(torch, self.dtype), pick_device(self.device)
        return load_dense(str(folder), dtype, device, num_experts_per_tok=num_experts_per_tok)

    def run(self, model: Any, what: str) -> Recorded:
        """What a model predicts for the text."""
        sequences = self.text.sequences
        return record(
            model, sequences.input_ids, sequences.mask, stage_callback(self.on_progress, f"running the {what}")
        )

    def agree(self, reference: Recorded, predicted: Recorded) -> Agreement:
        """Compare what two models predicted for the text."""
        return agree(reference, predicted, self.text.sequences.input_ids, self.text.sequences.mask)

    @property
    def bounds(self) -> Bounds:
        """How far an export may be off in this dtype."""
        return BOUNDS[self.dtype]

    def run_far(self, model: Any) -> list[Float[Tensor, "t V"]]:
        """What a model predicts for the last of the far tokens."""
        with evaluating(model):
            return [far.run(model) for far in self.far]

    def agree_far(self, reference: Sequence[Tensor], predicted: Sequence[Tensor]) -> list[FarAgreement]:
        """Compare what two models predicted for them; the next token does not matter here, so it is the one predicted."""

        def positions(ours: Tensor, theirs: Tensor) -> Iterator[list[Positions]]:
            yield from ([(a[None], b[None], a.argmax(-1)[None])] for a, b in zip(ours, theirs, strict=True))

        return [
            FarAgreement(far.what, far.ids.shape[1], summarize(positions(ours, theirs)))
            for far, ours, theirs in zip(self.far, reference, predicted, strict=True)
        ]

    def place(self, reference: Callable[[], Any], exported: Callable[[], Any]) -> str:
        """Where two models that predict differently begin to differ, in words."""
        longest = int(self.text.sequences.mask.sum(1).argmax())
        ids = self.text.sequences.input_ids[longest : longest + 1]
        ids = ids if not self.far else self.far[0].ids
        ours, theirs = (layer_outputs(load(), ids) for load in (reference, exported))
        return first_difference(ours, theirs, LAYER_DIFFERENCE)

    def run_as_stored(self, out: Path, proved: Recorded) -> StoredRun | None:
        """Run the first tokens of the longest sequence as who loads the export will; `proved` is the proof's own run.

        None if the proof runs in that dtype anyway.
        """
        if self.stored == getattr(torch, self.dtype):
            return None
        ids, mask = self.text.sequences.input_ids, self.text.sequences.mask
        longest = int(mask.sum(1).argmax())
        ids, mask = (t[longest : longest + 1, :STORED_TOKENS] for t in (ids, mask))
        kl: float | None = None
        error: str | None = None
        exported = load_dense(str(out), self.stored, pick_device(self.device))
        try:
            kl = agree(Recorded(proved.head, [proved.states[longest]]), record(exported, ids, mask), ids, mask).kl
        # a product that takes no such dtype or size; numbers that are not finite
        except (RuntimeError, ValueError, TypeError, UserError) as failure:
            error = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
        return StoredRun(str(self.stored).removeprefix("torch."), int(mask.sum()), kl, error)


def verify_exactly(folder: Path, out: Path, check: Check) -> Proof:
    """Run the converted model and the export on the same tokens, one after the other: they predict the same."""

    def converted() -> Any:
        return load_moe(folder, check.dtype, check.device)

    exported = check.load(out)
    predicted, predicted_far = check.run(exported, "export"), check.run_far(exported)
    del exported
    stored = check.run_as_stored(out, predicted)
    moe = converted()
    agreement = check.agree(check.run(moe, "converted"), predicted)
    far = check.agree_far(check.run_far(moe), predicted_far)
    del moe
    problem = first_problem([judge(agreement, check.bounds), *(f.problem(check.bounds) for f in far)])
    if problem is not None:
        problem = f"{problem}; {check.place(converted, lambda: check.load(out))}"
    return Proof(
        agreement, first_problem([problem, stored.problem if stored else None]), check.how, far=far, stored=stored
    )


def first_problem(problems: Iterable[str | None]) -> str | None:
    """The first that is one."""
    return next((problem for problem in problems if problem), None)
