"""Tells, before anything runs, whether a conversion fits the method and this machine, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tomoe.budget import Decoding, file_bytes, mlp_params, router_params
from tomoe.errors import UserError
from tomoe.memory.duration import durations
from tomoe.memory.estimate import (
    AvailableMemory,
    MemoryEstimate,
    ParamCounts,
    available_memory,
    least_memory,
    main_memory,
    sizes_of,
)
from tomoe.methods.registry import resolve_method
from tomoe.model.base_weights import BaseWeights
from tomoe.model.loading import check_loading, load_config, pick_device
from tomoe.plans.partition.layouts import FineLayout, Layout
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.training.tuning_memory import Tuning


@dataclass(frozen=True)
class Diagnosis:
    """What a conversion needs and what this machine has."""

    sizes: ParamCounts
    least: tuple[MemoryEstimate, ...]  # what each stage takes of the GPU's memory, or without one of main memory
    beside: MemoryEstimate | None  # what a conversion on a GPU takes of main memory; None without one
    available: AvailableMemory
    lacking: list[str]  # stages that need more than is available
    remedies: list[str]  # if training is one of them: recipe settings with any of which it may fit
    active: float  # the share of the decoder parameters that a token uses, routers included
    decoding: Decoding  # the weights that writing a token reads
    one_expert: float
    """The active share with one expert for a token; as planned if it uses one anyway, or chooses inputs."""
    file_bytes: dict[str, int]  # of the converted model, by format
    works: dict[str, int]  # what could be done with the model, and the bytes of GPU or main memory that it takes
    seconds: dict[str, float]  # of each stage of a conversion, by products that were timed


def examine(recipe: Recipe) -> Diagnosis:
    """Estimate what converting `recipe.model` needs, from its config.json alone. Raises UserError if the model or the budget is
    unsupported, or if the model would not load."""
    check_loading(recipe.model)
    method, recipe = resolve_method(recipe)
    sizes = sizes_of(load_config(recipe.model), recipe)
    layout = method.layout(recipe, sizes.shape)
    available = available_memory(pick_device(recipe.device))
    free = available.device_memory or available.memory
    least = least_memory(sizes, method, recipe)
    lacking = [need.stage for need in least if not need.fits(free)]
    num_experts = 0 if layout is None else layout.num_experts
    embedding = recipe.experts.embedding_size if recipe.attention.pruning == "per_token" else 0
    routers = sizes.shape.num_layers * router_params(sizes.shape, num_experts, embedding)
    active = recipe.active + (0 if recipe.counts_routers else routers / sizes.decoder_params)
    decoding = Decoding.of(sizes.shape, sizes.output, routers)
    # where all tokens use the same neurons, the others are not stored
    stored = round(sizes.total * sizes.of_all(recipe.active)) if num_experts == 1 else sizes.total
    files = file_bytes(stored + decoding.routers)
    return Diagnosis(
        sizes=sizes,
        least=least,
        beside=main_memory(sizes, recipe) if available.device_memory else None,
        available=available,
        lacking=lacking,
        remedies=_remedies(sizes, recipe, free) if "training" in lacking else [],
        active=active,
        decoding=decoding,
        one_expert=_one_expert(sizes, layout, active, routers),
        # no export holds the choice of inputs
        file_bytes={"bf16": files["bf16"]} if layout is None else files,
        works=_works(sizes, recipe, least, num_experts),
        seconds=durations(sizes, method, recipe),
    )


def _one_expert(sizes: ParamCounts, layout: Layout | None, active: float, routers: int) -> float:
    """Return the active share with one expert per token: with the shared part, or as planned if that uses one anyway."""
    if not isinstance(layout, FineLayout):
        return active
    cut = sizes.shape.mlp_size - layout.shared - layout.expert_size
    return 1 - (sizes.shape.num_layers * int(mlp_params(sizes.shape, cut)) - routers) / sizes.decoder_params


def _remedies(sizes: ParamCounts, recipe: Recipe, free: int) -> list[str]:
    settings = ["train.gradient_checkpointing=true"]
    if recipe.data.seq_len > 256:
        settings.append(f"data.seq_len={recipe.data.seq_len // 2}")
    if recipe.train.batch_size > 1:
        settings.append("train.batch_size=1")
    changed = {setting: resolve_method(recipe.changed([setting])) for setting in settings}
    return [setting for setting, other in changed.items() if least_memory(sizes, *other)[0].fits(free)]


def _works(sizes: ParamCounts, recipe: Recipe, least: Sequence[MemoryEstimate], num_experts: int) -> dict[str, int]:
    """Estimate the bytes of each kind of work; fine-tuning with one sequence per step."""
    found = {"conversion": max(need.total for need in least)}
    try:
        paper = Recipe.load("paper", [f"model={recipe.model}", f"active={recipe.active}", f"device={recipe.device}"])
        found["the paper's training"] = least_memory(sizes, *resolve_method(paper))[0].total
    except UserError:
        pass  # its layout does not fit this model or budget
    tuned = FinetuneRecipe()
    itemsize = BaseWeights.of(recipe).compute.itemsize
    full = Tuning(sizes.shape, sizes.total - sizes.decoder_params, sizes.output, num_experts, itemsize)
    kinds = {
        f"LoRA of rank {tuned.lora.rank}": replace(full, rank=tuned.lora.rank),
        "full fine-tuning with train.optimizer=adamw8bit": replace(full, eight_bit=True),
        "full fine-tuning": full,
    }
    return found | {name: tuning.total(tuned.data.seq_len) for name, tuning in kinds.items()}
