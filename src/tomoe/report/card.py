"""The model card (README.md) of a converted model. Makes no network call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from tomoe import fetch
from tomoe.files import write_whole
from tomoe.plan import Plan
from tomoe.report.compare import Row, to_markdown
from tomoe.report.summary import conversion_summary, hub_id, recipe_of, shown_name


def write_card(
    out: Path,
    plan: Plan,
    rows: Sequence[Row] = (),
    *,
    base_model: str = "",
    license: str | None = None,
    command: str | None = None,
    export: tuple[str, str, str] | None = None,
) -> Path:
    """Write OUT/README.md. `rows` are the dense model and the converted ones, dense first, or empty if not measured.

    `base_model` (default: the recipe's) is named in the metadata where it is a hub id. Where `license` is not given,
    the card says that the dense model's applies. `export` is for a folder of another architecture: its name, its sizes in
    words and its proof. Raises UserError where the folder cannot be written.
    """
    recipe = recipe_of(plan)
    base = base_model or (recipe.model if recipe else "")
    data = ModelCardData(
        base_model=hub_id(base),
        library_name="transformers",
        license=license or "other",
        license_name=None if license else "same-as-the-dense-model",
        pipeline_tag="text-generation",
        tags=["moe", "tomoe"],
        model_name=out.resolve().name,
        eval_results=_eval_results(rows) or None,
    )
    how = [line for line in conversion_summary(plan, base) if line[0] != "Dense model"]
    card = ModelCard.from_template(
        data,
        template_str=resources.files("tomoe.report").joinpath("card.md.j2").read_text(encoding="utf-8"),
        title=out.resolve().name,
        base=shown_name(base) or "a dense model",
        active=f"{plan.active_fraction():.0%}",
        num_experts=plan.num_experts,
        summary=how,
        comparison=to_markdown(rows) if rows else "",
        limits=limits(plan, rows),
        license_given=license,
        export=export,
        command=command or f"tomoe convert {shown_name(base) or 'MODEL'} --recipe recipe.json -o {out.resolve().name}",
    )
    return write_whole(out / "README.md", str(card))


def write_plan_card(folder: Path, plan: Plan, plan_name: str = "PLAN") -> Path:
    """Write FOLDER/README.md for a plan that travels alone. Raises UserError where the folder cannot be written."""
    recipe = recipe_of(plan)
    base = recipe.model if recipe else ""
    data = ModelCardData(base_model=hub_id(base), library_name="tomoe", tags=["moe", "tomoe", "plan"])
    size = sum((folder / name).stat().st_size for name in ("plan.json", "plan.safetensors"))
    card = ModelCard.from_template(
        data,
        template_str=resources.files("tomoe.report").joinpath("plan_card.md.j2").read_text(encoding="utf-8"),
        title=plan_name.rpartition("/")[2] if plan_name != "PLAN" else folder.resolve().name,
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
    found += [
        "No task, safety or fairness test was run. What the dense model gets wrong, this one may get wrong more often.",
        "Fewer parameters work on a token, but speed depends on hardware and on tokens at a time: measure yours.",
    ]
    return found


def _eval_results(rows: Sequence[Row]) -> list[EvalResult]:
    """Of the converted model (the last row), if it was measured beside a dense one."""
    if len(rows) < 2:
        return []
    m = rows[-1].measurement
    numbers = {"perplexity": m.perplexity, "kl_to_dense": m.kl, "top1_agreement": m.top1_agreement}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=m.data or "text",
            dataset_name=f"{m.data or 'text'}, context {m.context_length}, {m.tokens} tokens",
            metric_type=name,
            metric_value=round(value, 4),
        )
        for name, value in numbers.items()
        if value is not None
    ]
