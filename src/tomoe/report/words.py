"""The report's words for each kind of plan: `words_of` returns an object for each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tomoe.plans import FINETUNED, AnyPlan, InputsPlan, Plan

DIMS = {"qk_dims": "Q/K dims", "value_dims": "V/O dims"}


class FormWords(ABC):
    """drawing: of the method, among the templates, and what it shows; product: what a dense model becomes; used: the contents of
    a layer, in a word or two; fitted: what text decides; measured: what the figure of the layers shows shares of; titles: of
    columns of `plan.describe()`."""

    drawing: ClassVar[str]
    drawn: ClassVar[str]
    titles: ClassVar[Mapping[str, str]]
    product: ClassVar[str] = "a Mixture-of-Experts"
    used: ClassVar[str] = "Experts"
    fitted: ClassVar[str] = "experts and routers"
    measured: ClassVar[str] = "of the neurons or dims"

    @abstractmethod
    def experts(self, plan: Any) -> str:
        """Describe a layer and how much of it a token uses, for the summary."""

    @abstractmethod
    def card(self, plan: Any, adjustable: bool) -> str:
        """Describe the same for the card, continuing "in every layer"; adjustable: whether other numbers can be asked for."""

    def bars(self, plan: Any) -> dict[str, list[float]]:
        """Return, per layer, nested parts of the MLP as shares of its neurons, the largest first."""
        return {}

    def lines(self, plan: Any) -> dict[str, list[float]]:
        """Return, per layer, a token's shares of everything else: of the dims of a head, where attention is pruned."""
        full = plan.shape.head_dim
        cut = {name: [widths[column] for widths in plan.widths()] for column, name in enumerate(DIMS.values(), 1)}
        return {name: [n / full for n in dims] for name, dims in cut.items() if min(dims) < full}


class FineWords(FormWords):
    drawing = "method.svg"
    drawn = (
        "The neurons of a dense MLP, all of which every token uses, are sorted into a shared part and small experts. Each token "
        "uses the shared part and the few experts that a router chooses for it."
    )
    titles = {
        "shared": "shared part",
        "expert_size": "expert size",
        "top_k": "of a token",
        "width": "neurons of a token",
        "width_share": "of neurons",
        **DIMS,
    }

    def experts(self, plan: Plan) -> str:
        widths = [layer.width for layer in plan.counts]
        size = plan.shape.mlp_size
        shared, sizes = ([getattr(layer, name) for layer in plan.counts] for name in ("shared_size", "expert_size"))
        always = max(layer.always_used for layer in plan.counts)
        same = f" (up to {always} of them the same ones for all tokens)" if always else ""
        return (
            f"fine-grained: in each layer a part of {span(shared)} neurons that all tokens share, and {plan.num_experts} experts "
            f"of {span(sizes)}, {span([layer.top_k for layer in plan.counts])} of which each token uses{same}: "
            f"{span(widths)} of {size:,} neurons; every neuron is in one expert or in the shared part"
        )

    def card(self, plan: Plan, adjustable: bool) -> str:
        number = "a number at load time (`num_experts_per_tok`)" if adjustable else "fixed in this form"
        return (
            f"each token uses a shared\npart and the experts that a small router chooses among {plan.num_experts}, and every "
            f"neuron of the dense model's MLP is in one of\nthese. How many experts a token uses is {number}"
        )

    def bars(self, plan: Plan) -> dict[str, list[float]]:
        layers = plan.describe()
        size = plan.shape.mlp_size
        return {
            "other experts": [1.0] * len(layers),
            "experts that a token chooses": [row["width_share"] for row in layers],
            "shared by all tokens": [row["shared"] / size for row in layers],
        }


