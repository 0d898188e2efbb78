"""Sentences that card and page share: how a model was converted, from its plan alone."""

from __future__ import annotations

import re
from pathlib import Path

from tomoe.budget import Decoding, active_fraction, file_bytes
from tomoe.errors import shortened
from tomoe.files import basename, format_bytes
from tomoe.model.names import HUB_ID
from tomoe.plans import FINETUNED, REPAIRED, AnyPlan, InputsPlan, Plan
from tomoe.recipe.conversion import Recipe
from tomoe.report.words import span, words_of

ATTENTION = {
    "off": "dense",
    "static": "fewer Q/K and V/O dims, the same for all tokens",
    "per_token": "fewer Q/K dims for all tokens, V/O dims chosen for each token",
}


def recipe_of(plan: AnyPlan) -> Recipe | None:
    """Return the recipe in a plan; None if it was made by hand. Raises UserError if it is damaged."""
    return Recipe(**plan.recipe) if plan.recipe else None


def shown_name(model: str) -> str:
    """Return the last part of a local path: reports must not reveal the disk they were made on. A text on the hub may name its
    configuration too: owner/name:configuration."""
    return model if hub_id(model.partition(":")[0]) and not Path(model).exists() else basename(model)


def hub_id(model: str) -> str | None:
    """Return the name if it can be a hub id and is not a local path, else None."""
    shaped = HUB_ID.fullmatch(model) and not model.endswith(".gguf")
    return model if shaped and not Path(model).exists() else None


def self_sampled(data: str) -> bool:
    """Whether the text of this name was sampled from the dense model itself (the source `self`)."""
    return "self" in re.findall(r"[\w.-]+", data)


def conversion_summary(plan: AnyPlan) -> list[tuple[str, str]]:
    """Describe how the model was made, as (what, how) lines."""
    recipe = recipe_of(plan)
    lines = [
        ("Dense model", shown_name(recipe.model if recipe else "") or "not named"),
        ("Active params", f"{plan.active_fraction():.1%} of the decoder parameters work on each token"),
    ]
    if isinstance(plan, InputsPlan):
        return lines + _summary_of_inputs(plan, recipe)
    words = words_of(plan)
    lines += [(words.used, words.experts(plan)), ("Attention", _attention(plan)), *_decoding(plan)]
    if recipe is None:
        return lines
    t, d = recipe.train, recipe.data
    steps = plan.notes.get("steps", t.steps)
    per_step = t.batch_size * t.gradient_accumulation_steps * d.seq_len
    aim = "to predict what the dense model predicts" if recipe.loss.objective == "kl" else "to predict the next token"
    finetuning = _finetuning(plan)
    kept = "were" if finetuning or REPAIRED in plan.notes else "are"
    learning = f"{steps:,} steps of {per_step:,} tokens, {aim}; the dense weights {kept} not changed"
    start = "from calibration statistics" if recipe.start == "carved" else "from random projections"
    return [
        *lines,
        *_method(plan),
        ("Learning", f"{learning}; it started {start}" if steps else "none"),
        *_repair(plan),
        *finetuning,
        *_origin(plan, recipe),
    ]


def _summary_of_inputs(plan: InputsPlan, recipe: Recipe | None) -> list[tuple[str, str]]:
    lines = [(words_of(plan).used, words_of(plan).experts(plan))]
    output = _output_weights(plan)
    if output is not None:
        decoding = Decoding.of(plan.shape, output, routers=0)
        lines.append(("Decoding", decoding.sentence_without_routers(plan.active_fraction())))
    if recipe is None:
        return lines
    text = f"how many inputs each projection gets was found on {recipe.data.calibration_tokens:,} tokens"
    finetuning = _finetuning(plan) or [("Learning", "none")]
    return [*lines, *_method(plan), ("Budget", text), *finetuning, *_origin(plan, recipe)]


def _method(plan: AnyPlan) -> list[tuple[str, str]]:
    """Return the method in the plan's notes; empty if there is none, or something else."""
    note = plan.notes.get("method")
    values = [note.get(key) for key in ("name", "summary", "paper")] if isinstance(note, dict) else []
    if not values or not all(isinstance(value, str) for value in values):
        return []
    name, summary, paper = map(shortened, values)
    return [("Method", f"{name}: {summary}" + (f" {paper}" if paper else ""))]


