"""What could be done with a model on one device: each kind of work, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tomoe.errors import UserError
from tomoe.memory.estimate import MemoryEstimate, Sizes, layout_of, least_memory
from tomoe.model.base_weights import BaseWeights
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.training.tuning_memory import Tuning


def works(sizes: Sizes, recipe: Recipe, least: Sequence[MemoryEstimate], num_experts: int) -> dict[str, int]:
    """Bytes that each kind of work takes, about; fine-tuning with one sequence a step."""
    found = {"conversion": max(need.total for need in least)}
    try:
        paper = Recipe.load("paper", [f"model={recipe.model}", f"active={recipe.active}", f"device={recipe.device}"])
        found["the paper's training"] = least_memory(sizes, paper, layout_of(paper, sizes.shape))[0].total
    except UserError:
        # its layout does not fit this model or budget
        pass
    if not num_experts:
        return found
    tuned, itemsize = FinetuneRecipe(), BaseWeights.of(recipe).compute.itemsize
    full = Tuning(sizes.shape, sizes.total - sizes.decoder_params, sizes.output, num_experts, itemsize)
    kinds = {
        f"LoRA of rank {tuned.lora.rank}": replace(full, rank=tuned.lora.rank),
        "full fine-tuning with train.optimizer=adamw8bit": replace(full, eight_bit=True),
        "full fine-tuning": full,
    }
    return found | {name: tuning.total(tuned.data.seq_len) for name, tuning in kinds.items()}