class OverlappingWords(FormWords):
    drawing = "method-overlapping.svg"
    drawn = (
        "The neurons of a dense MLP, all of which every token uses, are gathered into experts that share neurons. Each token "
        "uses the one expert that a router chooses for it; neurons of no expert are dropped."
    )
    titles = {"width": "expert width", "width_share": "of neurons", "union_share": "in any expert", **DIMS}

    def experts(self, plan: Plan) -> str:
        widths = [layer.width for layer in plan.counts]
        size = plan.shape.mlp_size
        unions = [layer.union for layer in plan.counts]
        return (
            f"{plan.num_experts} per layer, one for each token, {span(widths)} of {size:,} neurons wide; "
            f"they share neurons, {sum(unions) / len(unions) / size:.1%} of which are in use"
        )

    def card(self, plan: Plan, adjustable: bool) -> str:
        return (
            f"a small router\nsends each token to one of {plan.num_experts} experts, and each expert is a subset of the dense "
            "model's MLP neurons"
        )

    def bars(self, plan: Plan) -> dict[str, list[float]]:
        layers = plan.describe()
        return {
            "in no expert": [1.0] * len(layers),
            f"in any of the {plan.num_experts} experts": [row["union_share"] for row in layers],
            "in the expert of a token": [row["width_share"] for row in layers],
        }


class StaticWords(FormWords):
    drawing = "method-static.svg"
    drawn = (
        "The neurons of a dense MLP, all of which every token uses. Some are kept, the same for every token, and the others "
        "are gone."
    )
    product = "a narrower dense model"
    used = "Neurons"
    fitted = "the neurons that are kept"
    measured = "of the neurons"
    titles = {"width": "neurons", "width_share": "of neurons", **DIMS}

    def experts(self, plan: Plan) -> str:
        widths = [layer.width for layer in plan.counts]
        return f"{span(widths)} of {plan.shape.mlp_size:,} in each layer, the same for every token"

    def card(self, plan: Plan, adjustable: bool) -> str:
        widths = [layer.width for layer in plan.counts]
        kept = f"{span(widths)} of its {plan.shape.mlp_size:,} neurons"
        return f"the MLP keeps\n{kept}, the same for every token, and the others are gone"

    def bars(self, plan: Plan) -> dict[str, list[float]]:
        layers = plan.describe()
        return {"dropped": [1.0] * len(layers), "kept": [row["width_share"] for row in layers]}


class InputsWords(FormWords):
    drawing = "method-inputs.svg"
    drawn = (
        "The inputs of a projection, all of which a dense model uses for every token. Each token uses those that weigh most "
        "for it, and only their columns of the weights are read."
    )
    product = "a model that uses the largest inputs of its projections"
    used = "What a token uses"
    measured = "of its inputs"
    titles = {"attention": "Q, K, V", "output": "attention output", "up": "gate and up", "down": "down"}

    def experts(self, plan: InputsPlan) -> str:
        used = plan.inputs()
        shares = ", ".join(
            f"{sum(used[kind]) / sum(plan.widths[kind]):.0%} of those of {self.titles[kind]}" for kind in plan.names
        )
        weights = "" if FINETUNED in plan.notes else " The weights are the dense model's."
        return (
            f"the inputs of each projection with the largest |x| times the norm of their column: on average {shares}.{weights} "
            "Every token chooses, in prompts and batches, too"
        )

    def card(self, plan: InputsPlan, adjustable: bool) -> str:
        return (
            "each token\nuses the inputs of a projection that are largest times the norm of their column, and the rows of the "
            "matrices\nthat belong to the others are not read in decoding. Prompts and batches choose, too; loaded with "
            '`tomoe_prompts="whole"`,\npasses of more than four tokens use all inputs, as the dense model does, which was '
            "not measured here. How many\na token uses is a number at load time (`tomoe_active`)"
        )

    def lines(self, plan: InputsPlan) -> dict[str, list[float]]:
        rows = plan.describe()
        return {
            self.titles[kind]: [math.nan if row[kind] is None else row[kind] for row in rows] for kind in plan.names
        }


WORDS: dict[str, FormWords] = {"fine": FineWords(), "overlapping": OverlappingWords(), "inputs": InputsWords()}


def words_of(plan: AnyPlan) -> FormWords:
    """Return the words for a plan."""
    return StaticWords() if isinstance(plan, Plan) and plan.is_static else WORDS[plan.form]


def span(numbers: Sequence[int]) -> str:
    """Format the smallest and the largest, or one number if they are equal."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
