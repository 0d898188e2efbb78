"""A recipe: everything that decides a conversion, frozen and validated, from a file plus `section.key=value`."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tomoe.errors import UserError
from tomoe.files import write_whole
from tomoe.recipe_files import read_recipe

# Where and how often to write or compute changes nothing that is learned: neither digest nor differences see these.
_BYSTANDERS = frozenset(
    {"device", "track", "train.log_every", "train.save_every", "train.shard", "train.teacher_cache"}
)
STOCK_MULTIPLE = 64  # of expert widths: grouped kernels and quantised blocks of 32 divide it


class _Section(BaseModel):
    """Frozen keys; one that nobody knows is an error, and so are infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)
    section: ClassVar[str] = ""
    """Its name in the recipe file; empty for the recipe itself."""

    def __init__(self, **values: Any) -> None:
        """Raises UserError, in one sentence, for a key or value that is not allowed."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(_sentence(error, self.section)) from None


class ExpertsSection(_Section):
    """What a layer becomes."""

    section: ClassVar[str] = "experts"
    num_experts: int = Field(default=8, ge=1)
    """Experts of an MLP (N)."""
    embedding_size: int = Field(default=128, ge=2, multiple_of=2)
    """Size of an expert embedding (E); even, because the two directions of the hypernetwork share it."""
    width_multiple: int = Field(default=32, ge=1)
    """Expert widths are multiples of this: grouped kernels need 8, K-quants 256."""
    attention: Literal["dynamic", "static", "none"] = "none"
    """`dynamic`: a choice of V/O dims for each token and of Q/K dims for all; `static`: one choice of each for all
    tokens; `none`: attention stays whole."""
    attention_embedding: Literal["global", "local"] = "global"
    """`global`: attention embeddings come from the hypernetwork; `local`: each layer has its own (ablation)."""
    attention_share: float = Field(default=1 / 3, ge=0, le=1)
    """Carved start only: how much of the cut attention pays. Every layer's attention starts with
    1 - attention_share x (1 - active) of its dims; 1 = attention shrinks as much as the whole, 0 = it starts whole."""


class SamplingSection(_Section):
    """The noise of the masks while training; there is none afterwards."""

    section: ClassVar[str] = "sampling"
    noise: Literal["gumbel", "logistic"] = "gumbel"
    """`gumbel` is the paper's; `logistic` (the difference of two Gumbels) has zero mean."""
    temperature: float = Field(default=0.4, gt=0)
    """tau."""
    keep_bias: float = 3.0
    """b: added to every mask logit, so that training starts from a nearly whole model."""


class LossSection(_Section):
    """The objective: distillation (or language modelling) plus weighted penalties."""

    section: ClassVar[str] = "loss"
    objective: Literal["kl", "lm"] = "kl"
    """`kl`: KL(teacher || student); `lm`: the language-model loss (ablation)."""
    budget_weight: float = Field(default=16.0, ge=0)
    """alpha, of R_P: active parameters against the asked share."""
    coverage_weight: float = Field(default=2.0, ge=0)
    """beta, of R_U: the union of experts against the whole layer."""
    balance_weight: float = Field(default=1.0, ge=0)
    """gamma, of R_L: how evenly tokens spread over experts."""


class TrainSection(_Section):
    """The loop."""

    section: ClassVar[str] = "train"
    steps: int = Field(default=500, ge=0)
    batch_size: int = Field(default=1, ge=1)
    """Blocks of one forward pass."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Forward passes of one step."""
    learning_rate: float = Field(default=1e-2, gt=0)
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises linearly from zero."""
    budget_warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the asked active share falls linearly from 1 to `active`."""
    weight_decay: float = Field(default=0.05, ge=0)
    gradient_clip: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient; 0 = off."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the frozen base; everything trainable is float32."""
    gradient_checkpointing: bool = False
    shard: bool = False
    """Under torchrun: each process holds its share of the frozen base, not all of it (FSDP2)."""
    teacher_cache: str = ""
    """Folder that keeps the dense model's final hidden states, for this and other runs on the same text."""
    save_every: int = Field(default=100, ge=1)
    log_every: int = Field(default=1, ge=1)
    max_bad_steps: int = Field(default=5, ge=1)
    """This many steps in a row without a finite loss end the training."""

    @model_validator(mode="after")
    def _compute_together(self) -> Self:
        if self.shard and self.teacher_cache:  # one process may find a block that another does not
            raise UserError(
                "train.teacher_cache and train.shard exclude each other: a base that is shared out runs in all processes or none"
            )
        return self


