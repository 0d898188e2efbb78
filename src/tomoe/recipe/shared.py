"""The keys that the recipes of all runs share: model, seed, device, training loop and text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from tomoe.errors import UserError
from tomoe.recipe.base import BaseRecipe, Section

MAX_LEARNING_RATE = 1e37  # AdamW divides it by a tenth in the first step, and what comes out must be a float32
MOST_TOKENS = 100_000  # unless it is said how much: sampling more would take longer than most runs


class LoopSection(Section):
    """The training loop of any kind of run."""

    steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0 skips training."""
    batch_size: int = Field(default=1, ge=1)
    """Sequences per forward pass."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Forward passes per step; under torchrun they are divided among the ranks."""
    learning_rate: float = Field(default=1e-2, gt=0, le=MAX_LEARNING_RATE)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """The learning rate after warm-up: constant, or falling to zero along a cosine."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from zero."""
    weight_decay: float = Field(default=0.05, ge=0)
    """Decoupled weight decay of AdamW."""
    gradient_clip: float = Field(default=1.0, ge=0)
    """Maximum norm of the gradient; 0 = off."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, less memory."""
    save_every: int = Field(default=100, ge=1)
    """Steps between checkpoints."""
    log_every: int = Field(default=1, ge=1)
    """Steps between rows of metrics.jsonl."""
    max_nonfinite_steps: int = Field(default=5, ge=1)
    """Stop after this many consecutive steps without a finite loss."""

    @model_validator(mode="after")
    def _decay_keeps_the_sign(self) -> Self:
        if self.learning_rate * self.weight_decay >= 1:
            raise UserError(
                f"train.weight_decay is {self.weight_decay:g} and train.learning_rate {self.learning_rate:g}; AdamW multiplies "
                "what it trains by 1 - learning_rate x weight_decay in each step, so their product should be well below 1"
            )
        return self


def _names(text: str) -> list[str]:
    """Split names at commas; a comma within the path of an existing file or folder belongs to the path."""
    names: list[str] = []
    parts = text.split(",")
    while parts:
        ends = (n for n in range(len(parts), 1, -1) if Path(",".join(parts[:n]).strip()).expanduser().exists())
        end = next(ends, 1)
        names.append(",".join(parts[:end]).strip())
        parts = parts[end:]
    return [name for name in names if name]


class DataSection(Section):
    """The text for training, calibration and evaluation."""

    sources: tuple[str, ...] = Field(default=("self",), min_length=1)
    """Names, hub ids or local paths; several are mixed in equal parts by tokens. `self` samples from the dense model. The method
    `inputs` implies `python-docs`."""
    seq_len: int = Field(default=512, ge=8)
    """Tokens per sequence (context length)."""
    tokens: int = Field(default=0, ge=0)
    """Tokens for training, calibration and evaluation together; for `self`, tokens to sample. 0: as many as calibration,
    evaluation and repair need; with steps, enough to read each token once, up to 100,000."""
    calibration_tokens: int = Field(default=32_768, ge=1)
    """Tokens that the method collects statistics from."""
    evaluation_tokens: int = Field(default=16_384, ge=1)
    """Tokens to evaluate on."""
    evaluation_source: str | None = None
    """Another text to evaluate on, named as in `sources`. None: hold out a part of the sources."""
    text_column: str | None = None
    """Column with texts or chats, in hub, .jsonl and .parquet sources. None: in each row the first that is not empty of `text`,
    `messages`, `conversations`, `conversation`, `prompt` and `completion`, `instruction`, `input` and `output`."""

    @field_validator("sources", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        return _names(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _leave_something_to_train_on(self) -> Self:
        if 0 < self.tokens <= self.calibration_tokens + self.held_out_tokens:
            held_out = f" and data.evaluation_tokens ({self.held_out_tokens}) together" if self.held_out_tokens else ""
            raise UserError(
                f"data.tokens is {self.tokens}, but it should exceed "
                f"data.calibration_tokens ({self.calibration_tokens}){held_out}"
            )
        return self

    @property
    def held_out_tokens(self) -> int:
        """Tokens of the sources that nothing is fitted to."""
        return self.evaluation_tokens if self.evaluation_source is None else 0


class RunRecipe(BaseRecipe):
    """What the training loop and the run folder read from the recipe of any run."""

    # Where to compute and how often to write do not change what is learned.
    NOT_IN_DIGEST: ClassVar[frozenset[str]] = frozenset({"device", "train.log_every", "train.save_every"})
    model: str = ""
    """The model to start from."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Random seed."""
    device: str = "auto"
    """`auto` (CUDA if available), `cpu`, `cuda` or `cuda:N`."""
    if TYPE_CHECKING:  # each kind of run declares these itself, after its other sections: keys keep that order
        train: LoopSection
        data: DataSection

    def fitted_tokens(self) -> int:
        """Maximum tokens of training and calibration text that are fitted to in closed form."""
        return 0

    @model_validator(mode="after")
    def _enough_text(self) -> Self:
        # a frozen model is changed in its dictionary
        self.__dict__["data"] = self._with_enough_text()
        return self

    def _with_enough_text(self) -> DataSection:
        """Set `data.tokens` if it is 0; it still counts as not given."""
        train = self.train
        data = self.data
        if data.tokens:
            return data
        # a repair is fitted to the calibration text, too
        training = max(self.fitted_tokens() - data.calibration_tokens, data.seq_len)
        least = data.calibration_tokens + data.held_out_tokens + training
        # a batch as large as fits (0) reads as much as it may
        read = train.steps * train.gradient_accumulation_steps * (train.batch_size or MOST_TOKENS) * data.seq_len
        asked = min(data.calibration_tokens + data.held_out_tokens + read, MOST_TOKENS)
        chosen = data.model_copy(update={"tokens": max(least, asked)})
        chosen.model_fields_set.discard("tokens")
        return chosen
