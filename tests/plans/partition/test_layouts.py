"""How fine-grained experts divide a layer, in numbers, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tomoe.budget import decoder_params
from tomoe.errors import UserError
from tomoe.model.shape import ModelShape
from tomoe.plans.partition.layouts import FineLayout, OverlappingLayout, layout_of
from tomoe.recipe.conversion import Recipe

SMOLLM2 = ModelShape(30, 576, 1536, 9, 3, 64, 64, True)


LLAMA2_7B = ModelShape(32, 4096, 11008, 32, 32, 128, 128, True)


QWEN_05B = ModelShape(24, 896, 4864, 14, 2, 64, 64, True)
LLAMA3_8B = ModelShape(32, 4096, 14336, 32, 8, 128, 128)


QWEN_15B = ModelShape(28, 1536, 8960, 12, 2, 128, 128, True)


SIXTY_FOUR = {"num_experts": 64}


MORE_SHARED = {"shared": 0.4}


@pytest.mark.parametrize(
    ("target", "shape", "active", "experts", "expected"),
    [
        # half of the MLP, attention whole
        (
            "glm4_moe",
            LLAMA2_7B,
            0.6658,
            {"expert_size": 128, "dense_layers": 0} | MORE_SHARED,
            FineLayout(64, 128, 2816, 21),
        ),
        ("hf", SMOLLM2, 0.625, {"expert_size": 16} | SIXTY_FOUR, FineLayout(64, 16, 512, 15)),
        ("hf", SMOLLM2, 0.3, {"expert_size": 24} | SIXTY_FOUR, FineLayout(64, 24, 0, 3)),
        # the roundest sizes that a budget allows
        ("hf", SMOLLM2, 0.4, {"num_experts": 128}, FineLayout(128, 11, 128, 12)),
        ("hf", SMOLLM2, 0.5, SIXTY_FOUR, FineLayout(64, 20, 256, 12)),
        ("hf", LLAMA2_7B, 0.6, SIXTY_FOUR, FineLayout(64, 160, 768, 23)),
        ("hf", LLAMA2_7B, 0.7, {}, FineLayout(256, 32, 2816, 99)),
        # three quarters of a token's neurons are shared
        ("glm4_moe", SMOLLM2, 0.5, {}, FineLayout(50, 24, 336, 5)),
        # not 64 of 8, though they are rounder: a shared part of 1,024 would be two thirds of the layer
        ("glm4_moe", SMOLLM2, 0.8, {}, FineLayout(59, 14, 710, 27)),
        # 64 experts of 20 neurons would be stored as 64 of 24
        ("glm4_moe", SMOLLM2, 0.5, MORE_SHARED, FineLayout(56, 24, 192, 11)),
        # 64 experts meet no such budget
        ("glm4_moe", SMOLLM2, 0.65, {}, FineLayout(48, 23, 432, 15)),
        # 64 experts would be more than 30 for a token
        ("glm4_moe", SMOLLM2, 0.8, MORE_SHARED, FineLayout(48, 23, 432, 29)),
        ("glm4_moe", SMOLLM2, 0.5, {"expert_size": 20}, FineLayout(64, 20, 256, 10)),
        ("glm4_moe", SMOLLM2, 0.5, {"num_experts": 72} | MORE_SHARED, FineLayout(56, 24, 192, 11)),
        # K-quants
        (
            "glm4_moe",
            SMOLLM2,
            0.75,
            {"num_experts": 4, "width_multiple": 256, "dense_layers": 0},
            FineLayout(4, 256, 512, 2),
        ),
        # rows of a GGUF file are whole blocks if they can be; glm4_moe gets 64 of 39 neurons
        ("gguf", QWEN_05B, 0.6, {"num_experts": 64}, FineLayout(64, 48, 1792, 15)),
        # or 60 of 16 neurons
        ("gguf", SMOLLM2, 0.6, {"num_experts": 64}, FineLayout(33, 32, 480, 6)),
        # few wide ones if a recipe gives no number, as llama.cpp runs them faster
        ("gguf", QWEN_05B, 0.5, {}, FineLayout(16, 224, 1280, 3)),
        ("gguf", QWEN_05B, 0.7, {}, FineLayout(9, 288, 2272, 3)),
        ("gguf", LLAMA3_8B, 0.7, {}, FineLayout(16, 608, 4608, 7)),
        ("gguf", LLAMA3_8B, 0.5, {}, FineLayout(14, 768, 3584, 2)),
        # more where few cannot meet the budget in blocks
        ("gguf", LLAMA3_8B, 0.85, {}, FineLayout(48, 128, 8192, 26)),
        # what has no layout in blocks gets the one of other targets
        ("gguf", SMOLLM2, 0.62, {"num_experts": 64}, FineLayout(64, 16, 512, 12)),
        ("gguf", SMOLLM2, 0.5, {"num_experts": 64, "width_multiple": 8}, FineLayout(50, 24, 336, 5)),
        ("gguf", SMOLLM2, 0.5, {"expert_size": 20}, FineLayout(64, 20, 256, 10)),
    ],
)
def test_layouts_in_numbers(
    target: str, shape: ModelShape, active: float, experts: dict[str, float], expected: FineLayout
) -> None:
    layout = layout_of(Recipe(active=active, target=target, experts=experts), shape)
    stock = target != "hf"
    whole = experts.get("dense_layers", 1) if stock else 0
    assert layout == replace(expected, uniform=stock, dense_layers=whole)
    assert layout.shared + layout.num_experts * layout.expert_size == shape.mlp_size
    if stock:
        size = shape.mlp_size + 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim / 3
        mean = (whole * shape.mlp_size + (shape.num_layers - whole) * layout.width(layout.top_k)) / shape.num_layers
        assert abs(mean - _width(shape, active, layout.num_experts)) <= 0.003 * size


@pytest.mark.parametrize(
    ("shape", "active", "experts", "expected"),
    [
        (QWEN_05B, 0.5, {}, FineLayout(32, 128, 768, 10)),
        (QWEN_15B, 0.5, {}, FineLayout(32, 256, 768, 12)),
        (LLAMA2_7B, 0.7, {}, FineLayout(32, 256, 2816, 13)),
        # a shared part of 2,816 neurons would be wider than a token
        (LLAMA2_7B, 0.5, {}, FineLayout(32, 344, 0, 8)),
        (QWEN_15B, 0.5, {"num_experts": 16}, FineLayout(16, 448, 1792, 5)),
        (QWEN_15B, 0.5, {"num_experts": 24}, None),
        (QWEN_15B, 0.5, {"num_experts": 8}, None),
        (QWEN_15B, 0.5, {"num_experts": 64, "expert_size": 128}, None),  # 24 of them for a token
        (SMOLLM2, 0.5, {}, None),
    ],
)
def test_a_gpu_gets_few_wide_experts_or_a_refusal(
    shape: ModelShape, active: float, experts: dict[str, int], expected: FineLayout | None
) -> None:
    recipe = Recipe(active=active, target="gpu", experts=experts)
    if expected is None:
        with pytest.raises(
            UserError, match=r"no layout for a GPU divides the .* power of two of experts, at least 16, of"
        ):
            layout_of(recipe, shape)
        return
    layout = layout_of(recipe, shape)
    assert layout == replace(expected, allows_dense=False)
    assert layout.shared + layout.num_experts * layout.expert_size == shape.mlp_size


@pytest.mark.parametrize(
    ("shape", "changes", "number"),
    [
        (SMOLLM2, [], 64),
        (replace(SMOLLM2, mlp_size=2432), [], 128),
        (QWEN_05B, [], 256),
        (LLAMA2_7B, [], 256),
        (SMOLLM2, ["experts.num_experts=96"], 96),
        # of 20 neurons 128 experts would be more than there are
        (SMOLLM2, ["experts.expert_size=20"], 64),
        (SMOLLM2, ["target=glm4_moe", "experts.expert_size=20"], 64),
        (SMOLLM2, ["experts.form=overlapping"], 8),
    ],
)
def test_models_with_wide_layers_get_more_experts(shape: ModelShape, changes: list[str], number: int) -> None:
    layout = layout_of(Recipe(active=0.5).changed(changes), shape)
    assert layout.num_experts == number
    assert isinstance(layout, OverlappingLayout) or layout.shared + number * layout.expert_size == shape.mlp_size


@pytest.mark.parametrize(
    ("target", "active", "experts"),
    [("flex_olmo", 0.72, {}), ("gemma4", 0.8, {}), ("glm4_moe", 0.8, {"num_experts": 4, "expert_size": 192})],
)
def test_a_budget_without_a_layout_is_refused_with_one_that_has_one(
    target: str, active: float, experts: dict[str, int]
) -> None:
    recipe = Recipe(active=active, target=target, experts=experts)
    with pytest.raises(UserError, match=r"or active \(active = [0-9.]+ would do\)") as refusal:
        layout_of(recipe, SMOLLM2)
    found = str(refusal.value).rpartition("active = ")[2].partition(" ")[0]
    assert abs(float(found) - active) < 0.05
    layout_of(recipe.changed([f"active={found}"]), SMOLLM2)


@pytest.mark.parametrize(
    ("shape", "experts", "words"),
    [
        (
            LLAMA2_7B,
            {"expert_size": 128, "num_experts": 32},
            "cut to 0.760 of its decoder parameters and no further; set",
        ),
        (SMOLLM2, {"expert_size": 32, "num_experts": 64}, "64 fine-grained experts of 32 neurons cannot divide 1,536 "),
    ],
)
def test_what_cannot_be_divided_is_refused(shape: ModelShape, experts: dict[str, int], words: str) -> None:
    """Budgets below the narrowest layout, routers included, and more neurons than there are."""
    with pytest.raises(UserError, match=words):
        layout_of(Recipe(active=0.6658, experts=experts), shape)


def test_llama_cpp_takes_no_more_experts_of_a_token() -> None:
    recipe = Recipe(active=0.899, target="gguf", experts={"form": "fine", "expert_size": 16})
    with pytest.raises(UserError, match=r"49 experts of 16 neurons, and llama\.cpp takes at most 30; leave"):
        layout_of(recipe, SMOLLM2)
    assert layout_of(recipe.changed(["target=glm4_moe"]), SMOLLM2).expert_size == 16


def _width(shape: ModelShape, active: float, experts: int) -> float:
    """Neurons of a token at a budget beside whole attention and a router, of which each row is a third of a gated neuron."""
    attention = 2 * shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return (active * decoder_params(shape) / shape.num_layers - attention) / (3 * shape.hidden_size) - experts / 3
