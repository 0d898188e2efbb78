"""What each target format requires of a conversion's experts: the limits of engines, in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Form = Literal["fine", "overlapping", "inputs"]
"""Two forms of experts, and inputs of projections; `recipe.conversion.ExpertsSection` says what they are."""

Format = Literal[
    "dense",
    "mixtral",
    "glm4_moe",
    "qwen3_5_moe",
    "lfm2_moe",
    "granitemoeshared",
    "granitemoehybrid",
    "gemma4",
    "cohere2_moe",
    "flex_olmo",
    "gguf",
    "hf",
]
"""What `--format` can write, and `target` can aim at: the dense model's own class, stock classes of transformers with experts, a
file for llama.cpp, ToMoE's own form."""

Precision = Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q4_k", "q4_k_m"]  # weights of a GGUF file

STOCK_MULTIPLE = 64
"""Neurons that the width of overlapping experts in a stock format is a multiple of: grouped kernels and quantized groups of 32
divide it."""
FINE_MULTIPLE = 8
"""Neurons to a multiple of which fine-grained experts in a stock format are filled up with zeros: in 16 bits rows of 16 bytes,
without which the grouped matrix product that transformers runs experts with refuses to."""
MAX_EXPERTS_PER_TOKEN = 30
"""Fine-grained experts of a token in a stock format. llama.cpp (2026.10) makes nodes of its graph for each, has room for 8 nodes
a tensor, and ends the process when they are used up: a plain llama has room for 30. vLLM's fused routing is for 32."""
GGUF_BLOCK = 32
"""Numbers of a row that Q8_0 and Q4_0 hold together. Rows that it does not divide stay in 16 bits: a larger, slower file."""
GGUF_TOLERANCE = 0.003
"""Experts this wide meet few budgets exactly: half of this block is up to 0.3% of a layer of 4,864 neurons."""
GGUF_EXPERTS = (16, 24, 32, 48, 64)
"""Numbers of experts that a layer has in llama.cpp, the first that meets the budget: its products by expert cost more per
operation than plain ones, so few wide experts are faster (docs/lab/performance.md); more meet budgets that few cannot."""
GPU_WIDTH = 128  # neurons of an expert that keep a GPU's grouped matrix product busy
GPU_EXPERTS_PER_TOKEN = 16
"""Experts of a token that fused routing on GPUs takes (SGLang's; vLLM's and TensorRT-LLM's take 32); they want a power of two."""
STOCK_SHARED = 0.75
"""The shared part of fine-grained experts in a stock format, as a share of a token's neurons: a little worse than 0.4 and much
faster in engines (docs/lab/log.md)."""


@dataclass(frozen=True)
class TargetRules:
    """What one format requires of a model's experts."""

    forms: tuple[Form, ...] = ("fine", "overlapping")  # forms that it supports
    uniform: bool = True  # whether all layers must be alike: experts of one width, and as many of them for each token
    num_experts: int = 0  # experts of a layer; 0: any number
    whole_attention: bool = False  # whether it supports dense attention only
    shared: float | None = None
    """The share of the shared part unless the recipe gives one; None: the recipe's own default."""
    numbers: tuple[int, ...] = ()
    """Numbers of experts to try unless the recipe gives one; empty: the usual ones."""
    bounded: bool = False
    """Whether it refuses more than MAX_EXPERTS_PER_TOKEN, too, where the recipe gives the size of an expert."""
    router_bias: bool = True  # whether its routers of fine-grained experts have biases
    dense_layers: bool = True  # whether the first layers may be dense
    holds_shared: bool = True  # whether tokens may share neurons
    shared_in_experts: bool = False  # whether it holds these neurons in experts, which count among those of a token
    block: int = 1  # neurons that should divide the width of a fine-grained expert
    tolerance: float = 0.0
    """Largest distance between the active fraction of a plan and the requested one, if it is more than BUDGET_TOLERANCE."""
    gpu: bool = False
    """Whether a GPU runs it: a power of two of experts, of at least GPU_WIDTH neurons; at most GPU_EXPERTS_PER_TOKEN experts per
    token in every layer; a shared part that is a multiple of one expert."""


_STOCK = TargetRules(forms=("fine",), shared=STOCK_SHARED)
_UNBIASED = replace(_STOCK, router_bias=False, dense_layers=False)
_UNSHARED = replace(_UNBIASED, shared=0.0, holds_shared=False)

TARGET_RULES = {
    "dense": TargetRules(forms=("overlapping",), num_experts=1, whole_attention=True),
    "mixtral": TargetRules(forms=("overlapping",)),
    "glm4_moe": _STOCK,
    "qwen3_5_moe": _UNBIASED,
    "lfm2_moe": replace(_STOCK, shared_in_experts=True),
    "granitemoeshared": _UNBIASED,
    "granitemoehybrid": _UNBIASED,
    "gemma4": _UNSHARED,
    "cohere2_moe": _UNBIASED,
    "flex_olmo": _UNSHARED,
    "gguf": TargetRules(
        shared=STOCK_SHARED, numbers=GGUF_EXPERTS, bounded=True, block=GGUF_BLOCK, tolerance=GGUF_TOLERANCE
    ),
    "hf": TargetRules(forms=("fine", "overlapping", "inputs"), uniform=False),
    "gpu": replace(_STOCK, shared=None, uniform=False, gpu=True),
}
