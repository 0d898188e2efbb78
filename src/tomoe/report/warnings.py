"""Warnings in plain sentences, derived from the plan, the routing and the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tomoe.evaluation.results import ExpertUsage, Row
from tomoe.plans import AnyPlan, InputsPlan, Plan
from tomoe.plans.partition.layouts import tolerance_of
from tomoe.recipe.target_rules import TARGET_RULES
from tomoe.report.summary import recipe_of

ENOUGH = 500  # tokens for each expert: in a page or two of one article, one that got none is not dead
OVERLOADED = 0.5  # share of a layer's tokens that one of three or more experts gets
# how far a layer's choices fall on as many fine-grained experts as a token chooses: 0 if use is even, 1 if all tokens
# choose the same. The share itself is high where a token chooses most of the experts, whatever the router does.
COLLAPSED = 0.9
NAMED = 8  # dead experts that a warning names
NARROW = 1 / 8  # share of the dims of a head that is left
UNION = 0.75  # share of a layer's neurons that some expert uses
# share of the evaluation tokens that stand in the training text too; instructions repeat each other a little
OVERLAP = 0.05
FEW_SEQUENCES = 8  # sequences of the evaluation text; with fewer the standard error itself is a guess


@dataclass(frozen=True)
class Finding:
    """One warning. `kind` is for programs, `text` for people: a sentence without full stop that names layers and numbers."""

    kind: str
    text: str


def find_warnings(plan: AnyPlan | None = None, rows: Sequence[Row] = ()) -> list[Finding]:
    """Find all warnings about a plan and the rows that `compare` measured, if any, in a fixed order. Raises UserError if the
    plan's recipe is damaged."""
    findings: list[Finding] = []
    if plan is not None:
        findings += [*_budget(plan), *_fitted_context(plan)]
    of_experts = None if isinstance(plan, InputsPlan) else plan
    if of_experts is not None:
        findings += [*_attention(of_experts), *_union(of_experts), *_training(of_experts)]
    for row in rows:
        findings += [*_routing(row.usage, of_experts), *_measured(row)]
    return list(dict.fromkeys(findings))  # what is wrong with the text is wrong for every row


def find_worsening(before: Row, after: Row) -> list[Finding]:
    """Warn if an improved model is further from the dense one, on the same text, than the model it started from."""
    was, now = before.measurement.kl, after.measurement.kl
    if was is None or now is None or now <= was:
        return []
    text = f"it is further from the dense model than {before.name}, what it was made from: KL {now:.4f} instead of {was:.4f}"
    return [Finding("worse than before", text)]


def _budget(plan: AnyPlan) -> Iterator[Finding]:
    recipe = recipe_of(plan)
    active = plan.active_fraction()
    if isinstance(plan, Plan) and recipe is not None:
        active = plan.active_fraction(recipe.counts_routers)
    if recipe is not None and abs(active - recipe.active) > tolerance_of(TARGET_RULES[recipe.target]):
        text = f"{active:.1%} of the decoder parameters are active, but the recipe asks for {recipe.active:.1%}"
        yield Finding("budget missed", text)


def _attention(plan: Plan) -> Iterator[Finding]:
    dims = plan.shape.head_dim
    for name, column in (("Q/K", 1), ("V/O", 2)):
        # without dims it is dense, because no recipe can prune it
        kept = {i: widths[column] for i, widths in enumerate(plan.widths()) if dims and widths[column] <= NARROW * dims}
        if kept:
            least = _least(kept)
            text = (
                f"{_layers(kept)}: almost nothing is left of {name} (layer {least}: {kept[least]} of {dims} dims); "
                "attention there has almost no effect"
            )
            yield Finding("narrow attention", text)


def _union(plan: Plan) -> Iterator[Finding]:
    # dropped for all tokens on purpose
    if plan.is_static:
        return
    shares = {i: layer.union / plan.shape.mlp_size for i, layer in enumerate(plan.counts)}
    low = {i: share for i, share in shares.items() if share < UNION}
    if low:
        least = _least(low)
        text = (
            f"{_layers(low)}: many neurons are in none of the experts (layer {least}: only {low[least]:.0%} are in use); "
            "they are lost for every token"
        )
        yield Finding("unused neurons", text)


