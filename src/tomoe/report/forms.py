"""What the report says of each form of experts: `WORDS` has an object for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from tomoe.plan import Plan


class FormWords(ABC):
    """drawing: of the method, among the templates; tokens, typical, usage: notes of the page on colored tokens, on typical
    tokens and on the table of shares."""

    drawing: ClassVar[str]
    tokens: ClassVar[str]
    typical: ClassVar[str]
    usage: ClassVar[str]

    @abstractmethod
    def routing(self, plan: Plan) -> str:
        """The experts of a layer and how many of them a token uses, as a phrase."""

    @abstractmethod
    def experts(self, plan: Plan) -> str:
        """The same with widths, for the summary."""

    @abstractmethod
    def card(self, num_experts: int, dialed: bool) -> str:
        """The same for the card, where the sentence begins with "in every layer"; dialed: other numbers can be asked for."""

    @abstractmethod
    def columns(self, plan: Plan) -> tuple[list[str], list[list[str]]]:
        """Titles and cells of a table of layers that only this form has."""

    def commands(self, folder: str) -> list[tuple[str, str]]:
        """(command, what it does), of what only this form can do."""
        return []


class FineWords(FormWords):
    drawing = "method.svg"
    tokens = (
        "Every token in the color of the strongest of the experts that it chooses in a layer; point at a token for the "
        "strongest eight. Colors repeat, so tokens of one color may have different experts. The numbers of experts mean nothing "
        "from one layer to the next."
    )
    typical = " Of the experts of a token the strongest counts."
    usage = "chose each expert"

    def routing(self, plan: Plan) -> str:
        return f"a shared part and {plan.num_experts} experts, {span(_top_ks(plan))} of them for each token"

    def experts(self, plan: Plan) -> str:
        widths, size = [layer.width for layer in plan.counts], plan.shape.mlp_size
        shared, sizes = ([getattr(layer, name) for layer in plan.counts] for name in ("shared_size", "expert_size"))
        always = max(layer.always_used for layer in plan.counts)
        same = f" (up to {always} of them the same ones for all tokens)" if always else ""
        return (
            f"fine-grained: in each layer a part of {span(shared)} neurons that all tokens share, and {plan.num_experts} experts "
            f"of {span(sizes)}, {span(_top_ks(plan))} of which each token uses{same}: "
            f"{span(widths)} of {size:,} neurons; every neuron is in one expert or in the shared part"
        )

    def card(self, num_experts: int, dialed: bool) -> str:
        number = "a number at load time (`num_experts_per_tok`)" if dialed else "fixed in this form"
        return (
            f"each token uses a shared\npart and the experts that a small router chooses among {num_experts}, and every neuron "
            f"of the dense model's MLP is in one of\nthese. How many experts a token uses is {number}"
        )

    def columns(self, plan: Plan) -> tuple[list[str], list[list[str]]]:
        titles = ["shared part", "experts", "of a token", "neurons of a token", "of neurons"]
        return titles, [
            [f"{row['shared']:,}", f"{plan.num_experts} x {row['expert_size']}", str(row["top_k"]), f"{row['width']:,}",
             f"{row['width_share']:.1%}"]
            for row in plan.describe()
        ]  # fmt: skip

    def commands(self, folder: str) -> list[tuple[str, str]]:
        return [
            (f'tomoe generate {folder} "Once upon a time" --active 0.8', "Use more or fewer experts for each token"),
            (
                f"tomoe evaluate {folder} --active 0.3,0.5,0.7,1\ntomoe report {folder}",
                "Measure it with several numbers of experts, and add the curve to this page",
            ),
        ]


class OverlappingWords(FormWords):
    drawing = "method-overlapping.svg"
    tokens = (
        "Every token in the color of the expert that a layer sends it to. The numbers of experts mean nothing from one layer to "
        "the next."
    )
    typical = ""
    usage = "each expert got"

    def routing(self, plan: Plan) -> str:
        return f"{plan.num_experts} experts, one for each token"

    def experts(self, plan: Plan) -> str:
        widths, size = [layer.width for layer in plan.counts], plan.shape.mlp_size
        unions = [layer.union for layer in plan.counts]
        return (
            f"{plan.num_experts} per layer, one for each token, {span(widths)} of {size:,} neurons wide; "
            f"they share neurons, {sum(unions) / len(unions) / size:.1%} of which are in use"
        )

    def card(self, num_experts: int, dialed: bool) -> str:
        return (
            f"a small router\nsends each token to one of {num_experts} experts, and each expert is a subset of the dense model's "
            "MLP neurons"
        )

    def columns(self, plan: Plan) -> tuple[list[str], list[list[str]]]:
        titles = ["expert width", "of neurons", "in any expert"]
        return titles, [
            [f"{row['width']:,}", f"{row['width_share']:.1%}", f"{row['union_share']:.1%}"] for row in plan.describe()
        ]


WORDS: dict[str, FormWords] = {"fine": FineWords(), "overlapping": OverlappingWords()}


def _top_ks(plan: Plan) -> list[int]:
    return [layer.top_k for layer in plan.counts]


def span(numbers: Sequence[int]) -> str:
    """The smallest and the largest, or one number if they are the same."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
