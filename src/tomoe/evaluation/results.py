"""Measurements of a model as plain data, and their JSON (evaluation.json)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on only

from tomoe.errors import UserError
from tomoe.files import read_json, validated

FORMAT = "tomoe-comparison-2"
# in the folder of a model with fine-grained experts: the dense model, then the model with several numbers of experts
ACTIVE_CURVE = "active.json"
# metrics of tasks whose answers are written
LOOP_METRIC = "ends in a loop"
TOKENS_PER_S = "tokens_per_s"
T = TypeVar("T")


def _rectangular(shares: list[list[float]]) -> list[list[float]]:
    if len({len(row) for row in shares}) > 1:
        raise ValueError("layers have different numbers of experts")
    return shares


# What a file may hold, whoever wrote it.
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1.001)]
Name = Annotated[str, Field(strict=True, max_length=10_000)]
Shares = Annotated[
    list[Annotated[list[Share], Field(min_length=1)]], Field(min_length=1), AfterValidator(_rectangular)
]  # [layer][expert]


def checked(path: Path, kind: type[T], values: object) -> T:
    """Validate `values`, read from a JSON file, as a `kind`. Raises UserError with the file and the first error."""
    try:
        return validated(kind, values)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); measure again") from None


@dataclass(frozen=True)
class Span:
    """A measurement on the positions of long sequences between the span before it and `end`."""

    end: Count  # tokens from the beginning of a sequence
    tokens: Count  # that were predicted
    perplexity: Positive
    kl: Number | None = None


@dataclass(frozen=True)
class Measurement:
    """One model on one text, with everything needed to measure it again. Plain data, as in JSON."""

    perplexity: Positive  # exp(nll)
    standard_error: NotNegative | None  # of the perplexity, over sequences; None if there are fewer than two
    nll: Number  # mean negative log-likelihood of a token, nats
    tokens: Count  # tokens that were predicted
    blocks: Count  # sequences with at least one such token
    context_length: Count  # tokens of a sequence
    stride: Count | None = None  # tokens from one sequence to the next, if they overlap; None: side by side
    kl: Number | None = None  # KL(reference || model), mean over the same tokens, nats
    top1_agreement: Share | None = None  # share of tokens for which both have the same most likely one
    model: Name = ""
    data: Name = ""
    data_sha256: Name = ""  # of token ids and mask
    dtype: Name = ""
    device: Name = ""
    seed: int | None = None  # that the data was prepared with
    versions: dict[Name, Name] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)  # by position, of sequences longer than the first span


class ModelFacts(TypedDict):
    """Counts of weights. "block" parameters are decoder parameters: the projection weights of attention and MLPs."""

    total_params: Count  # stored, shared ones once
    active_params: Count  # that work on one token: embeddings, norms and biases in full
    block_params: Count  # stored in the decoder layers, routers included
    active_block_params: Count
    # active decoder parameters over those of the dense model; None if that is unknown
    active_share: NotNegative | None
    bytes_on_disk: Count | None
    max_positions: Count | None  # tokens that the model is made for


@dataclass(frozen=True)
class ExpertUsage:
    """Share of the tokens' choices for every expert of every layer; each row sums to 1."""

    shares: Shares
    tokens: Count
    per_token: list[Count] = field(default_factory=list)
    """Fine-grained experts of a token, by layer; empty for overlapping ones, of which a token uses one."""

    def __post_init__(self) -> None:
        """Raise ValueError unless there is one number per layer; a file may hold anything."""
        if self.per_token and len(self.per_token) != len(self.shares):
            raise ValueError("experts per token are not given for every layer")


@dataclass(frozen=True)
class TaskScore:
    """One model's score in one task. Fractions, not percent."""

    task: Name
    shots: Count
    metric: Name
    value: Number
    standard_error: NotNegative | None
    examples: Count
    truncated: Count  # requests that did not fit the model's context and lost their beginning
    metrics: dict[Name, Number]  # all that the task reports
    version: Name  # of the task, as lm-eval counts it
    harness: Name  # lm-eval and its version, or how answers were written
    seed: int = 1234  # of the choice of few-shot examples; lm-eval's own


@dataclass(frozen=True)
class Row:
    """One model: its quality, its size, and its routing if it has routers."""

    measurement: Measurement
    facts: ModelFacts
    usage: ExpertUsage | None = None
    training_overlap: Share | None = None  # share of the text that it was fitted on, see compare.py
    tasks: tuple[TaskScore, ...] = ()
    experts_per_token: Count | None = None  # of fine-grained experts, the most that any layer used

    @property
    def name(self) -> str:
        return self.measurement.model


def to_json(rows: list[Row] | tuple[Row, ...]) -> str:
    """Serialize rows for `read_rows`."""
    return json.dumps({"format": FORMAT, "rows": [asdict(row) for row in rows]}, indent=2, allow_nan=False) + "\n"


def read_rows(folder: Path, name: str = "evaluation.json") -> list[Row]:
    """Read the measurements of the model in `folder` from its file of that name; empty if there is none, or one of another
    version of tomoe. Raises UserError if the file is damaged."""
    path = folder / name
    if not path.exists():
        return []
    values = read_json(path)
    if values.get("format") != FORMAT:
        return []
    return checked(path, list[Row], values.get("rows"))
