"""A recipe: everything that decides a conversion, frozen and validated, from a file plus `section.key=value`."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from tomoe.errors import UserError
from tomoe.recipe.base import BaseRecipe, Section

# Where and how often to write or compute changes nothing that is learned.
_BYSTANDERS = frozenset(
    {"device", "stream", "track", "train.log_every", "train.save_every", "train.shard", "train.teacher_cache"}
)
STOCK_MULTIPLE = 64  # of expert widths: grouped kernels and quantised blocks of 32 divide it


class ExpertsSection(Section):
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


class SamplingSection(Section):
    """The noise of the masks while training; there is none afterwards."""

    section: ClassVar[str] = "sampling"
    noise: Literal["gumbel", "logistic"] = "gumbel"
    """`gumbel` is the paper's; `logistic` (the difference of two Gumbels) has zero mean."""
    temperature: float = Field(default=0.4, gt=0)
    """tau."""
    keep_bias: float = 3.0
    """b: added to every mask logit, so that training starts from a nearly whole model."""


class LossSection(Section):
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


class LoopSection(Section):
    """The loop, whatever it trains."""

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
    weight_decay: float = Field(default=0.05, ge=0)
    gradient_clip: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient; 0 = off."""
    gradient_checkpointing: bool = False
    teacher_cache: str = ""
    """Folder that keeps the dense model's final hidden states, for this and other runs on the same text."""
    save_every: int = Field(default=100, ge=1)
    log_every: int = Field(default=1, ge=1)
    max_bad_steps: int = Field(default=5, ge=1)
    """This many steps in a row without a finite loss end the training."""


class TrainSection(LoopSection):
    """The loop that learns masks and routers."""

    budget_warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the asked active share falls linearly from 1 to `active`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the frozen base; everything trainable is float32. float16 is for carving alone (steps = 0)."""
    base: Literal["dense", "bnb8", "bnb4", "torchao8"] = "dense"
    """The frozen base while learning: as it is, or packed into 8 or 4 bits by bitsandbytes or torchao."""
    shard: bool = False
    """Under torchrun: each process holds its share of the frozen base, not all of it (FSDP2)."""

    @model_validator(mode="after")
    def _compute_together(self) -> Self:
        if self.shard and self.teacher_cache:  # one process may find a block that another does not
            raise UserError(
                "train.teacher_cache and train.shard exclude each other: a base that is shared out runs in all processes or none"
            )
        if self.dtype == "float16" and self.steps:  # no loss is scaled here
            raise UserError(
                f"train.dtype is float16, in which small gradients are lost, and there are {self.steps} steps to learn; choose "
                "bfloat16 or float32, or carve (train.steps = 0)"
            )
        if self.shard and self.base != "dense":
            raise UserError(
                f"train.shard and train.base = {self.base} exclude each other; share out the dense base, or pack it"
            )
        return self


class DataSection(Section):
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
    """Column that holds the text, for hub, .jsonl and .parquet sources that name it otherwise; named sets know theirs."""

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


class Recipe(BaseRecipe):
    """Everything that decides a conversion.

    `Recipe(...)` and `Recipe.load(...)` raise UserError, in one sentence, for a key or value that is not allowed.
    """

    bystanders: ClassVar[frozenset[str]] = _BYSTANDERS
    model: str = ""
    """Hub id, local folder, .gguf file, or a name that `tomoe fetch` knows."""
    active: float = Field(default=0.7, gt=0, le=1)
    """The budget p: active share of the block parameters."""
    seed: int = Field(default=0, ge=0)
    start: Literal["carved", "random"] = "carved"
    """`carved`: from calibration statistics; `random`: the paper's."""
    device: str = "auto"
    stream: bool = False
    """Without learning only: the decoder layers stay in their files, and are in memory one at a time."""
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

    @model_validator(mode="after")
    def _stream_what_can_be(self) -> Self:
        if self.stream and self.train.steps:
            raise UserError(
                f"stream reads every layer anew for every pass, which learning ({self.train.steps} steps) takes thousands of; "
                "carve instead (train.steps = 0)"
            )
        if self.stream and "self" in self.data.sources:
            raise UserError(
                "stream reads every layer anew for every pass, and the source self takes one for each token; name a text "
                "with data.sources (--data FILE)"
            )
        if self.stream and self.train.shard:
            raise UserError(
                "stream and train.shard exclude each other: one leaves the layers on disk, one shares them out"
            )
        return self

    @property
    def common_multiple(self) -> int:
        """0 where layers may differ in width; else all have one, a multiple of this as far as the budget allows."""
        return 0 if self.target == "hf" else max(STOCK_MULTIPLE, self.experts.width_multiple)
