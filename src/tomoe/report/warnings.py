"""What should make a user stop and look, in plain sentences: found in the plan, in the routing and in what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tomoe.evaluation.compare import Row
from tomoe.evaluation.usage import ExpertUsage
from tomoe.plan import Plan
from tomoe.report.summary import recipe_of

Kind = Literal[
    "dead experts", "overloaded expert", "narrow attention", "unused neurons", "budget missed", "training text", "context"
]  # fmt: skip

ENOUGH = 500  # tokens for each expert: in a page or two of one article, one that got none is not dead
OVERLOADED = 0.5  # share of a layer's tokens that one of three or more experts gets
NARROW = 1 / 8  # share of the dims of a head that is left
UNION = 0.75  # share of a layer's neurons that some expert uses
BUDGET = 0.002  # of the block parameters, as extraction promises
OVERLAP = (
    0.05  # share of the evaluation tokens that stand in the training text too; instructions repeat each other a little
)


@dataclass(frozen=True)
class Finding:
    """One warning. `kind` is for programs, `text` for people: a sentence without full stop that names layers and numbers."""

    kind: Kind
    text: str


def find_warnings(plan: Plan | None = None, rows: Sequence[Row] = ()) -> list[Finding]:
    """Everything worth a warning in a conversion: its plan, and the rows that `compare` measured for it, if any.

    Pure: the same plan and rows give the same findings, in the same order, and nothing is run.
    """
    found = [] if plan is None else [*_budget(plan), *_attention(plan), *_union(plan), *_fitted_context(plan)]
    for row in rows:
        found += [*_routing(row.usage), *_overlap(row), *_context(row)]
    return list(dict.fromkeys(found))  # what is wrong with the text is wrong for every row


def _budget(plan: Plan) -> list[Finding]:
    recipe, active = recipe_of(plan), plan.active_fraction()
    if recipe is None or abs(active - recipe.active) <= BUDGET:
        return []
    text = f"{active:.1%} of the block parameters are active, but {recipe.active:.1%} were asked for"
    return [Finding("budget missed", text)]


def _attention(plan: Plan) -> list[Finding]:
    found, dims = [], plan.shape.head_dim
    for name, column in (("Q/K", 1), ("V/O", 2)):
        kept = {i: widths[column] for i, widths in enumerate(plan.widths()) if widths[column] <= NARROW * dims}
        if kept:
            least = _least(kept)
            text = (
                f"{_layers(kept)}: hardly anything is left of {name} (layer {least}: {kept[least]} of {dims} dims); "
                "attention there sees next to nothing"
            )
            found.append(Finding("narrow attention", text))
    return found


def _union(plan: Plan) -> list[Finding]:
    shares = {i: layer.union / plan.shape.mlp_size for i, layer in enumerate(plan.layers)}
    low = {i: share for i, share in shares.items() if share < UNION}
    if not low:
        return []
    least = _least(low)
    text = (
        f"{_layers(low)}: many neurons are in no expert (layer {least}: only {low[least]:.0%} are in use); "
        "what they knew is lost for every token"
    )
    return [Finding("unused neurons", text)]


def _fitted_context(plan: Plan) -> list[Finding]:
    recipe, highest = recipe_of(plan), plan.dense_config.get("max_position_embeddings")
    if recipe is None or not isinstance(highest, int) or recipe.data.block_size <= highest:
        return []
    text = f"it was fitted on blocks of {recipe.data.block_size:,} tokens, but the model is made for {highest:,}"
    return [Finding("context", text)]


def _routing(usage: ExpertUsage | None) -> list[Finding]:
    found: list[Finding] = []
    if usage is None or usage.tokens < ENOUGH * max(map(len, usage.shares)):
        return found
    for layer, row in enumerate(usage.shares):
        dead = [n for n, share in enumerate(row) if share == 0]
        if dead:
            name = f"expert {dead[0]}" if len(dead) == 1 else "experts " + ", ".join(map(str, dead))
            found.append(Finding("dead experts", f"layer {layer}: {name} got none of the {usage.tokens:,} tokens"))
        # one of two experts nearly always has more than half
        if len(row) > 2 and max(row) > OVERLOADED:
            text = f"layer {layer}: expert {row.index(max(row))} got {max(row):.0%} of the {usage.tokens:,} tokens"
            found.append(Finding("overloaded expert", text))
    return found


def _overlap(row: Row) -> list[Finding]:
    if row.training_overlap is None or row.training_overlap < OVERLAP:
        return []
    text = (
        f"{row.training_overlap:.1%} of the evaluation tokens stand in the text that it was fitted on, word for word; "
        "its numbers flatter it"
    )
    return [Finding("training text", text)]


def _context(row: Row) -> list[Finding]:
    m, highest = row.measurement, row.facts.get("max_positions")
    if highest is None or m.context_length <= highest:
        return []
    text = (
        f"it was measured on contexts of {m.context_length:,} tokens, but is made for {highest:,}: expect a far worse "
        "perplexity than it has"
    )
    return [Finding("context", text)]


def _least(numbers: dict[int, float] | dict[int, int]) -> int:
    return min(numbers, key=lambda i: numbers[i])


def _layers(ids: dict[int, float] | dict[int, int]) -> str:
    return f"layer {next(iter(ids))}" if len(ids) == 1 else "layers " + ", ".join(map(str, ids))
