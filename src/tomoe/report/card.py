"""The model card (README.md) of a converted model. Makes no network call."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from yaml import YAMLError  # type: ignore[import-untyped]

from tomoe.data.sources import SOURCES
from tomoe.errors import Note
from tomoe.evaluation.results import Row
from tomoe.evaluation.tables import escape_markdown, to_markdown
from tomoe.files import CARD, CARD_BESIDE, basename, write_card_file
from tomoe.folders import PLAN
from tomoe.model import catalog
from tomoe.plans import FINETUNED, REPAIRED, AnyPlan, InputsPlan, Plan
from tomoe.recipe.conversion import Recipe
from tomoe.report.html import template
from tomoe.report.summary import conversion_summary, hub_id, recipe_of, self_sampled, shown_name
from tomoe.report.warnings import find_warnings
from tomoe.report.words import words_of
from tomoe.version import INSTALL


def write_card(
    out: Path,
    plan: AnyPlan,
    rows: Sequence[Row] = (),
    *,
    base_model: str = "",
    command: str | None = None,
    export: tuple[str, str, str] | None = None,
    adjustable: bool = True,
) -> Path:
    """Write OUT/README.md, or README.tomoe.md beside one that was edited, with a `Note`; returns which.

    `rows`: the dense model and the converted ones, or none. `base_model` (default: the recipe's) is named if its hub id is
    known, and so is its license, if a file on this disk tells it. `export`, of another architecture: its name, a phrase on
    its sizes, and how it was verified; `adjustable`: other numbers of experts can be used there. Names are escaped. Raises
    UserError if the folder cannot be written.
    """
    recipe = recipe_of(plan)
    base = base_model or (recipe.model if recipe else "")
    known_id, license = base_model_info(base)
    name = basename(out)
    repeat = f"tomoe convert {shlex.quote(shown_name(base) or 'MODEL')} --recipe recipe.json -o {shlex.quote(name)}"
    data = ModelCardData(
        base_model=known_id,
        datasets=_datasets(recipe) or None,
        library_name="transformers",
        license=license or "other",
        license_name=None if license else "same-as-the-dense-model",
        pipeline_tag="text-generation",
        tags=["tomoe"] if isinstance(plan, Plan) and plan.is_static else ["moe", "tomoe"],
        model_name=name,
        eval_results=(results := _eval_results(rows)) or None,
        metrics=sorted({result.metric_type for result in results}) or None,
    )
    card = ModelCard.from_template(
        data,
        template_str=template("card.md.j2"),
        install=INSTALL,
        title=escape_markdown(name),
        quoted=_fenced(json.dumps(name, ensure_ascii=False)),
        base=escape_markdown(shown_name(base) or "a dense model"),
        active=f"{plan.active_fraction():.0%}",
        product=words_of(plan).product,
        experts=words_of(plan).card(plan, adjustable),
        files=" and ".join(f"`{name}`" for name in PLAN if (out / name).is_file()) or "`plan.json`",
        tuned=FINETUNED in plan.notes,
        refitted=REPAIRED in plan.notes,
        summary=[(what, escape_markdown(how)) for what, how in conversion_summary(plan) if what != "Dense model"],
        comparison=to_markdown(rows) if rows else "",
        limits=limits(plan, rows),
        warnings=[warning.text for warning in find_warnings(plan, rows)],
        license=license,
        export=export,
        command=_fenced(command or repeat),
    )
    written = write_card_file(out, str(card))
    if written.name == CARD_BESIDE:
        words = f"{out / CARD} was edited (or tomoe did not write it), so it stays; the new card is {written.name}"
        warnings.warn(words, Note, stacklevel=2)
    return written


def _fenced(code: str) -> str:
    """Fence code so that it cannot end its Markdown block."""
    return code.replace("```", "'" * 3)


def limits(plan: AnyPlan, rows: Sequence[Row]) -> list[str]:
    """List sentences on what to know before trusting the model, by how it was made and measured."""
    recipe, fitted = recipe_of(plan), words_of(plan).fitted
    sentences = []
    measured = [row for row in rows[1:] if row.measurement.kl is not None]
    if measured:
        dense, moe = rows[0].measurement, measured[-1].measurement
        sentences.append(
            f"It is not the dense model: perplexity {moe.perplexity:.2f} against {dense.perplexity:.2f} on the text "
            f"above, and a different most likely token at {1 - (moe.top1_agreement or 0):.0%} of the positions."
        )
        if self_sampled(moe.data):
            sentences.append("The dense model wrote that text itself, so its perplexity says little about real text.")
    else:
        sentences.append(
            "Its quality was not measured against the dense model; do so before using it (`tomoe evaluate`)."
        )
    if isinstance(plan, InputsPlan):
        sentences.append(
            "It does not speed up prompts and batches, and no serving engine supports it; experts do both."
        )
    elif recipe is not None:
        if not plan.notes.get("steps", recipe.train.steps):
            sentences.append(f"Nothing was trained: {fitted} come from statistics of a little text.")
        if "self" in recipe.data.sources:
            sentences.append(
                f"{fitted.capitalize()} were fitted on text that the dense model wrote, narrower than real text."
            )
        sentences.append(f"Sequences of {recipe.data.seq_len} tokens were read; longer ones were not tried.")
    task = "" if measured and rows[-1].tasks else "task, "
    sentences += [
        f"No {task}safety or fairness test was run. It may make the dense model's errors more often.",
        "A token uses fewer parameters, but speed depends on the hardware and the batch: measure yours.",
    ]
    return sentences


def _datasets(recipe: Recipe | None) -> list[str]:
    """Return hub ids of the data sets that the model was fitted on; local and self-sampled text have none."""
    named = [s for s in (recipe.data.sources if recipe else ()) if s in SOURCES or hub_id(s.partition(":")[0])]
    ids = [(SOURCES[s].hub_id if s in SOURCES else s) or "" for s in named]
    return list(dict.fromkeys(name.partition(":")[0] for name in ids if name))


def _eval_results(rows: Sequence[Row]) -> list[EvalResult]:
    """Return results of the converted model (the last row), if measured with a dense one: the text, then each task."""
    if len(rows) < 2:
        return []
    m = rows[-1].measurement
    numbers = {
        "perplexity": ("Perplexity", m.perplexity),
        "kl_to_dense": ("KL divergence from the dense model, nats", m.kl),
        "top1_agreement": ("Same most likely token as the dense model", m.top1_agreement),
    }
    settings = {"context_length": m.context_length, "stride": m.stride, "tokens": m.tokens, "sha256": m.data_sha256}
    results = [
        EvalResult(
            task_type="text-generation",
            task_name="Language modeling",
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
    return results + [
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
    """Return identifier, config and split of a text named like `wikitext (test)`, or just its name."""
    named = re.fullmatch(r"(\S+) \((\w+)\)", data)
    name = named[1] if named else ""
    place = SOURCES[name].hub_id if name in SOURCES else name if hub_id(name.partition(":")[0]) else None
    if named is None or not place:
        return {"dataset_type": data or "text"}
    identifier, _, config = place.partition(":")
    return {"dataset_type": identifier, "dataset_split": named[2]} | ({"dataset_config": config} if config else {})


def base_model_info(model: str) -> tuple[str | None, str | None]:
    """Return the hub id of a dense model and its license, as the hub writes it (apache-2.0); None for what no local file tells:
    the card of a folder or in the hub's cache, the metadata of a .gguf file, the table of known names."""
    if not model:  # as a path it would be the working directory, which may have a README.md of its own
        return None, None
    path = Path(model).expanduser()
    if model in catalog.MODELS:
        known = catalog.MODELS[model]
        return known.hub_id, known.license
    if path.exists():
        return None, _license(path / CARD if path.is_dir() else path)
    name = hub_id(model)
    cached = try_to_load_from_cache(name, CARD) if name else None
    return name, _license(Path(cached)) if isinstance(cached, str) else None


def _license(file: Path) -> str | None:
    """Return the license in a card or .gguf file, in lower case; None for prose, for `other` and for damaged files."""
    if not file.is_file():
        return None
    try:
        if file.name == CARD:
            said = ModelCard.load(file, ignore_metadata_errors=True).data.get("license")
        else:
            field = gguf.GGUFReader(file).fields.get("general.license")
            said = field and field.contents()
    except (OSError, ValueError, TypeError, KeyError, IndexError, YAMLError):
        return None
    shaped = isinstance(said, str) and re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,40}", said)
    return said.lower() if shaped and said.lower() not in ("other", "unknown") else None
