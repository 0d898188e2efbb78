"""Measure a conversion beside its dense model and write its report: evaluation.json, README.md, report.html, figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on only

from tomoe import distributed
from tomoe.data.evaluation_text import EvaluationText, held_out_text
from tomoe.errors import UserError
from tomoe.evaluation.evaluate import compare_on
from tomoe.evaluation.results import DIAL, Count, Name, NotNegative, Row, read_rows, to_json, validated
from tomoe.evaluation.routing_trace import RoutingTrace, trace_ids, trace_text
from tomoe.evaluation.speed.timings import Cell
from tomoe.evaluation.token_losses import TokenLosses, token_losses, typical_tokens
from tomoe.evaluation.usage import routers
from tomoe.evaluation.writing.loops import TOPICS, Variety, opening, question
from tomoe.evaluation.writing.tasks import LOOP_LENGTH, LoopTask
from tomoe.files import atomic_write, basename, read_json, sha256
from tomoe.model.base_weights import BaseWeights
from tomoe.model.loading import load_model, load_tokenizer
from tomoe.model.shape import max_positions
from tomoe.plan import FINETUNED, read_plan
from tomoe.progress import ProgressCallback, no_progress
from tomoe.recipe.conversion import Recipe
from tomoe.report.all_figures import all_figures, save_all
from tomoe.report.card import write_card
from tomoe.report.forms import WORDS
from tomoe.report.page import Generation, PageFacts, commands, write_page
from tomoe.training.run_folder import RunFolder

FORMAT = "tomoe-report-1"
PASSAGE = 120  # tokens of a source that the page colors
LONG = 1024  # tokens of the held-out text whose experts are counted, about
WRITTEN, SHOWN = 8, 3  # texts that each model writes, and those that the page shows
SLOW, SHORT = 2e9, 64  # weights from which on a CPU writes short texts, and their tokens
PAIRED = 512  # tokens of its first sequence whose losses are compared; their logits are in memory together


@dataclass(frozen=True)
class Observed:
    """report.json: what the models wrote, and the experts of some tokens of every source."""

    format: str
    plan: str  # sha256 of the plan's last file
    generations: list[Generation]
    texts: list[tuple[str, RoutingTrace]]  # none where tokens choose inputs
    losses: TokenLosses | None = None  # of a passage of the held-out text
    typical: list[list[list[Name]]] = field(default_factory=list)  # [layer][expert]: tokens
    varieties: list[Variety] = field(default_factory=list)  # of what both models wrote, loops among it

    def __post_init__(self) -> None:
        """Raises ValueError if traces contradict each other or themselves; a file may hold anything."""
        if len({(len(trace.experts), trace.num_experts, not trace.chosen) for _, trace in self.texts}) > 1:
            raise ValueError("the texts are routed by models of different sizes")
        for _, trace in self.texts:
            rows = trace.experts
            if not rows or not trace.tokens or any(len(row) != len(trace.tokens) for row in rows):
                raise ValueError("a text does not have one expert for each layer and token")
            if any(layer and len(layer) != len(trace.tokens) for layer in trace.chosen) or (
                trace.chosen and len(trace.chosen) != len(rows)
            ):
                raise ValueError("a text does not have its experts for each layer and token")
            chosen = (expert for layer in trace.chosen for experts in layer for expert in experts)
            if max(max(map(max, rows)), *chosen, 0) >= trace.num_experts or trace.num_experts > 2**16:
                raise ValueError("a token is routed to an expert that there is not")


class Cost(TypedDict, total=False):
    """cost.json of a run, as far as the report shows it."""

    seconds: dict[Name, NotNegative]
    tokens: dict[Name, Count]
    peak_memory_bytes: Count | None
    device_peak_memory_bytes: Count | None
    device: Name
    threads: Count
    resumed: bool


def write_reports(
    out: Path, on_progress: ProgressCallback = no_progress, dense: PreTrainedModel | None = None, again: bool = True
) -> list[Row]:
    """Measure a conversion beside its dense model on the text it held out; write evaluation.json, README.md, report.html.

    `dense` is the dense model if the caller has it loaded. With `again` false, what was measured of this plan before
    (evaluation.json, report.json) is shown as it is. Several processes measure together, and process 0 writes. Raises
    UserError if `out` holds no conversion, holds damaged files, or cannot be written.
    """
    plan, recipe = read_plan(out), Recipe.load(out / "recipe.json")
    rows, observed = ([], None) if again else _kept(out)
    if observed is None:
        rows, observed = _measure(out, recipe, dense, on_progress)
    if distributed.rank() or observed is None:
        return rows
    write_card(out, plan, rows)
    cost = _read(out / "run" / "cost.json", Cost) or {}
    timed = [asdict(cell) for cell in _cells(out / "benchmark.json")]
    dial = read_rows(out, DIAL)
    figures = all_figures(plan, rows, RunFolder(out / "run").rows(), cost, timed, dial)
    save_all(figures, out / "figures")
    facts = PageFacts(
        f"{rows[0].name} as {WORDS[plan.form].product}, {plan.active_fraction():.0%} active", plan, rows, observed.generations,
        observed.texts, figures, commands=commands(recipe, basename(out), FINETUNED in plan.notes), cost=cost,
        timed=bool(timed), dial=dial, losses=observed.losses, typical=observed.typical, varieties=observed.varieties,
    )  # fmt: skip
    write_page(out, facts)
    return rows


def _measure(
    out: Path, recipe: Recipe, dense: PreTrainedModel | None, on_progress: ProgressCallback
) -> tuple[list[Row], Observed | None]:
    """Measure both models and write what was found; nothing is observed or written by processes other than 0."""
    # a base that was sharded is too large for one GPU
    device = "cpu" if recipe.train.shard else recipe.device
    # and one that was quantized or offloaded fits layer by layer only
    offload = recipe.offload or recipe.train.quantization != "none"
    dense = dense if dense is not None else load_model(recipe.model, recipe.train.dtype, device, offload)
    moe, tokenizer = load_model(str(out), recipe.train.dtype, device, offload), load_tokenizer(str(out))
    base = BaseWeights.of(recipe)
    dense, moe = base.computing_(dense), base.computing_(moe)
    text = held_out_text([str(out)])
    rows = compare_on([(recipe.model, dense), (str(out), moe)], text, on_progress)
    if distributed.rank():
        return rows, None
    observed = _observe(out, rows, (dense, moe), tokenizer, text, offload)
    atomic_write(out / "evaluation.json", to_json(rows))
    atomic_write(out / "report.json", json.dumps(observed, default=vars, ensure_ascii=False) + "\n")
    return rows, observed


def _kept(out: Path) -> tuple[list[Row], Observed | None]:
    """What was measured of the plan in `out` before; empty if nothing was, or of another plan or by another version."""
    path = out / "report.json"
    if not path.exists():
        return [], None
    values, rows = read_json(path), read_rows(out)
    if not rows or (values.get("format"), values.get("plan")) != (FORMAT, _plan_hash(out)):
        return [], None
    return rows, _checked(path, Observed, values)


def _plan_hash(out: Path) -> str:
    """Sha256 of plan.safetensors, or of plan.json, which is all of a plan whose tokens choose inputs."""
    tensors = out / "plan.safetensors"
    return sha256(tensors if tensors.is_file() else out / "plan.json")


def _read(path: Path, kind: type[Any]) -> Any:
    """A file's values as a `kind`; None if there is no such file. Raises UserError if it is damaged."""
    return _checked(path, kind, read_json(path)) if path.exists() else None


