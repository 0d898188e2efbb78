"""The proof of an export: the converted model and what was written predict the same on real text.

Overlapping experts are held exactly, so predictions are compared as they are. The stock router of fine-grained experts may
choose otherwise where two are almost tied, and a model answers such choices with other numbers from there on, as it does
if it runs in bfloat16. So its parts are proved: everything but the routers by predictions with all experts, the routers one
by one on the inputs that they have in the converted model. What both predict with the planned experts is told, not judged.

The proof runs in float32. Who loads the export runs it in the dtype that it is stored in, so a few tokens run in that, too.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tomoe.data.evaluation_text import EvaluationText
from tomoe.errors import UserError
from tomoe.exporting.engines import LlamaCpp, agree_on_next_tokens, binding
from tomoe.exporting.gguf import context_length
from tomoe.exporting.gguf_experts import merge_experts, read_routers
from tomoe.exporting.glm4_moe import RouterAgreement, RouterCheck, stock_routers
from tomoe.exporting.verify import Agreement, Recorded, agree, record
from tomoe.model.generation import PROMPT, generate
from tomoe.model.hooks import hooked
from tomoe.model.loading import load_dense, pick_device
from tomoe.moe.checkpoint import load_moe
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.progress import ProgressCallback, stage_callback

# Positions of a sequence at which llama.cpp predicts the next token.
NEXT_TOKENS = 8
# Tokens that both models write from one prompt when a GGUF file is verified.
WRITTEN = 24


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
# Weights of fine-grained experts are off 1 by up to 2^-10, in every layer.
FINE_DIFFERENCE = 2e-3
# Of the choices of a stock router, those that must be the converted model's. One in thirty is a tie at most, as seen.
SAME_CHOICES = 0.9
# Logits that decide otherwise, in units of what float32 can round in both of them.
TIES = 2.0
WEIGHTS = 2.0**-8
# Tokens that run in the dtype of the file, and how far (KL in nats) they may be from the proof's. Near ties of routers brought
# 0.11 in bfloat16 (SmolLM2 at 50 %, fine-grained); what overflows or is cast wrongly is off by much more.
STORED_TOKENS, STORED_KL = 32, 1.0


@dataclass(frozen=True)
class FineProof:
    """For fine-grained experts in a stock form: agreement if tokens use all experts (None if there was no room to run it),
    and of the routers."""

    all_experts: Agreement | None
    routers: RouterAgreement

    @property
    def result(self) -> str:
        """One line of numbers."""
        routers, whole = self.routers, self.all_experts
        with_all = "it was not run with all experts, for lack of disk space"
        if whole is not None:
            with_all = (
                f"with all experts largest difference {whole.largest_difference:.2g} (largest logit "
                f"{whole.largest_logit:.1f}), KL {whole.kl:.2g} nats, same top-1 {whole.top1_agreement:.2%}"
            )
        return (
            f"{with_all}; routers choose the same experts in {routers.same:.2%} of {routers.choices:,} choices, and where they "
            f"do not, logits differ by at most {routers.furthest_logits:.2g}; weights are within {routers.weight_error:.2g} of 1"
        )

    def problem(self, bounds: Bounds) -> str | None:
        """What is wrong, as half a sentence; None if it is within the bounds."""
        r = self.routers
        if r.same < SAME_CHOICES:
            return f"its routers choose other experts in {1 - r.same:.1%} of the cases, ties are at most {1 - SAME_CHOICES:.0%}"
        if not r.furthest <= TIES:
            return f"its routers choose an expert whose logit is {r.furthest_logits:.2g} lower than that of another"
        if not r.weight_error <= WEIGHTS:
            return f"the weights of its experts are off 1 by up to {r.weight_error:.2g}, the limit is {WEIGHTS:.2g}"
        difference = None if bounds.difference is None else FINE_DIFFERENCE
        wrong = None if self.all_experts is None else judge(self.all_experts, Bounds(difference, bounds.kl))
        return f"with all experts {wrong}" if wrong else None


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
class Proof:
    """How far the export's predictions are from the converted model's.

    problem: what is wrong with them, or None; how: "float32 in transformers"; written: what both write after one prompt;
    fine: the proof by parts, for fine-grained experts in a stock form; stored: None if the proof ran in the stored dtype.
    """

    agreement: Agreement
    problem: str | None
    how: str
    written: dict[str, str] | None = None
    fine: FineProof | None = None
    stored: StoredRun | None = None

    @property
    def result(self) -> str:
        """One line of numbers."""
        return self._compared() + (f"; {self.stored.result}" if self.stored else "")

    def _compared(self) -> str:
        a = self.agreement
        perplexities = f"perplexity {a.perplexity:.4f} (converted folder: {a.reference_perplexity:.4f})"
        if self.fine is not None:
            planned = f"with the planned experts KL {a.kl:.2g} nats, {perplexities}"
            return f"{self.fine.result}; {planned}; {a.positions:,} positions, {self.how}"
        return (
            f"largest difference {a.largest_difference:.2g} (largest logit {a.largest_logit:.1f}), expected difference of a "
            f"log-prob {a.expected_difference:.2g}, KL {a.kl:.2g} nats, same top-1 {a.top1_agreement:.2%}, "
            f"{perplexities}, {a.positions:,} positions, {self.how}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As export.json holds it."""
        outcome = {"same": self.problem is None, "problem": self.problem, "how": self.how, **self.agreement.to_dict()}
        if self.fine is not None:
            outcome["routers"] = asdict(self.fine.routers)
            outcome["all_experts"] = self.fine.all_experts and self.fine.all_experts.to_dict()
        outcome["as_stored"] = self.stored and asdict(self.stored)
        return outcome | ({"written": self.written} if self.written else {})


