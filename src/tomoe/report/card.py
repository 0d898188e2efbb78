"""The model card (README.md) of a converted model. Makes no network call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from tomoe.data.sources import SOURCES
from tomoe.evaluation.compare import Row, to_markdown
from tomoe.files import own_name, write_whole
from tomoe.model import catalog as fetch
from tomoe.plan import Plan
from tomoe.recipe.conversion import Recipe
from tomoe.report.license import origin_of
from tomoe.report.summary import conversion_summary, hub_id, recipe_of, shown_name
from tomoe.report.warnings import find_warnings


def write_card(
    out: Path,
    plan: Plan,
    rows: Sequence[Row] = (),
    *,
    base_model: str = "",
    command: str | None = None,
    export: tuple[str, str, str] | None = None,
) -> Path:
    """Write OUT/README.md. `rows` are the dense model and the converted ones, dense first, or empty if not measured.

    `base_model` (default: the recipe's) is named in the metadata where its hub id is known. The licence is the dense
    model's, where a file on this disk says it; where none does, the card says that one has to look it up. `export` is for
    a folder of another architecture: its name, its sizes in words and its proof. Raises UserError where the folder cannot
    be written.
    """
    recipe = recipe_of(plan)
    base = base_model or (recipe.model if recipe else "")
    origin = origin_of(base)
    data = ModelCardData(
        base_model=origin.hub_id,
        datasets=_datasets(recipe) or None,
        library_name="transformers",
        license=origin.license or "other",
        license_name=None if origin.license else "same-as-the-dense-model",
        pipeline_tag="text-generation",
        tags=["moe", "tomoe"],
        model_name=own_name(out),
        eval_results=(results := _eval_results(rows)) or None,
        metrics=sorted({result.metric_type for result in results}) or None,
    )
    how = [line for line in conversion_summary(plan) if line[0] != "Dense model"]
    card = ModelCard.from_template(
        data,
        template_str=resources.files("tomoe.report").joinpath("templates/card.md.j2").read_text(encoding="utf-8"),
        title=own_name(out),
        base=shown_name(base) or "a dense model",
        active=f"{plan.active_fraction():.0%}",
        num_experts=plan.num_experts,
        summary=how,
        comparison=to_markdown(rows) if rows else "",
        limits=limits(plan, rows),
        warnings=[warning.text for warning in find_warnings(plan, rows)],
        license_given=origin.license,
        export=export,
        command=command or f"tomoe convert {shown_name(base) or 'MODEL'} --recipe recipe.json -o {own_name(out)}",
    )
    return write_whole(out / "README.md", str(card))


def write_plan_card(folder: Path, plan: Plan, plan_name: str = "PLAN") -> Path:
    """Write FOLDER/README.md for a plan that travels alone. Raises UserError where the folder cannot be written."""
    recipe = recipe_of(plan)
    base = recipe.model if recipe else ""
    data = ModelCardData(base_model=origin_of(base).hub_id, library_name="tomoe", tags=["moe", "tomoe", "plan"])
    size = sum((folder / name).stat().st_size for name in ("plan.json", "plan.safetensors"))
    card = ModelCard.from_template(
        data,
        template_str=resources.files("tomoe.report").joinpath("templates/plan_card.md.j2").read_text(encoding="utf-8"),
        title=plan_name.rpartition("/")[2] if plan_name != "PLAN" else own_name(folder),
        base=shown_name(base) or "a dense model",
        source=base if hub_id(base) or base in fetch.names() else "MODEL",
        active=f"{plan.active_fraction():.0%}",
        size=f"{size / 1e6:.1f} MB",
        fingerprint=plan.source,
        plan_name=plan_name,
        summary=conversion_summary(plan),
    )
    return write_whole(folder / "README.md", str(card))


def limits(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """What a user should know before trusting the model; sentences that depend on how it was made and measured."""
    recipe = recipe_of(plan)
    found = []
    measured = [row for row in rows[1:] if row.measurement.kl is not None]
    if measured:
        dense, moe = rows[0].measurement, measured[-1].measurement
        found.append(
            f"It is not the dense model: perplexity {moe.perplexity:.2f} against {dense.perplexity:.2f} on the text "
            f"above, and another most likely token at {1 - (moe.top1_agreement or 0):.0%} of the positions."
        )
        if "self" in re.findall(r"[\w.-]+", moe.data):
            found.append("The dense model wrote that text itself, so its perplexity says little about real text.")
    else:
        found.append("Its quality was not measured against the dense model; do so before using it (`tomoe evaluate`).")
    if recipe is not None:
        if not plan.notes.get("steps", recipe.train.steps):
            found.append("Nothing was learned after the start; a trained conversion is usually much better.")
        if "self" in recipe.data.sources:
            found.append("Experts and routers were fitted on text that the dense model wrote, narrower than real text.")
        found.append(f"They were fitted on contexts of {recipe.data.block_size} tokens; longer ones were not tried.")
    untested = (
        "No safety or fairness test was run"
        if measured and rows[-1].tasks
        else "No task, safety or fairness test was run"
    )
    found += [
        f"{untested}. What the dense model gets wrong, this one may get wrong more often.",
        "Fewer parameters work on a token, but speed depends on hardware and on tokens at a time: measure yours.",
    ]
    return found


def _datasets(recipe: Recipe | None) -> list[str]:
    """Hub ids of the data sets that it was fitted on; local text and text of the model itself have none."""
    named = [s for s in (recipe.data.sources if recipe else ()) if s in SOURCES or hub_id(s.partition(":")[0])]
    ids = [(SOURCES[s].hub_id if s in SOURCES else s) or "" for s in named]
    return list(dict.fromkeys(found.partition(":")[0] for found in ids if found))


def _eval_results(rows: Sequence[Row]) -> list[EvalResult]:
    """Of the converted model (the last row), if it was measured beside a dense one: the text, then each task."""
    if len(rows) < 2:
        return []
    m = rows[-1].measurement
    numbers = {
        "perplexity": ("Perplexity", m.perplexity),
        "kl_to_dense": ("KL divergence from the dense model, nats", m.kl),
        "top1_agreement": ("Same most likely token as the dense model", m.top1_agreement),
    }
    settings = {"context_length": m.context_length, "stride": m.stride, "tokens": m.tokens, "sha256": m.data_sha256}
    found = [
        EvalResult(
            task_type="text-generation",
            task_name="Language modelling",
            dataset_name=f"{m.data or 'text'}, context {m.context_length}, {m.tokens} tokens",
            dataset_args={key: value for key, value in settings.items() if value is not None},
            metric_type=kind,
            metric_name=name,
            metric_value=round(value, 4),
            **_dataset(m.data),
        )
        for kind, (name, value) in numbers.items()
        if value is not None
    ]
    return found + [
        EvalResult(
            task_type="text-generation",
            task_name=f"{score.shots}-shot",
            dataset_type=score.task,
            dataset_name=f"{score.task}, {score.shots}-shot, {score.examples} questions, {score.harness}",
            dataset_args={"num_few_shot": score.shots, "questions": score.examples},
            metric_type=score.metric,
            metric_name=score.metric.replace("_", " "),
            metric_value=round(score.value, 4),
        )
        for score in rows[-1].tasks
    ]


def _dataset(data: str) -> dict[str, Any]:
    """Identifier, config and split of a text that is named like `wikitext (test)`; of any other its name."""
    named = re.fullmatch(r"(\S+) \((\w+)\)", data)
    name = named[1] if named else ""
    place = SOURCES[name].hub_id if name in SOURCES else name if hub_id(name.partition(":")[0]) else None
    if named is None or not place:
        return {"dataset_type": data or "text"}
    identifier, _, config = place.partition(":")
    return {"dataset_type": identifier, "dataset_split": named[2]} | ({"dataset_config": config} if config else {})