def _origin(plan: AnyPlan, recipe: Recipe) -> list[tuple[str, str]]:
    sources = ", ".join(shown_name(source) for source in recipe.data.sources)
    return [
        ("Text", f"{sources} (sampled from the dense model itself)" if sources == "self" else sources),
        ("Seed", str(recipe.seed)),
        ("Versions", ", ".join(f"{k} {plan.notes[k]}" for k in ("torch", "transformers", "tomoe") if k in plan.notes)),
    ]


def layer_table(plan: AnyPlan) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells, one line per layer."""
    rows = plan.describe()
    titles = {"layer": "layer", **words_of(plan).titles, "active": "active params"}
    shown = [key for key in titles if key in rows[0]]
    return [titles[key] for key in shown], [[_cell(row[key]) for key in shown] for row in rows]


def _cell(value: int | float | None) -> str:
    return "-" if value is None else f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


def _output_weights(plan: AnyPlan) -> int | None:
    """Count weights of the output matrix; None for a config with other names."""
    vocabulary, hidden = plan.dense_config.get("vocab_size"), plan.dense_config.get("hidden_size")
    return vocabulary * hidden if type(vocabulary) is int and type(hidden) is int else None


def _decoding(plan: Plan) -> list[tuple[str, str]]:
    """Describe what decoding always reads, the resulting bounds, and file sizes; empty for a config with other names."""
    output = _output_weights(plan)
    if output is None:
        return []
    decoding = Decoding.of(plan.shape, output, plan.router_params)
    outside = output * (1 if plan.dense_config.get("tie_word_embeddings") else 2)
    if plan.is_static:
        kept = plan.totals()["stored_decoder_params"] + outside
        return [
            ("Decoding", decoding.sentence_without_routers(plan.active_fraction())),
            ("File", f"about {_files(kept)}"),
        ]
    with_one = [(layer.shared_size + layer.expert_size, layer.qk_dims, layer.value_dims) for layer in plan.counts]
    one = active_fraction(plan.shape, with_one, plan.router_params)
    sizes = _files(decoding.decoder + decoding.routers + outside)
    sentence = decoding.sentence(one, plan.active_fraction())
    return [("Decoding", sentence), ("File", f"about {sizes}, with all neurons")]


def _files(weights: int) -> str:
    return ", ".join(f"{format_bytes(size)} in {name}" for name, size in file_bytes(weights).items())


def _repair(plan: Plan) -> list[tuple[str, str]]:
    note = plan.notes.get(REPAIRED)
    if not note:
        return []
    which = "down and output projections" if note.get("output") is True else "down projections"
    rank = f", changes of rank {note['rank']}" if type(note.get("rank")) is int else ""
    tokens = f" to {note['tokens']:,} tokens of the training text" if type(note.get("tokens")) is int else ""
    errors = [note.get(name) for name in ("error_before", "error_after")]
    gain = ""
    if all(isinstance(error, float) for error in errors):
        gain = f"; squared error of a layer relative to its input {errors[0]:.3g} before, {errors[1]:.3g} after"
    return [("Repair", f"{which} refitted in closed form{tokens}{rank}{gain}")]


def _finetuning(plan: AnyPlan) -> list[tuple[str, str]]:
    note = plan.notes.get(FINETUNED)
    if not note:
        return []
    known = {key: str(note.get(key, "?"))[:80] for key in ("steps", "tokens", "weights", "objective", "routers")}
    parts = "all decoder weights" if known["weights"] == "full" else "low-rank adapters, merged"
    routers = f", routers {known['routers']}" if isinstance(plan, Plan) else ""
    aim = "what the dense model predicts" if known["objective"] == "kl" else "the next token"
    names = note.get("sources")
    sources = ", ".join(map(str, names))[:200] if isinstance(names, list) else "text that is not named"
    kept = note.get("kept_step", note.get("steps"))
    best = "" if kept == note.get("steps") else f" (step {str(kept)[:80]} was best on held-out text and is kept)"
    read = f"{known['steps']} steps{best}, {known['tokens']} tokens of {sources}"
    how = f"{read}; {parts}{routers}, towards {aim}"
    return [("Fine-tuning", how + "; the plan belongs to these weights, not to those of the dense model")]


def _attention(plan: Plan) -> str:
    full = plan.shape.head_dim
    if all(qk == full and v == full for _, qk, v in plan.widths()):
        return ATTENTION["off"]
    kind = ATTENTION["per_token" if plan.dynamic_values else "static"]
    qk, values = ([w[i] for w in plan.widths()] for i in (1, 2))
    basis = "; values were rotated before they were cut" if plan.rotated else ""
    return f"{kind}: Q/K {span(qk)}, V/O {span(values)} of {full} dims{basis}"
