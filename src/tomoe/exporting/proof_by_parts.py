"""The proof of an export whose router may choose otherwise where two experts are almost tied.

A model answers such choices with other numbers from there on, as it does if it runs in bfloat16. So its parts are proved:
everything but the routers by predictions with all experts, the routers one by one on the inputs that they have in the
converted model. What both predict with the planned experts is told, not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.exporting.fine_grained import experts_per_token
from tomoe.exporting.verification import Agreement, Bounds, Check, Proof, first_problem, judge
from tomoe.model.hooks import hooked, input_of
from tomoe.moe.checkpoint import load_moe
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP, route

# Weights of fine-grained experts are off 1 by up to 2^-10, in every layer.
FINE_DIFFERENCE = 2e-3
# Of the choices of a stock router, those that must be the converted model's. One in thirty is a tie at most, as seen.
SAME_CHOICES = 0.9
# Logits that decide otherwise, in units of what float32 can round in both of them.
TIES = 2.0
WEIGHTS = 2.0**-8

StockRouter = tuple[Float[Tensor, "n D"], Float[Tensor, " n"]]
"""Weight and correction of the choice, of a layer."""


@dataclass(frozen=True)
class RouterAgreement:
    """Routers of the converted model and of the export, on the same inputs.

    choices: tokens times layers; same: share of them in which both choose the same experts; furthest_logits: by how much the
    logit of an expert that the export leaves out is above that of one that it chooses, at most; furthest: the same in units of
    2^-20 / eps, what rounding can do; weight_error: largest distance of a weight from 1; layer: with the furthest choice.
    """

    choices: int
    same: float
    furthest_logits: float
    furthest: float
    weight_error: float
    layer: int = 0

    @property
    def problem(self) -> str | None:
        """What is wrong, as half a sentence; None if choices and weights are within the bounds."""
        if self.same < SAME_CHOICES:
            return (
                f"its routers choose other experts in {1 - self.same:.1%} of the cases, ties are at most {1 - SAME_CHOICES:.0%} "
                f"(layer {self.layer} is the furthest off)"
            )
        if not self.furthest <= TIES:
            return (
                f"its routers choose an expert whose logit is {self.furthest_logits:.2g} lower than that of another, in layer "
                f"{self.layer}"
            )
        if not self.weight_error <= WEIGHTS:
            return f"the weights of its experts are off 1 by up to {self.weight_error:.2g}, the limit is {WEIGHTS:.2g}"
        return None


class RouterCheck:
    """Compares the routers of an export with those of the converted model while that one runs."""

    def __init__(self, routers: Mapping[int, StockRouter], top_k: int):
        self.routers, self.top_k = routers, top_k
        self.choices = self.same = 0
        self.furthest_logits = self.furthest = self.weight_error = 0.0
        self.layer = 0

    def hooks(self, moe: ToMoEForCausalLM) -> Iterator[RemovableHandle]:
        """Hooks on the layers of the converted model, each run of which is then counted."""
        for i in self.routers:
            yield moe.model.layers[i].mlp.register_forward_pre_hook(partial(self._note, i), with_kwargs=True)

    @torch.no_grad()
    def _note(self, i: int, mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(mlp, ToMoEMLP)
        x = input_of(args, kwargs).flatten(0, -2).float()
        logits = mlp.router(x).float()
        ours = torch.zeros_like(logits).scatter_(1, route(logits, experts_per_token(mlp))[0], 1.0)
        weight, corrections = (t.to(x.device) for t in self.routers[i])
        scores = (x @ weight.t()).sigmoid()
        chosen = torch.zeros_like(scores).scatter_(1, (scores + corrections).topk(self.top_k, dim=1).indices, 1.0)
        chosen = chosen[:, : mlp.num_experts]
        off = (2.0 * scores[:, : mlp.num_experts] - 1).abs() * chosen
        least_chosen = logits.masked_fill(chosen == 0, torch.inf).amin(1)
        best_left = logits.masked_fill(chosen == 1, -torch.inf).amax(1)
        furthest = float((best_left - least_chosen).amax().clamp_min(0))
        eps = float(weight.abs().amax()) / max(float(mlp.router.weight.abs().amax()), 1e-30)
        self.choices += len(x)
        self.same += int((chosen == ours).all(1).sum())
        if furthest > self.furthest_logits:
            self.furthest_logits, self.layer = furthest, i
        self.furthest = max(self.furthest, furthest * eps * 2**20)
        self.weight_error = max(self.weight_error, float(off.amax()))

    def result(self) -> RouterAgreement:
        """What was counted."""
        same = self.same / max(1, self.choices)
        return RouterAgreement(self.choices, same, self.furthest_logits, self.furthest, self.weight_error, self.layer)


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
        difference = None if bounds.difference is None else FINE_DIFFERENCE
        wrong = None if self.all_experts is None else judge(self.all_experts, Bounds(difference, bounds.kl))
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


def use_all_experts_(moe: ToMoEForCausalLM) -> ToMoEForCausalLM:
    """Let tokens use all fine-grained experts: then no router decides."""
    moe.config.num_experts_per_tok = moe.config.num_experts
    return moe


def verify_by_parts(
    folder: Path, out: Path, check: Check, routers_of: Callable[[Any], Mapping[int, StockRouter]]
) -> ProofByParts:
    """Run the converted model and the export on the same text, one after the other, and compare them part by part."""
    exported = check.load(out)
    predicted = check.run(exported, "export")
    routers = RouterCheck(routers_of(exported), exported.config.num_experts_per_tok)
    experts = exported.config.n_routed_experts
    del exported
    stored = check.run_as_stored(out, predicted)
    moe = load_moe(folder, check.dtype, check.device)
    with hooked(routers.hooks(moe)):
        reference = check.run(moe, "converted")
    agreement = check.agree(reference, predicted)
    use_all_experts_(moe)
    reference, reference_far = check.run(moe, "converted"), check.run_far(moe)
    del moe
    exported = check.load(out, experts)
    whole = check.agree(reference, check.run(exported, "export"))
    far = check.agree_far(reference_far, check.run_far(exported))
    del exported
    parts = PartsAgreement(whole, routers.result())
    bounds = replace(check.bounds, difference=check.bounds.difference and FINE_DIFFERENCE)
    differs = first_problem([parts.all_experts_problem(check.bounds), *(f.problem(bounds) for f in far)])
    if differs is not None:
        converted = partial(load_moe, folder, check.dtype, check.device)
        place = check.place(lambda: use_all_experts_(converted()), lambda: check.load(out, experts))
        differs = f"{differs}; {place}"
    problem = first_problem([parts.routers.problem, differs, stored.problem if stored else None])
    return ProofByParts(agreement, problem, check.how, far=far, stored=stored, fine=parts)