def judge(a: Agreement, bounds: Bounds) -> str | None:
    """What is wrong with an agreement, as half a sentence; None if it is within the bounds."""
    allowed = None if bounds.difference is None else bounds.difference * max(1.0, a.largest_logit)
    if allowed is not None and not a.typical_difference <= allowed:
        return f"its predictions differ by {a.typical_difference:.2g} in a typical sequence, the limit is {allowed:.2g}"
    if not a.kl <= bounds.kl:
        return f"its predictions differ by a KL of {a.kl:.2g} nats, the limit is {bounds.kl:.2g}"
    return None


def use_all_experts_(moe: ToMoEForCausalLM) -> None:
    """Let tokens use all fine-grained experts: then no router decides."""
    moe.config.num_experts_per_tok = moe.config.num_experts


def run_as_stored(
    out: Path, dtype: torch.dtype, proved: Recorded, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], device: str
) -> StoredRun:
    """Run the first tokens of the longest sequence as who loads the export will; `proved` is the proof's own run."""
    longest = int(mask.sum(1).argmax())
    ids, mask = (t[longest : longest + 1, :STORED_TOKENS] for t in (ids, mask))
    kl: float | None = None
    error: str | None = None
    exported = load_dense(str(out), dtype, pick_device(device))
    try:
        kl = agree(Recorded(proved.head, [proved.states[longest]]), record(exported, ids, mask), ids, mask).kl
    # a product that takes no such dtype or size; numbers that are not finite
    except (RuntimeError, ValueError, TypeError, UserError) as failure:
        error = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
    return StoredRun(str(dtype).removeprefix("torch."), int(mask.sum()), kl, error)


