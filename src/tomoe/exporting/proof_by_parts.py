"""The proof of an export whose router may choose otherwise where two experts are almost tied.

A model answers such choices with other numbers from there on, as it does if it runs in bfloat16. So its parts are proved:
everything but the routers by predictions with all experts, the routers one by one on the inputs that they have in the
converted model. With the planned experts, both may differ by what such ties cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.exporting.stock.routers import RouterForm
from tomoe.exporting.verify import Agreement, Bounds, Check, Proof, first_problem, judge
from tomoe.model.hooks import hooked, input_of
from tomoe.moe.checkpoint import load_moe
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP, route

# Of the choices of a stock router, those that must be the converted model's. One in thirty is a tie at most, as seen.
SAME_CHOICES = 29 / 30
# KL of predictions with the planned experts, in nats: what ties may cost. 1.3e-3 was seen in float32 on 256 tokens; experts
# that stand in another order than their routers count them cost far more, and nothing else shows them.
PLANNED_KL = 0.05
# Logits that decide otherwise, in units of what rounding can do.
TIES = 2.0


@dataclass(frozen=True)
class StockRouter:
    """The router of a layer as an export has it.

    choose: experts [T, k], and how much of their outputs is added, where 1 is right, for inputs [T, D] of the MLP; largest:
    of its weights u, absolute.
    """

    form: RouterForm
    choose: Callable[[Tensor], tuple[Tensor, Tensor]]
    largest: float


@dataclass(frozen=True)
class RouterAgreement:
    """Routers of the converted model and of the export, on the same inputs.

    choices: tokens times layers; same: share of them in which both choose the same experts; furthest_logits: by how much the
    logit of an expert that the export leaves out is above that of one that it chooses, at most; furthest: the same in units of
    what rounding can do; weight_error: largest distance of a weight from 1; weight_bound: what it may be; layer: with the
    furthest choice.
    """

    choices: int
    same: float
    furthest_logits: float
    furthest: float
    weight_error: float
    weight_bound: float
    layer: int = 0

    @property
    def problem(self) -> str | None:
        """What is wrong, as half a sentence; None if choices and weights are within the bounds."""
        if self.same < SAME_CHOICES:
            return (
                f"its routers choose other experts in {1 - self.same:.1%} of the cases, ties are at most {1 - SAME_CHOICES:.1%} "
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
    """Compares the routers of an export with those of the converted model while that one runs."""

    def __init__(self, routers: Mapping[int, StockRouter]):
        self.routers = routers
        self.choices = self.same = 0
        self.furthest_logits = self.furthest = self.weight_error = self.weight_bound = 0.0
        self.layer = 0

    def hooks(self, moe: ToMoEForCausalLM) -> Iterator[RemovableHandle]:
        """Hooks on the layers of the converted model, each run of which is then counted."""
        mlps = moe.mlps()
        for i in self.routers:
            yield mlps[i].register_forward_pre_hook(partial(self._note, i), with_kwargs=True)

    @torch.no_grad()
    def _note(self, i: int, mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(mlp, ToMoEMLP)
        x, router = input_of(args, kwargs).flatten(0, -2).float(), self.routers[i]
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
        self.choices += len(x)
        self.same += int((chosen == ours).all(1).sum())
        if furthest > self.furthest_logits:
            self.furthest_logits, self.layer = furthest, i
        self.furthest = max(self.furthest, furthest * eps / router.form.rounding)
        self.weight_error = max(self.weight_error, float((weights.float() - 1).abs().amax()))
        self.weight_bound = router.form.weight_error

    def result(self) -> RouterAgreement:
        """What was counted."""
        return RouterAgreement(
            self.choices, self.same / max(1, self.choices), self.furthest_logits, self.furthest, self.weight_error,
            self.weight_bound, self.layer,
        )  # fmt: skip


@dataclass(frozen=True)
class PartsAgreement:
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

    def all_experts_problem(self, bounds: Bounds) -> str | None:
        """What is wrong with all experts, as half a sentence; None if it is within the bounds."""
        wrong = None if self.all_experts is None else judge(self.all_experts, bounds)
        return f"with all experts {wrong}" if wrong else None

    def problem(self, bounds: Bounds) -> str | None:
        """What is wrong, as half a sentence; None if it is within the bounds."""
        return self.routers.problem or self.all_experts_problem(bounds)


@dataclass(frozen=True)
class ProofByParts(Proof):
    """The proof of an export whose parts were compared one by one."""

    fine: PartsAgreement = field(kw_only=True)

    @property
    def compared(self) -> str:
        a = self.agreement
        planned = f"with the planned experts KL {a.kl:.2g} nats, {self.perplexities}"
        return f"{self.fine.result}; {planned}; {a.positions:,} positions, {self.how}"

    def parts(self) -> dict[str, Any]:
        all_experts = self.fine.all_experts
        return {"routers": asdict(self.fine.routers), "all_experts": all_experts and all_experts.to_dict()}


def planned_problem(agreement: Agreement, bounds: Bounds) -> str | None:
    """What is wrong with the predictions of the planned experts, as half a sentence; None if ties of routers may explain it."""
    wrong = judge(agreement, Bounds(None, max(bounds.kl, PLANNED_KL)))
    return f"with the planned experts {wrong}" if wrong else None


def use_all_experts_(moe: ToMoEForCausalLM) -> ToMoEForCausalLM:
    """Let tokens use all fine-grained experts: then no router decides."""
    setattr(moe.config, moe.config.top_k_key, moe.config.tomoe_num_experts)
    return moe


def verify_by_parts(
    folder: Path,
    out: Path,
    check: Check,
    routers_of: Callable[[Any], Mapping[int, StockRouter]],
    with_all_experts_: Callable[[Any], Any],
) -> ProofByParts:
    """Run the converted model and the export on the same tokens, one after the other, and compare them part by part."""

    def converted() -> ToMoEForCausalLM:
        return use_all_experts_(load_moe(folder, check.dtype, check.device))

    def everything() -> Any:
        return with_all_experts_(check.load(out))

    exported = check.load(out)
    predicted = check.run(exported, "export")
    routers = RouterCheck(routers_of(exported))
    del exported
    stored = check.run_as_stored(out, predicted)
    moe = load_moe(folder, check.dtype, check.device)
    with hooked(routers.hooks(moe)):
        reference = check.run(moe, "converted")
    agreement = check.agree(reference, predicted)
    use_all_experts_(moe)
    reference, reference_far = check.run(moe, "converted"), check.run_far(moe)
    del moe
    exported = everything()
    whole = check.agree(reference, check.run(exported, "export"))
    far = check.agree_far(reference_far, check.run_far(exported))
    del exported
    parts = PartsAgreement(whole, routers.result())
    differs = first_problem([parts.all_experts_problem(check.bounds), *(f.problem(check.bounds) for f in far)])
    if differs is not None:
        differs = f"{differs}; {check.place(converted, everything)}"
    planned = planned_problem(agreement, check.bounds)
    problem = first_problem([parts.routers.problem, differs, planned, stored.problem if stored else None])
    return ProofByParts(agreement, problem, check.how, far=far, stored=stored, fine=parts)