class DataSection(_Section):
    """The text. `tokens` counts training, calibration and evaluation together."""

    section: ClassVar[str] = "data"
    sources: tuple[str, ...] = Field(default=("self",), min_length=1)
    """Names, hub ids or local paths; several are mixed in equal parts by tokens."""
    block_size: int = Field(default=512, ge=8)
    """Tokens of one block (context length)."""
    tokens: int = Field(default=100_000, ge=1)
    """Tokens to prepare in all; for `self`: to sample."""
    calibration_tokens: int = Field(default=8192, ge=1)
    evaluation_tokens: int = Field(default=16_384, ge=1)
    text_column: str | None = None
    """Column that holds the text, for hub, .jsonl and .parquet sources that name it otherwise."""

    @field_validator("sources", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _leave_something_to_train_on(self) -> Self:
        if self.tokens <= self.calibration_tokens + self.evaluation_tokens:
            raise UserError(
                f"data.tokens is {self.tokens}, but it should exceed data.calibration_tokens "
                f"({self.calibration_tokens}) and data.evaluation_tokens ({self.evaluation_tokens}) together"
            )
        return self


class Recipe(_Section):
    """Everything that decides a conversion.

    `Recipe(...)` and `Recipe.load(...)` raise UserError, in one sentence, for a key or value that is not allowed.
    """

    model: str = ""
    """Hub id, local folder, .gguf file, or a name that `tomoe fetch` knows."""
    active: float = Field(default=0.7, gt=0, le=1)
    """The budget p: active share of the block parameters."""
    seed: int = Field(default=0, ge=0)
    start: Literal["carved", "random"] = "carved"
    """`carved`: from calibration statistics; `random`: the paper's."""
    device: str = "auto"
    track: Literal["none", "tensorboard", "trackio", "wandb"] = "none"
    """Who follows the training beside metrics.jsonl."""
    target: Literal["hf", "mixtral", "qwen2_moe", "qwen3_moe", "gguf"] = "hf"
    """What the plan is to fit without loss. `hf`, ToMoE's own form, holds every plan; the others hold experts of one width
    in all layers, and no choice of V/O dims for each token."""
    experts: ExpertsSection = ExpertsSection()
    sampling: SamplingSection = SamplingSection()
    loss: LossSection = LossSection()
    train: TrainSection = TrainSection()
    data: DataSection = DataSection()

    @model_validator(mode="after")
    def _fit_the_target(self) -> Self:
        if self.target != "hf" and self.experts.attention == "dynamic":
            raise UserError(
                f"target {self.target} holds no choice of V/O dims for each token (experts.attention is dynamic); set it to "
                "static or none, or the target to hf"
            )
        return self

    @property
    def common_multiple(self) -> int:
        """0 where layers may differ in width; else all have one, a multiple of this as far as the budget allows."""
        return 0 if self.target == "hf" else max(STOCK_MULTIPLE, self.experts.width_multiple)

    @classmethod
    def load(cls, path_or_preset: str | Path | None, overrides: Sequence[str] = ()) -> Self:
        """Read a .toml or .json file or a preset (None: the default one), then apply `section.key=value` overrides.

        The value of an override is JSON where it parses as such, else a string.
        Raises UserError: no such file or preset, not a recipe, a key or value that is not allowed.
        """
        values, origin = read_recipe("default" if path_or_preset is None else path_or_preset)
        try:
            recipe = cls(**values)
        except UserError as error:
            raise UserError(f"{origin}: {error}") from None
        return recipe.changed(overrides) if overrides else recipe

    def changed(self, overrides: Sequence[str]) -> Self:
        """The same recipe with `section.key=value` overrides. Raises UserError for a key or value that is not allowed."""
        values = self.model_dump()
        for override in overrides:
            _apply(values, override)
        return type(self)(**values)

    def leaves(self) -> dict[str, Any]:
        """All keys as `section.key`, with plain JSON values."""
        return dict(_leaves(self))

    def save(self, path: str | Path) -> None:
        """Write JSON that `load` reads back; under a temporary name first, so that no half file is ever seen.

        Raises UserError when the place cannot be written.
        """
        write_whole(Path(path), json.dumps(self.model_dump(mode="json"), indent=2) + "\n")

    def digest(self) -> str:
        """Sha256 (hex) of what decides the outcome: not where it runs, nor how often it writes."""
        deciding = {key: value for key, value in _leaves(self) if key not in _BYSTANDERS}
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()

    def differences(self, other: Recipe) -> list[str]:
        """Sentences such as "train.steps: 500 here, 150 there"; empty exactly when the digests agree."""
        there = dict(_leaves(other))
        return [
            f"{key}: {json.dumps(value)} here, {json.dumps(there[key])} there"
            for key, value in _leaves(self)
            if value != there[key] and key not in _BYSTANDERS
        ]


def _leaves(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    for name, value in recipe.model_dump(mode="json").items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", leaf) for key, leaf in value.items())
        else:
            yield name, value


def _apply(values: dict[str, Any], override: str) -> None:
    """Write one `section.key=value` into the values of a whole recipe."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"the override {override!r} should read section.key=value, for example train.steps=200")
    if key not in _known():
        raise UserError(_unknown(key))
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text.strip()
    section, _, leaf = key.rpartition(".")
    (values[section] if section else values)[leaf] = value


def _known() -> list[str]:
    return [key for key, _ in _leaves(Recipe())]


def _unknown(key: str) -> str:
    """The sentence for a key that does not exist: names its section and the nearest key that does."""
    section, _, leaf = key.rpartition(".")
    known = _known()
    sections = {name.split(".")[0] for name in known if "." in name}
    if key in sections:
        return f"{key} is a section of the recipe; set one of its keys, for example {_keys_of(key)[0]}"
    place = f"section {section} of the recipe" if section in sections else "the recipe"
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    near = same_leaf or difflib.get_close_matches(key, known, n=1, cutoff=0.6) or _nearest_leaf(section, leaf)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(_keys_of(section))}"
    return f"{place} has no key {leaf if section in sections else key!r}; {hint}"


def _nearest_leaf(section: str, leaf: str) -> list[str]:
    own = [name for name in _keys_of(section) if name.startswith(f"{section}.")] or _known()
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(own)}
    return [by_leaf[near] for near in difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.6)]


def _keys_of(section: str) -> list[str]:
    """Keys of a section; for anything else, the top-level keys and section names."""
    inside = [key for key in _known() if key.startswith(f"{section}.")]
    return inside or list(Recipe.model_fields)


def _sentence(error: ValidationError, section: str) -> str:
    """The first complaint of pydantic as one sentence: the key, what was found, what is allowed."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in (section, *first["loc"]) if part != "")
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "extra_forbidden":
        return _unknown(key)
    if first["type"] == "model_type":
        return f"{key} is {first['input']!r}, but it should be a section with keys such as {_keys_of(key)[0]}"
    if first["type"] == "too_short":
        return f"{key} is empty, but it should hold at least {first['ctx']['min_length']}"
    allowed = first["msg"].replace("Input", "it", 1)
    return f"{key} is {first['input']!r}, but {allowed}"
