"""What was converted and how, in words: the part that card and page share, read from the plan alone."""

from __future__ import annotations

from pathlib import Path

from tomoe.files import own_name
from tomoe.model.hub import HUB_ID
from tomoe.plan import FINETUNED, Plan
from tomoe.recipe.conversion import Recipe

ATTENTION = {
    "none": "kept whole",
    "static": "fewer Q/K and V/O dims, the same for all tokens",
    "dynamic": "fewer Q/K dims for all tokens, V/O dims chosen for each token",
}


def recipe_of(plan: Plan) -> Recipe | None:
    """The recipe that a plan carries; None for one made by hand."""
    return Recipe(**plan.recipe) if plan.recipe else None


def shown_name(model: str) -> str:
    """A local path shows as its last part: a report that travels says nothing about the disk it was made on.

    A text on the hub may name its configuration too: owner/name:configuration.
    """
    return model if hub_id(model.partition(":")[0]) and not Path(model).exists() else own_name(model)


def hub_id(model: str) -> str | None:
    """The name, where it can be a hub id and is no local path."""
    shaped = HUB_ID.fullmatch(model) and not model.endswith(".gguf")
    return model if shaped and not Path(model).exists() else None


def conversion_summary(plan: Plan) -> list[tuple[str, str]]:
    """(what, how) lines."""
    recipe, s = recipe_of(plan), plan.shape
    widths = [layer.width for layer in plan.layers]
    unions = [layer.union for layer in plan.layers]
    lines = [
        ("Dense model", shown_name(recipe.model if recipe else "") or "not named"),
        ("Active share", f"{plan.active_fraction():.1%} of the block parameters work on each token"),
        (
            "Experts",
            f"{plan.num_experts} per layer, one for each token, {_span(widths)} of {s.mlp_size:,} neurons wide; "
            f"they share neurons, {sum(unions) / len(unions) / s.mlp_size:.1%} of which are in use",
        ),
        ("Attention", _attention(plan)),
    ]
    if recipe is None:
        return lines
    t, d = recipe.train, recipe.data
    steps = plan.notes.get("steps", t.steps)
    per_step = t.batch_size * t.gradient_accumulation * d.block_size
    aim = "to predict what the dense model predicts" if recipe.loss.objective == "kl" else "to predict the next token"
    later = _finetuned(plan)
    learned = f"{steps:,} steps of {per_step:,} tokens, {aim}; the dense weights stay as they are"
    learned = learned.replace("stay", "stayed") if later else learned
    start = "from calibration statistics (carved)" if recipe.start == "carved" else "from random projections"
    sources = ", ".join(shown_name(source) for source in d.sources)
    return [
        *lines,
        ("Start", start),
        ("Learning", learned if steps else "none: experts and routers are the start itself"),
        *later,
        ("Text", f"{sources} (sampled from the dense model itself)" if sources == "self" else sources),
        ("Seed", str(recipe.seed)),
        ("Versions", ", ".join(f"{k} {plan.notes[k]}" for k in ("torch", "transformers", "tomoe") if k in plan.notes)),
    ]


def layer_table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Titles and cells, a line for each layer."""
    titles = ["layer", "expert width", "of neurons", "in any expert", "Q/K dims", "V/O dims", "active"]
    return titles, [
        [str(row["layer"]), f"{row['width']:,}", f"{row['width_share']:.1%}", f"{row['union_share']:.1%}",
         str(row["qk_dims"]), str(row["value_dims"]), f"{row['active']:.1%}"]
        for row in plan.describe()
    ]  # fmt: skip


def _finetuned(plan: Plan) -> list[tuple[str, str]]:
    """One line, where the weights learned on after the conversion."""
    note = plan.notes.get(FINETUNED)
    if not note:
        return []
    told = {key: str(note.get(key, "?"))[:80] for key in ("steps", "tokens", "weights", "objective", "form", "routers")}
    parts = "all weights of the blocks" if told["weights"] == "full" else "adapters of low rank, merged"
    aim = "what the dense model predicts" if told["objective"] == "kl" else "the next token"
    names = note.get("sources")
    sources = ", ".join(map(str, names))[:200] if isinstance(names, list) else "text that is not named"
    how = f"{told['steps']} steps, {told['tokens']} tokens of {sources}; {parts}, routers {told['routers']}, towards {aim}"
    return [("Fine-tuning", how + "; the plan belongs to these weights, not to those of the dense model")]


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _attention(plan: Plan) -> str:
    whole = plan.shape.head_dim
    if all(qk == whole and v == whole for _, qk, v in plan.widths()):
        return ATTENTION["none"]
    kind = ATTENTION["dynamic" if plan.dynamic_values else "static"]
    qk, values = ([w[i] for w in plan.widths()] for i in (1, 2))
    return f"{kind}: Q/K {_span(qk)}, V/O {_span(values)} of {whole} dims"
