"""The proof of an export: it predicts what the converted model predicts.

It runs in float32. Users run an export in its stored dtype, so a few tokens run in that, too.

A stock router may choose otherwise where two experts are almost tied, and from there on the model answers with other numbers,
as it does if it runs in bfloat16. So such an export is proved by parts: everything but the routers by predictions with all
experts, the routers one by one on the inputs that they have in the converted model. With the planned experts, both may differ
by what such ties cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.data.evaluation_text import EvaluationText
from tomoe.errors import UserError
from tomoe.evaluation.perplexity import evaluating
from tomoe.exporting.agreement import BOUNDS, Agreement, Bounds, Positions, Recorded, agree, judge, record, summarize
from tomoe.exporting.stock.routers import RouterForm
from tomoe.model.far_tokens import FarTokens, first_difference, layer_outputs
from tomoe.model.hooks import hooked, input_of
from tomoe.model.loading import load_dense, pick_device
from tomoe.moe.checkpoint import load_moe
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP, route
from tomoe.progress import ProgressCallback, stage_callback

# Tokens that run in the dtype of the file, and how far (KL in nats) they may be from the proof's. Near ties of routers brought
# 0.11 in bfloat16 (SmolLM2 at 50 %, fine-grained); what overflows or is cast wrongly is off by much more.
STORED_TOKENS = 32
STORED_KL = 1.0
FAR_KL = 0.05  # of far tokens, which are few: one near tie of a router weighs more among them than in a text
LAYER_DIFFERENCE = 1e-3  # of a layer's output, relative: more is not rounding, but where a difference begins
# Of the choices of a stock router, those that may differ from the converted model's: one in thirty is a tie at most, as seen.
# Of few choices chance makes more of them ties: a share p of n has a deviation of sqrt(p n), and three of them are allowed.
TIED_CHOICES = 1 / 30
# KL of predictions with the planned experts, in nats: what ties may cost. 1.3e-3 was seen in float32 on 256 tokens; experts
# that stand in another order than their routers count them cost far more, and nothing else shows them.
PLANNED_KL = 0.05
TIES = 2.0  # logits that decide otherwise, in units of what rounding can do


@dataclass(frozen=True)
class StoredRun:
    """A few tokens in the stored dtype, beside its own run in the dtype of the proof: mean KL(proof's || stored) in nats, or the
    `error` with which the run failed."""

    dtype: str
    tokens: int
    kl: float | None
    error: str | None = None

    @property
    def problem(self) -> str | None:
        """Say what is wrong, as half a sentence; None if nothing is."""
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
        return f"{self.dtype}, as stored: KL {self.kl or 0.0:.2g} nats to that on {self.tokens} tokens"


@dataclass(frozen=True)
class FarAgreement:
    """Two models on tokens beyond a short text; each position counts as a sequence."""

    what: str
    tokens: int
    agreement: Agreement


@dataclass(frozen=True)
class StockRouter:
    """The router of a layer in an export; choose: experts [T, k], and the factors of their outputs, where 1 is right, for inputs
    [T, D] of the MLP; largest: of its weights u, absolute."""

    form: RouterForm
    choose: Callable[[Tensor], tuple[Tensor, Tensor]]
    largest: float


@dataclass
class RouterAgreement:
    """Routers of the converted model and of the export, on the same inputs; choices: tokens times layers; same: share of them
    with the same experts; furthest_logits: largest lead of the logit of an expert left out over that of one chosen (in `layer`);
    furthest: in units of what rounding can do; weight_error: largest distance of a weight from 1; weight_bound: its limit."""

    weight_bound: float
    choices: int = 0
    same: float = 1.0
    furthest_logits: float = 0.0
    furthest: float = 0.0
    weight_error: float = 0.0
    layer: int = 0

    @property
    def result(self) -> str:
        return (
            f"routers choose the same experts in {self.same:.2%} of {self.choices:,} choices, and where they do not, logits "
            f"differ by at most {self.furthest_logits:.2g}; weights are within {self.weight_error:.2g} of 1"
        )

    @property
    def problem(self) -> str | None:
        """Say what is wrong, as half a sentence; None if choices and weights are within the bounds."""
        tied = TIED_CHOICES + 3 * math.sqrt(TIED_CHOICES / max(1, self.choices))
        if 1 - self.same > tied:
            return (
                f"its routers choose other experts in {1 - self.same:.1%} of {self.choices:,} cases, ties are at most {tied:.1%} "
                f"(layer {self.layer} is the furthest off)"
            )
        if not self.furthest <= TIES:
            return (
                f"its routers choose an expert whose logit is {self.furthest_logits:.2g} lower than that of another, in layer "
                f"{self.layer}"
            )
        if not self.weight_error <= self.weight_bound:
            limit = f"the limit is {self.weight_bound:.2g}"
            return f"the weights of its experts are off 1 by up to {self.weight_error:.2g}, {limit}"
        return None


class RouterCheck:
    """Compares the routers of an export with those of the converted model while that runs; `found` is the result."""

    def __init__(self, routers: Mapping[int, StockRouter]):
        self.routers = routers
        bound = max((router.form.weight_error for router in routers.values()), default=0.0)
        self.found = RouterAgreement(weight_bound=bound)

    def hooks(self, moe: ToMoEForCausalLM) -> Iterator[RemovableHandle]:
        """Hook the layers of the converted model; every run is then counted."""
        mlps = moe.mlps()
        for i in self.routers:
            yield mlps[i].register_forward_pre_hook(partial(self._note, i), with_kwargs=True)

    @torch.no_grad()
    def _note(self, i: int, mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(mlp, ToMoEMLP)
        x = input_of(args, kwargs).flatten(0, -2).float()
        router = self.routers[i]
        logits = mlp.router(x).float()
        ours = torch.zeros_like(logits).scatter_(1, route(logits, mlp.top_k)[0], 1.0)
        ids, weights = router.choose(x)
        # experts of zeros stand behind the others
        stored = max(mlp.num_experts, int(ids.max()) + 1)
        chosen = logits.new_zeros(len(x), stored).scatter_(1, ids, 1.0)[:, : mlp.num_experts]
        least_chosen = logits.masked_fill(chosen == 0, torch.inf).amin(1)
        best_left = logits.masked_fill(chosen == 1, -torch.inf).amax(1)
        furthest = float((best_left - least_chosen).amax().clamp_min(0))
        eps = router.largest / max(float(mlp.router.weight.abs().amax()), 1e-30)
        found = self.found
        same = round(found.same * found.choices) + int((chosen == ours).all(1).sum())
        found.choices += len(x)
        found.same = same / found.choices
        if furthest > found.furthest_logits:
            found.furthest_logits, found.layer = furthest, i
        found.furthest = max(found.furthest, furthest * eps / router.form.rounding)
        found.weight_error = max(found.weight_error, float((weights.float() - 1).abs().amax()))


@dataclass(frozen=True)
class Proof:
    """How far the export's predictions are from the converted model's.

    problem: what is wrong with them; how: "float32 in transformers"; written: what both write after one prompt; far: on
    tokens beyond windows and the original context; stored: if the proof ran in another dtype. Of fine-grained experts:
    routers, and all_experts, if there was room to run them; then `agreement`, with the planned experts, may be off by what
    ties of routers cost.
    """

    agreement: Agreement
    problem: str | None
    how: str
    written: dict[str, str] | None = None
    far: Sequence[FarAgreement] = field(default=(), kw_only=True)
    stored: StoredRun | None = field(default=None, kw_only=True)
    routers: RouterAgreement | None = field(default=None, kw_only=True)
    all_experts: Agreement | None = field(default=None, kw_only=True)

    @property
    def result(self) -> str:
        far = "".join(f"; {f.what} largest difference {f.agreement.largest_difference:.2g}" for f in self.far)
        return self._compared() + far + (f"; {self.stored.result}" if self.stored else "")

    def _compared(self) -> str:
        a = self.agreement
        every = self.all_experts
        perplexities = f"perplexity {a.perplexity:.4f} (converted folder: {a.reference_perplexity:.4f})"
        end = f"{perplexities}, {a.positions:,} positions, {self.how}"
        if self.routers is None:
            return (
                f"largest difference {a.largest_difference:.2g} (largest logit {a.largest_logit:.1f}), expected difference of a "
                f"log-prob {a.expected_difference:.2g}, KL {a.kl:.2g} nats, same top-1 {a.top1_agreement:.2%}, {end}"
            )
        with_all = "it was not run with all experts, for lack of disk space"
        if every is not None:
            with_all = (
                f"with all experts largest difference {every.largest_difference:.2g} (largest logit "
                f"{every.largest_logit:.1f}), KL {every.kl:.2g} nats, same top-1 {every.top1_agreement:.2%}"
            )
        return f"{with_all}; {self.routers.result}; with the planned experts KL {a.kl:.2g} nats, {end}"

    def to_dict(self) -> dict[str, Any]:
        """Serialize for export.json."""
        outcome = {"same": self.problem is None, "problem": self.problem, "how": self.how, **asdict(self.agreement)}
        if self.routers is not None:
            every = self.all_experts
            outcome |= {"routers": asdict(self.routers), "all_experts": None if every is None else asdict(every)}
        outcome["far"] = [asdict(far) for far in self.far]
        outcome["as_stored"] = self.stored and asdict(self.stored)
        return outcome | ({"written": self.written} if self.written else {})


@dataclass(frozen=True)
class Check:
    """How an export is verified; stored: the dtype of the converted folder's weights; far: tokens run besides the text; offload:
    whether the layers of all models stay on disk."""

    text: EvaluationText
    dtype: str
    stored: torch.dtype
    device: str
    on_progress: ProgressCallback
    far: Sequence[FarTokens] = ()
    offload: bool = False

    @property
    def how(self) -> str:
        return f"{self.dtype} in transformers {transformers.__version__}"

    def load(self, folder: Path) -> Any:
        """Load an export from its folder."""
        return load_dense(str(folder), getattr(torch, self.dtype), pick_device(self.device), offload=self.offload)

    def converted(self, folder: Path) -> ToMoEForCausalLM:
        """Load the converted model from its folder."""
        return load_moe(folder, self.dtype, self.device, self.offload)

    def run(self, model: Any, what: str) -> Recorded:
        """Record a model's predictions for the text."""
        sequences = self.text.sequences
        return record(
            model, sequences.input_ids, sequences.mask, stage_callback(self.on_progress, f"running the {what}")
        )

    def agree(self, reference: Recorded, predicted: Recorded) -> Agreement:
        return agree(reference, predicted, self.text.sequences.input_ids, self.text.sequences.mask)

    @property
    def bounds(self) -> Bounds:
        """Return how far an export may be off in this dtype."""
        return BOUNDS[self.dtype]

    def run_far(self, model: Any) -> list[Float[Tensor, "t V"]]:
        """Return a model's predictions for the last of the far tokens."""
        with evaluating(model):
            return [far.run(model) for far in self.far]

    def agree_far(self, reference: Sequence[Tensor], predicted: Sequence[Tensor]) -> list[FarAgreement]:
        """Compare the predictions of two models for them; the true next token does not matter, so the predicted one is used."""

        def positions(ours: Tensor, theirs: Tensor) -> Iterator[list[Positions]]:
            yield from ([(a[None], b[None], a.argmax(-1)[None])] for a, b in zip(ours, theirs, strict=True))

        return [
            FarAgreement(far.what, far.ids.shape[1], summarize(positions(ours, theirs)))
            for far, ours, theirs in zip(self.far, reference, predicted, strict=True)
        ]

    def far_problem(self, far: Sequence[FarAgreement]) -> str | None:
        """Say what is wrong with the first bad one of these, as half a sentence; None if nothing is."""
        bounds = Bounds(self.bounds.difference, max(self.bounds.kl, FAR_KL))
        problems = ((f.what, judge(f.agreement, bounds, "at a typical position")) for f in far)
        return next((f"{what} {problem}" for what, problem in problems if problem), None)

    def place(self, reference: Callable[[], Any], exported: Callable[[], Any]) -> str:
        """Say where two models that predict differently begin to differ."""
        longest = int(self.text.sequences.mask.sum(1).argmax())
        ids = self.text.sequences.input_ids[longest : longest + 1]
        ids = ids if not self.far else self.far[0].ids
        ours, theirs = (layer_outputs(load(), ids) for load in (reference, exported))
        return first_difference(ours, theirs, LAYER_DIFFERENCE)

    def run_as_stored(self, out: Path, proved: Recorded) -> StoredRun | None:
        """Run a few tokens as a user's loading will, if the proof (`proved`) ran in another dtype."""
        if self.stored == getattr(torch, self.dtype):
            return None
        ids, mask = self.text.sequences.input_ids, self.text.sequences.mask
        longest = int(mask.sum(1).argmax())
        ids, mask = (t[longest : longest + 1, :STORED_TOKENS] for t in (ids, mask))
        kl: float | None = None
        error: str | None = None
        exported = load_dense(str(out), self.stored, pick_device(self.device), offload=self.offload)
        try:
            kl = agree(Recorded(proved.head, [proved.states[longest]]), record(exported, ids, mask), ids, mask).kl
        # a product that takes no such dtype or size; numbers that are not finite
        except (RuntimeError, ValueError, TypeError, UserError) as failure:
            error = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
        return StoredRun(str(self.stored).removeprefix("torch."), int(mask.sum()), kl, error)


def verify_exactly(folder: Path, out: Path, check: Check) -> Proof:
    """Run the converted model and the export on the same tokens, one after the other, and check that they predict the same."""

    exported = check.load(out)
    predicted, predicted_far = check.run(exported, "export"), check.run_far(exported)
    del exported
    stored = check.run_as_stored(out, predicted)
    moe = check.converted(folder)
    agreement = check.agree(check.run(moe, "converted"), predicted)
    far = check.agree_far(check.run_far(moe), predicted_far)
    del moe
    problem = judge(agreement, check.bounds) or check.far_problem(far)
    if problem is not None:
        problem = f"{problem}; {check.place(lambda: check.converted(folder), lambda: check.load(out))}"
    return Proof(agreement, problem or (stored.problem if stored else None), check.how, far=far, stored=stored)


def parts_problems(planned: Agreement, all_experts: Agreement | None, bounds: Bounds) -> tuple[str | None, str | None]:
    """Say what is wrong with all experts, if they ran, and with the planned ones beyond router ties; None if nothing is."""
    with_all = None if all_experts is None else judge(all_experts, bounds)
    with_planned = judge(planned, Bounds(None, max(bounds.kl, PLANNED_KL)))
    return (
        f"with all experts {with_all}" if with_all else None,
        f"with the planned experts {with_planned}" if with_planned else None,
    )


def use_all_experts_(moe: ToMoEForCausalLM) -> ToMoEForCausalLM:
    """Make tokens use all fine-grained experts: then routing does not matter."""
    setattr(moe.config, moe.config.top_k_key, moe.config.tomoe_num_experts)
    return moe


def verify_by_parts(
    folder: Path,
    out: Path,
    check: Check,
    routers_of: Callable[[Any], Mapping[int, StockRouter]],
    with_all_experts_: Callable[[Any], Any],
) -> Proof:
    """Run the converted model and the export on the same tokens, one after the other, and compare them part by part."""

    def converted() -> ToMoEForCausalLM:
        return use_all_experts_(check.converted(folder))

    def everything() -> Any:
        return with_all_experts_(check.load(out))

    exported = check.load(out)
    predicted = check.run(exported, "export")
    routers = RouterCheck(routers_of(exported))
    del exported
    stored = check.run_as_stored(out, predicted)
    moe = check.converted(folder)
    with hooked(routers.hooks(moe)):
        reference = check.run(moe, "converted")
    agreement = check.agree(reference, predicted)
    use_all_experts_(moe)
    reference, reference_far = check.run(moe, "converted"), check.run_far(moe)
    del moe
    exported = everything()
    all_experts = check.agree(reference, check.run(exported, "export"))
    far = check.agree_far(reference_far, check.run_far(exported))
    del exported
    with_all, planned = parts_problems(agreement, all_experts, check.bounds)
    differs = with_all or check.far_problem(far)
    if differs is not None:
        differs = f"{differs}; {check.place(converted, everything)}"
    agreed = routers.found
    problem = agreed.problem or differs or planned or (stored.problem if stored else None)
    return Proof(agreement, problem, check.how, far=far, stored=stored, routers=agreed, all_experts=all_experts)
