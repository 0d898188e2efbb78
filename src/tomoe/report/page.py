"""The report of a conversion: one HTML file that needs nothing beside it, for a phone and a screen reader too."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from tomoe.evaluation.results import Row
from tomoe.evaluation.tables import count, footnote, table, task_footnote, task_table
from tomoe.evaluation.token_losses import TokenLosses
from tomoe.evaluation.writing.loops import Variety
from tomoe.files import atomic_write, basename, format_bytes
from tomoe.plan import AnyPlan
from tomoe.recipe.conversion import Recipe
from tomoe.report.forms import WORDS
from tomoe.report.html import Texts, render, svg_uri
from tomoe.report.style import CaptionedFigure
from tomoe.report.summary import conversion_summary, layer_table, recipe_of, self_sampled, shown_name
from tomoe.report.token_tables import loss_sentence, loss_table, typical_table
from tomoe.report.warnings import find_warnings
from tomoe.version import __version__

PAGE = "report.html"


@dataclass(frozen=True)
class Generation:
    """One prompt and the continuation of each model, as (model, text)."""

    prompt: str
    answers: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class PageFacts:
    """All that the page shows. Parts that are empty here are left out of it."""

    title: str
    plan: AnyPlan
    rows: Sequence[Row] = ()  # from `compare`, dense first; routing is that of the last row that has it
    generations: Sequence[Generation] = ()
    texts: Texts = ()  # to be colored
    figures: Sequence[CaptionedFigure] = ()
    commands: Sequence[tuple[str, str]] = ()  # (command, what it does), to try next
    cost: Mapping[str, Any] = field(default_factory=dict)  # the run's cost.json
    timed: bool = False  # whether speed was measured
    dial: Sequence[Row] = ()  # the dense model, then the same folder with several numbers of experts
    losses: TokenLosses | None = None  # of a passage, in both models
    typical: Sequence[Sequence[Sequence[str]]] = ()  # [layer][expert]: tokens
    varieties: Sequence[Variety] = ()  # loops in what each model wrote


def write_page(out: Path, facts: PageFacts) -> Path:
    """Write OUT/report.html; the same facts give the same bytes. Raises UserError if it cannot be written."""
    warnings = [warning.text for warning in find_warnings(facts.plan, facts.rows)]
    titles, body = table(facts.rows)
    task_titles, task_body = task_table(facts.rows)
    layer_titles, layer_body = layer_table(facts.plan)
    usage_titles, usage_body = _usage(facts.rows)
    dial_titles, dial_body = table(facts.dial)
    loss_titles, loss_body = loss_table(facts.losses) if facts.losses else ([], [])
    typical_titles, typical_body = typical_table(facts.typical) if facts.typical else ([], [])
    page = render(
        "page.html.j2", title=facts.title, lead=_lead(facts.plan), sections=_sections(facts, warnings),
        tiles=tiles(facts.rows), warnings=warnings, titles=titles, body=body, footnote=footnote(facts.rows),
        task_titles=task_titles, task_body=task_body, task_footnote=task_footnote(facts.rows), texts=facts.texts,
        generations=facts.generations, figures=facts.figures,
        words=WORDS[facts.plan.form], method=method_drawing(facts.plan.form),
        layer_titles=layer_titles, layer_body=layer_body,
        dial_titles=dial_titles, dial_body=dial_body, dial_footnote=footnote(facts.dial),
        usage_titles=usage_titles, usage_body=usage_body, summary=_summary(facts.plan), recipe=_recipe(facts.plan),
        memory=_memory(facts), benchmark=None if facts.timed else _benchmark_command(out, facts.plan),
        loss_titles=loss_titles, loss_body=loss_body, losses=facts.losses and loss_sentence(facts.losses),
        varieties=variety_sentence(facts.varieties), typical_titles=typical_titles, typical_body=typical_body,
        commands=facts.commands, version=__version__,
    )  # fmt: skip
    return atomic_write(out / PAGE, page)


def _lead(plan: AnyPlan) -> str:
    s = plan.shape
    return (
        f"{s.num_layers} layers of {WORDS[plan.form].routing(plan)}; {plan.active_fraction():.1%} of the "
        "decoder parameters work on a token. Everything below was measured on this model; the dense model stands beside it."
    )


def _sections(facts: PageFacts, warnings: Sequence[str]) -> list[tuple[str, str]]:
    """(id, heading) of the parts that the page has."""
    sections = [
        ("warnings", "Warnings", warnings), ("quality", "Quality", facts.rows or facts.dial),
        ("tokens", "Tokens by expert", facts.texts),
        ("writing", "Sample output", facts.generations), ("experts", WORDS[facts.plan.form].heading, True),
        ("how", "How it was made", True), ("speed", "Speed and memory", True), ("use", "Load, serve, reproduce", facts.commands),
    ]  # fmt: skip
    return [(name, heading) for name, heading, there in sections if there]


def variety_sentence(varieties: Sequence[Variety]) -> str:
    """How many texts of each model end in a loop, and how varied they are; empty if that was not counted."""
    parts = [
        f"{v.model}: {v.looped} of {v.texts} texts of {v.length} tokens end in a loop, {v.distinct:.0%} of their "
        "stretches of four tokens are no repetition"
        for v in varieties
    ]
    return "; ".join(parts) + "." if parts else ""


def tiles(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """The numbers to see first, as (what, value, note). Empty unless an MoE was measured beside a dense model."""
    if len(rows) < 2:
        return []
    dense, moe = rows[0].measurement, rows[-1].measurement
    sizes, whole = rows[-1].facts, rows[0].facts
    share = sizes["active_share"]
    text = "; on text that the dense model sampled itself" if self_sampled(moe.data) else ""
    ratio = f"{moe.perplexity / dense.perplexity:.2f} times dense: {dense.perplexity:.2f}"
    tiles = [
        ("Active params", "-" if share is None else f"{share:.1%}", "of the dense model's decoder parameters, for each token"),
        ("Perplexity", f"{moe.perplexity:.2f}", ratio + text),
        ("Active weights", count(sizes["active_params"]), f"dense {count(whole['active_params'])}"),
        ("Stored weights", count(sizes["total_params"]), f"dense {count(whole['total_params'])}"),
    ]  # fmt: skip
    if moe.top1_agreement is not None and moe.kl is not None:
        tiles.insert(2, ("Same next token", f"{moe.top1_agreement:.1%}", f"as the dense model; KL {moe.kl:.3f} nats"))
    return tiles


def _summary(plan: AnyPlan) -> list[tuple[str, str]]:
    hashes = [("Dense weights", f"sha256 {plan.source[:16]}")] if plan.source else []
    recipe = recipe_of(plan)
    return [*conversion_summary(plan), *hashes, *([("Recipe", f"sha256 {recipe.digest()[:16]}")] if recipe else [])]


def _recipe(plan: AnyPlan) -> str:
    """Every key, with paths by their last part: a report that travels says nothing about the disk it was made on."""
    recipe = recipe_of(plan)
    if recipe is None:
        return ""
    values = recipe.model_dump(mode="json")
    values["model"] = shown_name(recipe.model)
    values["data"]["sources"] = [shown_name(source) for source in recipe.data.sources]
    return json.dumps(values, indent=2, ensure_ascii=False)


def _usage(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    usage = next((row.usage for row in reversed(rows) if row.usage is not None), None)
    if usage is None:
        return [], []
    titles = ["layer", *(f"expert {n}" for n in range(len(usage.shares[0])))]
    return titles, [[str(i), *map(_share, shares)] for i, shares in enumerate(usage.token_shares())]


def _share(share: float) -> str:
    """Write a share so that a rare expert differs from a dead one."""
    return "0" if share == 0 else "< 0.1 %" if share < 0.0005 else f"{100 * share:.1f} %"


def _memory(facts: PageFacts) -> list[str]:
    """Sentences on sizes and memory, as far as they were measured."""
    sentences = []
    if len(facts.rows) > 1:
        dense, moe = facts.rows[0].facts, facts.rows[-1].facts
        on_disk = "" if moe["bytes_on_disk"] is None else f", {format_bytes(moe['bytes_on_disk'])} on disk"
        sentences.append(
            f"The MoE stores {count(moe['total_params'])} weights{on_disk}; the dense model has "
            f"{count(dense['total_params'])}. Of them {count(moe['active_params'])} work on a token "
            f"(dense {count(dense['active_params'])}), embeddings and routers included."
        )
    if facts.cost.get("peak_memory_bytes"):
        sentences.append(
            f"The conversion held {format_bytes(facts.cost['peak_memory_bytes'])} of main memory at its peak."
        )
    return sentences


def _benchmark_command(out: Path, plan: AnyPlan) -> str:
    """The commands that measure speed and add it to the page."""
    recipe, name = recipe_of(plan), shlex.quote(basename(out))
    dense = shlex.quote((recipe and shown_name(recipe.model)) or "DENSE")
    return f"tomoe benchmark {dense} {name} --json {name}/benchmark.json\ntomoe report {name}"


def method_drawing(form: str) -> str | None:
    """The drawing of the method, with experts of that form, as the source of an <img>; None if the package has none."""
    drawing = resources.files("tomoe.report").joinpath("templates", WORDS[form].drawing)
    return svg_uri(drawing.read_text(encoding="utf-8")) if drawing.is_file() else None


def commands(recipe: Recipe, name: str, finetuned: bool = False) -> list[tuple[str, str]]:
    """(command, what it does) for a converted folder called `name`: load, generate, serve, measure, make again."""
    model, folder = shlex.quote(shown_name(recipe.model) or "MODEL"), shlex.quote(name)
    again = f"tomoe convert {model} --recipe {shlex.quote(f'{name}/recipe.json')} -o {'OUT' if finetuned else 'AGAIN'}"
    if finetuned:
        again += f"\ntomoe finetune OUT --recipe {shlex.quote(f'{name}/run/recipe.json')} -o AGAIN"
    quoted = json.dumps(name, ensure_ascii=False)
    load = (
        "import tomoe  # registers the architecture\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained({quoted}, dtype="auto")\n'
        f"tokenizer = AutoTokenizer.from_pretrained({quoted})"
    )
    experts = [
        (
            f"tomoe export {folder} -o STOCK",
            "Serve it: write it as an architecture that other programs know, if one fits",
        ),
        (f'tomoe route {folder} "Any text" --html tokens.html', "Color any text by expert"),
    ]
    return [
        (load, "Load it in Python"),
        (f'tomoe generate {folder} "Once upon a time"', "Generate text"),
        *(experts if recipe.experts.form != "inputs" else []),
        (f"tomoe evaluate {model} {folder} --text FILE", "Measure both on your own text"),
        *WORDS[recipe.experts.form].commands(folder),
        (again, "Repeat the conversion with the same recipe"),
    ]
