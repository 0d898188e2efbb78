"""A conversion measured beside its dense model, drawn and written down: evaluation.json, README.md, report.html, figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe import distributed
from tomoe.api import PROMPT, EvaluationText, compare_on, generate, held_out_text, load_model
from tomoe.conversion import Listener, silent
from tomoe.evaluation.compare import Row, from_json, to_json
from tomoe.evaluation.routing_trace import RoutingTrace, trace_ids, trace_text
from tomoe.files import own_name, read_json, sha256, write_whole
from tomoe.model.loading import load_tokenizer
from tomoe.plan import FINETUNED, Plan
from tomoe.recipe.conversion import Recipe
from tomoe.report.card import write_card
from tomoe.report.page import Generation, PageFacts, commands, write_page
from tomoe.training.run_folder import RunFolder

FORMAT = "tomoe-report-1"
PASSAGE = 120  # tokens of a source that the page colours


def write_reports(
    out: Path, listen: Listener = silent, dense: PreTrainedModel | None = None, again: bool = True
) -> list[Row]:
    """Measure a conversion beside its dense model on the text it held out; write evaluation.json, README.md, report.html.

    `dense` is the dense model where the caller has it loaded. With `again` false, what was measured of this plan before
    (evaluation.json, report.json) is shown as it is. Several processes measure together, and process 0 writes. Raises
    UserError where `out` holds no conversion or cannot be written.
    """
    from tomoe.report.gallery import draw  # here, because matplotlib takes longer to import than all the rest

    plan, recipe = Plan.load(out), Recipe.load(out / "recipe.json")
    kept = None if again else _kept(out)
    if kept is None:
        # what was shared out was too large for one GPU
        device = "cpu" if recipe.train.shard else recipe.device
        # and what was packed, or never in memory, fits it layer by layer only
        stream = recipe.stream or recipe.train.base != "dense"
        dense = dense if dense is not None else load_model(recipe.model, recipe.train.dtype, device, stream)
        moe, tokenizer = load_model(str(out), recipe.train.dtype, device, stream), load_tokenizer(str(out))
        text = held_out_text([str(out)])
        rows = compare_on([(recipe.model, dense), (str(out), moe)], text, listen)
        if distributed.rank():
            return rows
        observed = _observe(out, rows, (dense, moe), tokenizer, text)
        write_whole(out / "evaluation.json", to_json(rows))
        write_whole(out / "report.json", json.dumps(observed, indent=1, ensure_ascii=False) + "\n")
    else:
        rows, observed = kept
        if distributed.rank():
            return rows
    write_card(out, plan, rows)
    cost, timed = _read(out / "run" / "cost.json"), _read(out / "benchmark.json").get("cells", [])
    pictures = draw(plan, rows, RunFolder(out / "run").rows(), cost, timed, out / "figures")
    title = f"{rows[0].name} as a Mixture-of-Experts, {plan.active_fraction():.0%} active"
    facts = PageFacts(
        title, plan, rows, [Generation(own["prompt"], own["answers"]) for own in observed["generations"]],
        [(name, RoutingTrace(**trace)) for name, trace in observed["texts"]], pictures,
        commands=commands(recipe, own_name(out), FINETUNED in plan.notes), cost=cost, timed=bool(timed),
    )  # fmt: skip
    write_page(out, facts)
    return rows


def _kept(out: Path) -> tuple[list[Row], dict[str, Any]] | None:
    """What was measured of the plan in `out` before; None where there is nothing, or it was of another plan or version."""
    observed = _read(out / "report.json")
    if (observed.get("format"), observed.get("plan")) != (FORMAT, sha256(out / "plan.safetensors")):
        return None
    evaluation = out / "evaluation.json"
    return (from_json(evaluation.read_text(encoding="utf-8")), observed) if evaluation.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    return read_json(path) if path.exists() else {}


def _observe(
    out: Path,
    rows: list[Row],
    models: tuple[PreTrainedModel, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    text: EvaluationText,
) -> dict[str, Any]:
    """How the dense model and the MoE go on from a prompt, and the experts of some tokens of every source."""
    moe = models[1]
    answers = [(row.name, generate(model, tokenizer, PROMPT)) for row, model in zip(rows, models, strict=True)]
    passages = [(name, trace_ids(moe, tokenizer, ids).to_dict()) for name, ids in _passages(text)]
    passages.append(("What the MoE wrote", trace_text(moe, tokenizer, PROMPT + answers[-1][1], PASSAGE).to_dict()))
    generations = [{"prompt": PROMPT, "answers": answers}]
    return {"format": FORMAT, "plan": sha256(out / "plan.safetensors"), "generations": generations, "texts": passages}


def _passages(text: EvaluationText) -> Iterator[tuple[str, list[int]]]:
    """The beginning of the first block of every source."""
    ids, own = text.blocks.input_ids, text.blocks.source_ids
    for i, name in enumerate(text.sources if own is not None else [text.name]):
        blocks = range(len(ids)) if own is None else (own == i).nonzero()[:, 0].tolist()
        for block in blocks[:1]:
            yield (
                f"{name}, held out" if own is not None else name,
                ids[block][text.blocks.mask[block]][:PASSAGE].tolist(),
            )
