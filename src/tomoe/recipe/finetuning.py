"""The recipe of fine-tuning a converted model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tomoe.recipe.base import Section
from tomoe.recipe.shared import MAX_LEARNING_RATE, DataSection, LoopSection, RunRecipe


class TunedLossSection(Section):
    """The objective of fine-tuning."""

    objective: Literal["kl", "lm"] = "kl"
    """`kl`: KL(dense model || converted model); `lm`: the language-modeling loss, to teach something new."""
    balance_weight: float = Field(default=1.0, ge=0)
    """Weight of R_L (gamma, Eq. 9): spreads tokens evenly over experts."""


class LoraSection(Section):
    """LoRA adapters, merged at the end (weights = lora)."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapters."""
    alpha: int = Field(default=32, ge=1)
    """Scale of the adapters: their output is multiplied by alpha / rank."""


class TunedTrainSection(LoopSection):
    """The training loop of fine-tuning."""

    steps: int = Field(default=200, ge=0)
    """Optimizer steps; 0 skips training."""
    learning_rate: float = Field(default=0.0, ge=0, le=MAX_LEARNING_RATE)
    """Peak learning rate of AdamW, relative to the RMS of each matrix (adapters: absolute). 0: a thousandth of the KL on held-out
    text before the first step, at most 1e-3, because the less there is to recover, the smaller it should be (with
    `loss.objective=lm` 5e-4)."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps over which the learning rate rises linearly from zero."""
    batch_size: int = Field(default=1, ge=0)
    """Sequences per forward pass; 0: as many as fit into the free memory of a GPU, up to 32,768 tokens per step (on a CPU: 1)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` keeps AdamW's two moments in 8 bits (bitsandbytes): 2 bytes of memory for each trained weight, not 8."""
    dtype: Literal["auto", "stored", "float32", "bfloat16"] = "auto"
    """Dtype of forward and backward pass. `stored`: as in the converted folder (float16 runs as float32); `auto`: the same, but
    float32 on a processor without bfloat16 instructions. Updates accumulate in float32."""


class TunedDataSection(DataSection):
    """The text for training and evaluation."""

    sources: tuple[str, ...] = ()
    """Names, hub ids or local paths; empty: the conversion's text, if its folder still has it."""
    calibration_tokens: int = Field(default=8192, ge=1)
    """Tokens set aside; not used by fine-tuning."""


class FinetuneRecipe(RunRecipe):
    """Everything that determines how a converted model is fine-tuned."""

    model: str = ""
    """A converted folder."""
    dense: str = ""
    """Its dense model; empty: the one that its plan names."""
    weights: Literal["full", "lora"] = "full"
    """Train all weights of the decoder layers (`full`) or LoRA adapters (`lora`, needs peft). Embeddings and output matrix stay
    frozen."""
    routers: Literal["learned", "frozen"] = "learned"
    """Whether expert routers are trained; value routers stay frozen."""
    loss: TunedLossSection = TunedLossSection()
    lora: LoraSection = LoraSection()
    train: TunedTrainSection = TunedTrainSection()
    data: TunedDataSection = TunedDataSection()
