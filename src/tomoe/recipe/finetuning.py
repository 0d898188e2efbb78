"""The recipe of fine-tuning a converted model."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from tomoe.recipe.base import BaseRecipe, Section
from tomoe.recipe.conversion import DataSection, LoopSection


class TunedLossSection(Section):
    """The objective."""

    section: ClassVar[str] = "loss"
    objective: Literal["kl", "lm"] = "kl"
    """`kl`: KL(dense model || converted model); `lm`: the language-model loss, for text that teaches something new."""
    balance_weight: float = Field(default=1.0, ge=0)
    """gamma, of R_L: how evenly tokens spread over experts."""


class LoraSection(Section):
    """Adapters of low rank beside frozen weights, merged at the end (weights = lora)."""

    section: ClassVar[str] = "lora"
    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    """The adapters' output counts alpha / rank times."""


class TunedTrainSection(LoopSection):
    """The loop, with smaller steps than for masks: weights are there already."""

    steps: int = Field(default=200, ge=0)
    learning_rate: float = Field(default=1e-4, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    dtype: Literal["stored", "float32", "bfloat16"] = "stored"
    """Of the weights while they run; `stored`: as in the converted folder (float16 as
    float32, for the gradient's sake). Updates are summed up in float32 always."""


class TunedDataSection(DataSection):
    """The text; without sources, what the conversion learned from, as far as its folder keeps it."""

    sources: tuple[str, ...] = ()


class FinetuneRecipe(BaseRecipe):
    """Everything that decides how a converted model is fine-tuned.

    `FinetuneRecipe(...)` and `FinetuneRecipe.load(...)` raise UserError, in one sentence, for a key or value that is not allowed.
    """

    bystanders: ClassVar[frozenset[str]] = frozenset(
        {"device", "track", "train.log_every", "train.save_every", "train.teacher_cache"}
    )
    model: str = ""
    """A converted folder."""
    dense: str = ""
    """The dense model that it came from; empty: as its plan names it."""
    seed: int = Field(default=0, ge=0)
    device: str = "auto"
    track: Literal["none", "tensorboard", "trackio", "wandb"] = "none"
    """Who follows the training beside metrics.jsonl."""
    form: Literal["moe", "pseudo"] = "moe"
    """`moe`: the converted model itself; `pseudo`: the dense model under the plan's masks (app. pmoe), folded again. Both learn
    the same."""
    weights: Literal["full", "lora"] = "full"
    """`full`: all weights of the blocks; `lora`: adapters beside them (needs peft). Embeddings and output matrix stay."""
    routers: Literal["learned", "frozen"] = "learned"
    """Expert routers; value routers stay as they are."""
    loss: TunedLossSection = TunedLossSection()
    lora: LoraSection = LoraSection()
    train: TunedTrainSection = TunedTrainSection()
    data: TunedDataSection = TunedDataSection()