def _cells(path: Path) -> list[Cell]:
    """The cells of benchmark.json; none if there is no such file. Raises UserError if it is damaged."""
    return _checked(path, list[Cell], read_json(path).get("cells")) if path.exists() else []


def _checked(path: Path, kind: type[Any], values: Any) -> Any:
    try:
        return validated(kind, values, path.name)
    except UserError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _observe(
    out: Path,
    rows: list[Row],
    models: tuple[PreTrainedModel, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    text: EvaluationText,
    offload: bool,
) -> Observed:
    """What the dense model and the MoE write on some topics, and the experts of some tokens of every source."""
    moe = models[1]
    texts = _text_task(models[0], offload)
    written = [texts.write(model, tokenizer) for model in models]
    generations = [
        Generation(question(topic) if written[0].chat else opening(topic), [
            (row.name, own.texts[n]) for row, own in zip(rows, written, strict=True)
        ])
        for n, topic in enumerate(texts.topics[:SHOWN])
    ]  # fmt: skip
    varieties = [texts.variety(row.name, own) for row, own in zip(rows, written, strict=True)]
    passages, first = [], generations[0]
    if routed := bool(routers(moe)):
        passages = [(name, trace_ids(moe, tokenizer, ids)) for name, ids in _passages(text)]
        passages.append(
            ("What the MoE wrote", trace_text(moe, tokenizer, f"{first.prompt}\n\n{first.answers[-1][1]}", PASSAGE))
        )
    long = [ids for ids in (row[mask].tolist() for row, mask in zip(*_beginning(text), strict=True)) if len(ids) > 1]
    return Observed(
        FORMAT, _plan_hash(out), generations, passages,
        token_losses(models[0], moe, tokenizer, long[0][:PAIRED]) if long else None,
        typical_tokens([trace_ids(moe, tokenizer, ids) for ids in long]) if long and routed else [], varieties,
    )  # fmt: skip


def _text_task(model: PreTrainedModel, offload: bool) -> LoopTask:
    """The texts to write: at most a quarter of the context, and short ones where a token takes long."""
    slow = offload or (model.device.type == "cpu" and model.num_parameters() > SLOW)
    positions = max_positions(model.config) or 4 * LOOP_LENGTH
    return LoopTask(TOPICS[:WRITTEN], min(SHORT if slow else LOOP_LENGTH, max(1, positions // 4)))


def _beginning(text: EvaluationText) -> tuple[Tensor, Tensor]:
    """Ids and mask of the first sequences, about LONG tokens."""
    sequences = text.sequences
    count = max(1, LONG // sequences.input_ids.shape[1])
    return sequences.input_ids[:count], sequences.mask[:count]


def _passages(text: EvaluationText) -> Iterator[tuple[str, list[int]]]:
    """The beginning of the first sequence of every source."""
    sequences, sources = text.sequences, text.sequences.source_ids
    if sources is None:
        starts = {text.name: 0}
    else:
        ids = sources.tolist()
        starts = {f"{name}, held out": ids.index(i) for i, name in enumerate(text.sources) if i in ids}
    for name, i in starts.items():
        yield name, sequences.input_ids[i][sequences.mask[i]][:PASSAGE].tolist()