def verify(
    folder: Path, out: Path, text: EvaluationText, dtype: str, stored: torch.dtype, device: str,
    on_progress: ProgressCallback,
) -> Proof:  # fmt: skip
    """Run the converted model and the export on the same text in `dtype`, one after the other, and compare them.

    The export also runs a few tokens in `stored`, the dtype of its weights, if that is another one.
    """
    ids, mask = text.sequences.input_ids, text.sequences.mask
    how = f"{dtype} in transformers {transformers.__version__}"
    running, running_export = (stage_callback(on_progress, f"running the {what}") for what in ("converted", "export"))

    def load(num_experts_per_tok: int | None = None) -> Any:
        return load_dense(str(out), getattr(torch, dtype), pick_device(device), num_experts_per_tok=num_experts_per_tok)

    exported = load()
    predicted = record(exported, ids, mask, running_export)
    experts = getattr(exported.config, "n_routed_experts", None)
    check = RouterCheck(stock_routers(exported), exported.config.num_experts_per_tok) if experts else None
    del exported
    as_stored = None
    if stored != getattr(torch, dtype):
        as_stored = run_as_stored(out, stored, predicted, ids, mask, device)
    fails = as_stored.problem if as_stored else None
    moe = load_moe(folder, dtype, device)
    with nullcontext() if check is None else hooked(check.hooks(moe)):
        reference = record(moe, ids, mask, running)
    agreement = agree(reference, predicted, ids, mask)
    if check is None:
        return Proof(agreement, judge(agreement, BOUNDS[dtype]) or fails, how, stored=as_stored)
    use_all_experts_(moe)
    reference = record(moe, ids, mask, running)
    del moe
    whole = agree(reference, record(load(experts), ids, mask, running_export), ids, mask)
    fine = FineProof(whole, check.result())
    return Proof(agreement, fine.problem(BOUNDS[dtype]) or fails, how, fine=fine, stored=as_stored)


def verify_gguf(
    folder: Path, file: Path, text: EvaluationText, precision: str, device: str, tokenizer: PreTrainedTokenizerBase,
    on_progress: ProgressCallback,
) -> Proof | None:  # fmt: skip
    """Run the file in llama.cpp and compare it with the converted model in float32; None if llama.cpp is not installed."""
    try:
        version = binding().__version__
    except UserError:
        return None
    moe = load_moe(folder, "float32", device)
    fine = moe.config.expert_form == "fine"
    context = min(text.sequences.input_ids.shape[1], context_length(moe) - 1)
    ids, mask = text.sequences.input_ids[:, :context], text.sequences.mask[:, :context]
    letter = tokenizer("a", add_special_tokens=False).input_ids[-1]

    def run(path: Path) -> LlamaCpp:
        return LlamaCpp(path, moe.config.vocab_size, context + WRITTEN, letter)

    def compare(llama: LlamaCpp, check: RouterCheck | None = None) -> Agreement:
        with nullcontext() if check is None else hooked(check.hooks(moe)):
            reference = record(moe, ids, mask, stage_callback(on_progress, "running the converted"))
        on_sequence = stage_callback(on_progress, "running llama.cpp")
        return agree_on_next_tokens(reference, llama.log_probs, ids, mask, NEXT_TOKENS, on_sequence)

    check = RouterCheck(*read_routers(file)) if fine else None
    llama = run(file)
    agreement = compare(llama, check)
    problem = None if fine else judge(agreement, BOUNDS[precision])
    # A passage must predict the same as text and as tokens, else llama.cpp splits text otherwise than the tokenizer.
    passage = str(tokenizer.decode(ids[0], skip_special_tokens=True))[: max(1, context - 2)]
    as_text, as_tokens = (llama.log_probs(prompt, fresh=True) for prompt in (passage, tokenizer(passage).input_ids))
    if problem is None and not torch.allclose(as_text, as_tokens, atol=1e-4):
        problem = "llama.cpp reads text as other tokens than the tokenizer does"
    written = None
    if len(tokenizer(PROMPT).input_ids) + WRITTEN < context_length(moe):
        converted_text, llama_text = generate(moe, tokenizer, PROMPT, WRITTEN), llama.write(PROMPT, WRITTEN)
        written = {"prompt": PROMPT, "converted": converted_text, "llama.cpp": llama_text}
    how = f"log-probs, {precision} in llama.cpp (xllamacpp {version})"
    if check is None:
        return Proof(agreement, problem, how, written)
    del llama
    use_all_experts_(moe)
    whole = None
    if shutil.disk_usage(file.parent).free > 1.1 * file.stat().st_size:
        with TemporaryDirectory(dir=file.parent) as place:
            whole = compare(run(merge_experts(file, Path(place) / file.name)))
    parts = FineProof(whole, check.result())
    return Proof(agreement, problem or parts.problem(BOUNDS[precision]), how, written, parts)