def _fitted_context(plan: AnyPlan) -> Iterator[Finding]:
    recipe = recipe_of(plan)
    config = plan.dense_config
    # of a model of text and images, the text's
    highest = (config.get("text_config") or config).get("max_position_embeddings")
    if recipe is not None and isinstance(highest, int) and recipe.data.seq_len > highest:
        text = f"it was fitted on sequences of {recipe.data.seq_len:,} tokens, but the model is made for {highest:,}"
        yield Finding("context", text)


def _training(plan: Plan) -> Iterator[Finding]:
    before, after = plan.notes.get("held_out_before"), plan.notes.get("held_out")
    # an edited plan may hold anything
    if isinstance(before, float) and isinstance(after, float) and not after < before:
        text = (
            f"training its masks for {plan.notes['steps']} steps made it no better: the loss on held-out text was "
            f"{before:.3f} before the first step and is not less after the last; leave train.steps at 0, or lower "
            "train.learning_rate"
        )
        yield Finding("worse than before", text)


def _routing(usage: ExpertUsage | None, plan: Plan | None) -> Iterator[Finding]:
    if usage is None:
        return
    if usage.per_token:
        yield from _fine_routing(usage, plan)
    elif usage.tokens >= ENOUGH * max(map(len, usage.shares)):
        for layer, row in enumerate(usage.shares):
            dead = [n for n, share in enumerate(row) if share == 0]
            if dead:
                name = f"expert {dead[0]}" if len(dead) == 1 else "experts " + ", ".join(map(str, dead))
                yield Finding("dead experts", f"layer {layer}: {name} got none of the {usage.tokens:,} tokens")
            # one of two experts nearly always has more than half
            if len(row) > 2 and max(row) > OVERLOADED:
                text = f"layer {layer}: expert {row.index(max(row))} got {max(row):.0%} of the {usage.tokens:,} tokens"
                yield Finding("overloaded expert", text)


def _fine_routing(usage: ExpertUsage, plan: Plan | None) -> Iterator[Finding]:
    """Warn of fine-grained experts that no token chooses, and of layers whose tokens all choose the same ones."""
    for layer, (top_k, row) in enumerate(zip(usage.per_token, usage.shares, strict=True)):
        # chosen for every token by their bias, which is no choice
        always = 0 if plan is None else plan.counts[layer].always_used
        free, others = top_k - always, len(row) - always
        if not 0 < free < others or usage.tokens * free < ENOUGH * others:
            continue
        dead = [n for n, share in enumerate(row) if share == 0]
        if dead:
            names = ", ".join(map(str, dead[:NAMED])) + (", ..." if len(dead) > NAMED else "")
            text = f"layer {layer}: {len(dead)} of {len(row)} experts ({names}) got none of the {usage.tokens:,} tokens"
            yield Finding("dead experts", text)
        # a share of the choices; 1 / top_k if every token uses it
        common = sum(sorted(row, reverse=True)[always:top_k]) * top_k / free
        even = free / others
        if (common - even) / (1 - even) > COLLAPSED:
            same = f"the same {free} of {others} experts"
            text = f"layer {layer}: {common:.0%} of the choices fall on {same}; the router barely chooses"
            yield Finding("collapsed routing", text)


def _measured(row: Row) -> Iterator[Finding]:
    """Warn of what makes the numbers of a row less meaningful than they seem."""
    m = row.measurement
    highest = row.facts.get("max_positions")
    if row.training_overlap is not None and row.training_overlap >= OVERLAP:
        text = (
            f"{row.training_overlap:.1%} of the evaluation tokens are in the text that it was fitted on, word for word, "
            "so its scores are optimistic"
        )
        yield Finding("training text", text)
    if highest is not None and m.context_length > highest:
        text = (
            f"it was measured on contexts of {m.context_length:,} tokens, but is made for {highest:,}: expect a far worse "
            "perplexity than it has"
        )
        yield Finding("context", text)
    if m.blocks < FEW_SEQUENCES:
        text = (
            f"it was measured on {m.blocks} sequence{'s' * (m.blocks != 1)} of text only, so its perplexity and KL are noisy; "
            f"give a longer text, at least {FEW_SEQUENCES} sequences of {m.context_length:,} tokens"
        )
        yield Finding("few sequences", text)


def _least(numbers: dict[int, float] | dict[int, int]) -> int:
    return min(numbers, key=lambda i: numbers[i])


def _layers(ids: dict[int, float] | dict[int, int]) -> str:
    return f"layer {next(iter(ids))}" if len(ids) == 1 else "layers " + ", ".join(map(str, ids))
