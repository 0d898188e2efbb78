"""The carve of fine-grained experts: its parts against brute force, its layouts, and a planted structure that it finds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from conftest import activations, make_pico, tokens
from tomoe.budget import BUDGET_TOLERANCE, active_params, decoder_params
from tomoe.errors import UserError
from tomoe.methods import carve
from tomoe.methods.carve import Carve, balanced_assignment, balanced_clusters
from tomoe.methods.tomoe.carving import carve_
from tomoe.methods.tomoe.extract import extract_plan
from tomoe.methods.tomoe.method import new_network
from tomoe.methods.tomoe.network import MaskNetwork
from tomoe.model.shape import ModelShape
from tomoe.model.structure import shape_of
from tomoe.plans.partition import experts as partition
from tomoe.plans.partition import routers
from tomoe.plans.partition.activations import Activations
from tomoe.plans.partition.experts import FineLayer, error_curve, fine_layer, room_of
from tomoe.plans.partition.layouts import FineLayout, OverlappingLayout, settle_layout
from tomoe.plans.partition.routers import ROUTER_RIDGE, RidgeRegression
from tomoe.recipe.conversion import ExpertsSection, Recipe

SMOLLM2 = ModelShape(30, 576, 1536, 9, 3, 64, 64, True)
LLAMA2_7B = ModelShape(32, 4096, 11008, 32, 32, 128, 128, True)
QWEN_05B = ModelShape(24, 896, 4864, 14, 2, 64, 64, True)
QWEN_15B = ModelShape(28, 1536, 8960, 12, 2, 128, 128, True)
TEXT = tokens(4, 24), torch.ones(4, 24, dtype=torch.bool)


def fine(**keys: object) -> ExpertsSection:
    return ExpertsSection(**({"form": "fine", "num_experts": 64} | keys))


@pytest.mark.parametrize("values", [2, 1000])
def test_balanced_assignment_is_the_greedy_one(values: int) -> None:
    """Row after row, by what it loses, each takes the best column that has room; of equal ones the first."""
    generator = torch.Generator().manual_seed(values)
    scores = torch.randint(values, (21, 7), generator=generator) + 3.0 * torch.arange(7)
    rows, free = scores.tolist(), [3] * 7
    losses = [max(row) - sorted(row)[-2] for row in rows]
    expected = [0] * 21
    for i in sorted(range(21), key=lambda i: -losses[i]):
        expected[i] = max((c for c in range(7) if free[c]), key=lambda c: (rows[i][c], -c))
        free[expected[i]] -= 1
    assert balanced_assignment(scores, 3).tolist() == expected
    assert balanced_assignment(scores[:, :1], 21).tolist() == [0] * 21


def test_balanced_clusters_have_one_size_and_keep_together_what_points_one_way() -> None:
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(6, 40, generator=generator)
    member = torch.arange(48) % 6
    x = directions[member] + 0.1 * torch.randn(48, 40, generator=generator)
    assigned = balanced_clusters(x * (1 + 9 * torch.rand(48, 1, generator=generator)), 6, seed=1)
    assert assigned.bincount(minlength=6).tolist() == [8] * 6
    pure = [len(member[assigned == n].unique()) == 1 for n in range(6)]
    assert sum(pure) >= 4, "clusters mix directions"


def test_dims_of_massive_activations_spoil_no_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Gram matrix whose largest entries are a billion times the others, as some models' inputs make it."""
    monkeypatch.setattr(routers, "ROUTER_RIDGE", 1e-9)  # wide models get as far with the usual one
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 24, generator=generator)
    x[:, 3] *= 3e4
    y = torch.rand(400, 6, generator=generator)
    weight, _ = RidgeRegression(x).fit(y)
    wide, gap = x.double() - x.double().mean(0), y.double() - y.double().mean(0)
    gram = wide.T @ wide
    gram.diagonal().add_(1e-9 * gram.diagonal().mean())
    exact = torch.linalg.solve(gram, wide.T @ gap).T
    scale = (weight.double() * exact).sum() / exact.square().sum()
    assert (weight - scale * exact).norm() <= 1e-2 * weight.norm()


def test_ridge_regression_is_least_squares_with_a_ridge() -> None:
    """Against the least squares of the problem with a row for each ridge; the scale makes logits vary by 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator) + torch.tensor([9.0, 0, 0, 0, 0, -3.0])
    y = torch.rand(200, 4, generator=generator) + (x[:, :4] > 0).float()
    weight, bias = RidgeRegression(x).fit(y)
    centered = x - x.mean(0)
    ridge = ROUTER_RIDGE * (centered.T @ centered).diagonal().mean()
    rows = torch.cat([centered, ridge.sqrt() * torch.eye(6)])
    solution = torch.linalg.lstsq(rows, torch.cat([y - y.mean(0), torch.zeros(6, 4)])).solution.T
    scale = 1 / (centered @ solution.T).std()
    # weights are rounded to bfloat16, and the bias belongs to the rounded ones
    torch.testing.assert_close(weight, scale * solution, rtol=2**-8, atol=1e-5)
    assert torch.equal(weight, weight.bfloat16().float())
    logits = x @ weight.T + bias
    torch.testing.assert_close(logits.mean(0), scale * y.mean(0), rtol=1e-4, atol=1e-4)
    assert float((logits - logits.mean(0)).std()) == pytest.approx(1, rel=1e-2)


def direct_losses(
    logits: Float[Tensor, "t N"], h: Float[Tensor, "t F"], down: Float[Tensor, "D F"], expert: Int[Tensor, " F"]
) -> list[float]:
    """The squared error with 0, 1, .. N experts, token by token."""
    losses = []
    for k in range(logits.shape[1] + 1):
        total = 0.0
        for t in range(len(h)):
            chosen = set(logits[t].topk(k).indices.tolist()) | {-1}
            gone = torch.tensor([int(e) not in chosen for e in expert])
            total += float((down[:, gone] @ h[t, gone]).square().sum())
        losses.append(total)
    return losses


def lower_hull(values: list[float]) -> list[float]:
    """By brute force: the smallest value that a chord between two points has."""
    points = range(len(values))
    return [
        min(
            values[x] if a == b else values[a] + (values[b] - values[a]) * (x - a) / (b - a)
            for a in points
            for b in points
            if a <= x <= b and (a < b or a == x)
        )
        for x in points
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_error_curve_is_the_convex_hull_of_what_is_computed_directly(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, h = (torch.randn(20, n, generator=generator) for n in (8, 19))
    down = torch.randn(5, 19, generator=generator)
    expert = torch.tensor([-1] * 3 + [n // 2 for n in range(16)])[torch.randperm(19, generator=generator)]
    expected = direct_losses(logits, h, down, expert)
    # a neuron can cancel another, so errors need not be convex, nor even fall
    routed = expert >= 0
    curve = error_curve(logits, h[:, routed], down[:, routed], expert[routed]).tolist()
    assert curve == pytest.approx(lower_hull(expected), rel=1e-4, abs=1e-4)
    assert all(b - a <= c - b + 1e-6 for a, b, c in zip(curve, curve[1:], curve[2:], strict=False))


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
        ("hf", SMOLLM2, 0.625, {"expert_size": 16} | SIXTY_FOUR, FineLayout(64, 16, 512, 16)),
        ("hf", SMOLLM2, 0.3, {"expert_size": 24} | SIXTY_FOUR, FineLayout(64, 24, 0, 4)),
        # the roundest sizes that a budget allows
        ("hf", SMOLLM2, 0.4, {}, FineLayout(128, 11, 128, 16)),
        ("hf", SMOLLM2, 0.5, SIXTY_FOUR, FineLayout(64, 20, 256, 13)),
        ("hf", LLAMA2_7B, 0.6, SIXTY_FOUR, FineLayout(64, 160, 768, 23)),
        ("hf", LLAMA2_7B, 0.7, {}, FineLayout(256, 32, 2816, 102)),
        # three quarters of a token's neurons are shared
        ("glm4_moe", SMOLLM2, 0.5, {}, FineLayout(49, 24, 360, 5)),
        # not 64 of 8, though they are rounder: a shared part of 1,024 would be two thirds of the layer
        ("glm4_moe", SMOLLM2, 0.8, {}, FineLayout(48, 15, 816, 20)),
        # 64 experts of 20 neurons would be stored as 64 of 24
        ("glm4_moe", SMOLLM2, 0.5, MORE_SHARED, FineLayout(56, 24, 192, 12)),
        # 64 experts meet no such budget
        ("glm4_moe", SMOLLM2, 0.7, {}, FineLayout(48, 22, 480, 19)),
        # 64 experts would be 36 for a token
        ("glm4_moe", SMOLLM2, 0.8, MORE_SHARED, FineLayout(58, 15, 666, 30)),
        ("glm4_moe", SMOLLM2, 0.5, {"expert_size": 20}, FineLayout(64, 20, 256, 11)),
        ("glm4_moe", SMOLLM2, 0.5, {"num_experts": 72} | MORE_SHARED, FineLayout(56, 24, 192, 12)),
        # K-quants
        (
            "glm4_moe",
            SMOLLM2,
            0.75,
            {"num_experts": 4, "width_multiple": 256, "dense_layers": 0},
            FineLayout(4, 256, 512, 2),
        ),
        # rows of a GGUF file are whole blocks if they can be; glm4_moe gets 48 of 78 neurons
        ("gguf", QWEN_05B, 0.5, {}, FineLayout(53, 64, 1472, 8)),
        # 64 of 48 neurons
        ("gguf", QWEN_05B, 0.6, {}, FineLayout(48, 64, 1792, 12)),
        ("gguf", SMOLLM2, 0.5, {}, FineLayout(37, 32, 352, 4)),
        # what has no layout in blocks gets the one of other targets
        ("gguf", SMOLLM2, 0.6, {}, FineLayout(64, 16, 512, 11)),
        ("gguf", SMOLLM2, 0.5, {"width_multiple": 8}, FineLayout(49, 24, 360, 5)),
        ("gguf", SMOLLM2, 0.5, {"expert_size": 20}, FineLayout(64, 20, 256, 11)),
    ],
)
def test_layouts_in_numbers(
    target: str, shape: ModelShape, active: float, experts: dict[str, float], expected: FineLayout
) -> None:
    layout = settle_layout(Recipe(active=active, target=target, experts=experts), shape)
    stock = target != "hf"
    whole = experts.get("dense_layers", 1) if stock else 0
    assert layout == replace(expected, uniform=stock, dense_layers=whole)
    assert layout.shared + layout.num_experts * layout.expert_size == shape.mlp_size
    if stock:
        size = shape.mlp_size + 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim / 3
        mean = (whole * shape.mlp_size + (shape.num_layers - whole) * layout.width(layout.top_k)) / shape.num_layers
        assert abs(mean - _width(shape, active)) <= 0.003 * size


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
            settle_layout(recipe, shape)
        return
    layout = settle_layout(recipe, shape)
    assert layout == replace(expected, leaves_whole=False)
    assert layout.shared + layout.num_experts * layout.expert_size == shape.mlp_size


@pytest.mark.parametrize(
    ("shape", "changes", "number"),
    [
        (SMOLLM2, [], 256),
        (replace(SMOLLM2, mlp_size=1408), [], 128),
        (LLAMA2_7B, [], 256),
        (SMOLLM2, ["experts.num_experts=96"], 96),
        # of 20 neurons 128 experts would be more than there are
        (SMOLLM2, ["experts.expert_size=20"], 64),
        (SMOLLM2, ["target=glm4_moe", "experts.expert_size=20"], 64),
        (SMOLLM2, ["experts.form=overlapping"], 8),
    ],
)
def test_models_with_wide_layers_get_more_experts(shape: ModelShape, changes: list[str], number: int) -> None:
    layout = settle_layout(Recipe(active=0.5).changed(changes), shape)
    assert layout.num_experts == number
    assert isinstance(layout, OverlappingLayout) or layout.shared + number * layout.expert_size == shape.mlp_size


@pytest.mark.parametrize(
    ("target", "active", "experts"),
    [("flex_olmo", 0.7, {}), ("gemma4", 0.8, {}), ("glm4_moe", 0.8, {"num_experts": 4, "expert_size": 192})],
)
def test_a_budget_without_a_layout_is_refused_with_one_that_has_one(
    target: str, active: float, experts: dict[str, int]
) -> None:
    recipe = Recipe(active=active, target=target, experts=experts)
    with pytest.raises(UserError, match=r"or active \(active = [0-9.]+ would do\)") as refusal:
        settle_layout(recipe, SMOLLM2)
    found = str(refusal.value).rpartition("active = ")[2].partition(" ")[0]
    assert abs(float(found) - active) < 0.05
    settle_layout(recipe.changed([f"active={found}"]), SMOLLM2)


@pytest.mark.parametrize(
    ("shape", "experts", "words"),
    [
        (LLAMA2_7B, {"expert_size": 128, "num_experts": 32}, "can be cut to"),
        (SMOLLM2, {"expert_size": 32, "num_experts": 64}, "64 fine-grained experts of 32 neurons cannot divide 1,536 "),
    ],
)
def test_what_cannot_be_divided_is_refused(shape: ModelShape, experts: dict[str, int], words: str) -> None:
    """Budgets below the narrowest layout, and more neurons than there are."""
    with pytest.raises(UserError, match=words):
        settle_layout(Recipe(active=0.6658, experts=experts), shape)


def test_llama_cpp_takes_no_more_experts_of_a_token() -> None:
    recipe = Recipe(active=0.9, target="gguf", experts={"form": "fine", "expert_size": 16})
    with pytest.raises(UserError, match=r"51 experts of 16 neurons, and llama\.cpp takes at most 30; leave"):
        settle_layout(recipe, SMOLLM2)
    assert settle_layout(recipe.changed(["target=glm4_moe"]), SMOLLM2).expert_size == 16


def _width(shape: ModelShape, active: float) -> float:
    """Neurons of a token at a budget, attention whole."""
    attention = 2 * shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return (active * decoder_params(shape) / shape.num_layers - attention) / (3 * shape.hidden_size)


def carved(model: PreTrainedModel, recipe: Recipe) -> MaskNetwork:
    """A mask network with the carved start of a recipe. Raises UserError, before the carve, if no layout meets the budget."""
    net = new_network(recipe, model)
    carve_(net, model, *TEXT, recipe.active, recipe.seed)
    return net


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["off", "per_token"])
def test_what_is_known_of_a_budget_is_what_the_carve_finds(attention: str) -> None:
    """The sizes alone tell which budgets can be met, and a carve that begins ends in a plan that meets it."""
    model = make_pico("llama", intermediate_size=512)
    experts = dict(form="fine", num_experts=32, width_multiple=8)
    met = set()
    for active in (0.05, 0.3, 0.6, 1.0):
        recipe = Recipe(active=active, experts=experts, attention=dict(pruning=attention))
        try:
            net = carved(model, recipe)
        except UserError:
            continue
        # attention of a pico model has few dims, which cannot take up every rest
        tolerance = BUDGET_TOLERANCE if attention == "off" else 0.01
        plan = extract_plan(net, model, active, TEXT, tolerance)
        assert plan.active_fraction() == pytest.approx(active, abs=tolerance)
        assert all(1 <= layer.top_k <= 32 for layer in plan.layers)
        met.add(active)
    assert met >= {0.6, 1.0}
    assert 0.05 not in met


@pytest.mark.parametrize("dense_layers", [0, 1, 9])
def test_one_number_of_experts_for_all_layers_but_the_first(dense_layers: int) -> None:
    """As stock targets need it; the first layers may stay whole, but not the last one."""
    model = make_pico("llama", intermediate_size=512, num_hidden_layers=3)
    shape = shape_of(model)
    whole = min(dense_layers, 2)
    widths = [(512, 8, 8)] * whole + [(128 + 10 * 12, 8, 8)] * (3 - whole)
    active = active_params(shape, widths) / decoder_params(shape)
    experts = fine(num_experts=32, expert_size=12, dense_layers=dense_layers)
    net = carved(model, Recipe(active=active, experts=experts, target="glm4_moe"))
    plan = extract_plan(net, model, active, TEXT)
    assert {(layer.expert_size, layer.shared_size) for layer in plan.counts} == {(12, 128)}
    assert [layer.top_k for layer in plan.layers] == [32] * whole + [10] * (3 - whole)


def test_layers_get_equally_many_experts_unless_their_error_leaves_them_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_pico("llama", intermediate_size=512, num_hidden_layers=4)
    recipe, wanted = Recipe(active=0.6, experts=fine(num_experts=32, expert_size=12)), list[int]()
    given = partition.evened
    monkeypatch.setattr(partition, "evened", lambda units, most: wanted.extend(units) or given(units, most))
    used = carved(model, recipe).experts_per_token.tolist()
    others = [(own, even) for own, even in zip(wanted, used, strict=True) if own < 32]
    assert sum(wanted) == sum(used)
    assert len({own for own, _ in others}) > 2
    assert max(even for _, even in others) - min(even for _, even in others) <= 1


def test_a_layout_for_a_gpu_leaves_no_layer_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole layer would use more experts than fused routing takes, and leave the others few."""
    model = make_pico("llama", intermediate_size=2304, num_hidden_layers=4)
    monkeypatch.setattr(partition, "allocate", lambda losses, params, budget: [16, 5, 2, 2])
    shape = shape_of(model)
    widths = [(256 + 128 * top_k, shape.head_dim, shape.head_dim) for top_k in (7, 6, 6, 6)]
    active = active_params(shape, widths) / decoder_params(shape)
    net = carved(model, Recipe(active=active, target="gpu"))
    assert net.layout.num_experts == 16
    assert net.experts_per_token.tolist() == [7, 6, 6, 6]
    plan = extract_plan(net, model, active, TEXT)
    assert [layer.top_k for layer in plan.layers] == [7, 6, 6, 6]


BLOCKS, SIZE, ALWAYS_ON = 6, 4, 5


def carved_layer(seen: Activations, layout: FineLayout, seed: int) -> FineLayer:
    return fine_layer(Carve().experts, seen, replace(room_of(layout, 0, 1, 0), seed=seed))


def planted(
    seed: int, blocks: int = BLOCKS, noise: float = 0.05
) -> tuple[FineLayer, Float[Tensor, "T D"], Int[Tensor, " T"], Int[Tensor, " F"]]:
    """Tokens of several directions; for each a block of neurons fires, and five neurons fire for all of them."""
    generator = torch.Generator().manual_seed(seed)
    count, hidden = 600, 16
    kind = torch.arange(count) % blocks
    x = 3 * torch.eye(hidden)[kind] + 0.3 * torch.randn(count, hidden, generator=generator)
    block = torch.cat([torch.arange(blocks).repeat_interleave(SIZE), torch.full((ALWAYS_ON,), -1)])
    block = block[torch.randperm(len(block), generator=generator)]
    fires = (block == kind[:, None]) | (block == -1)
    h = noise * torch.randn(count, len(block), generator=generator) + fires * (
        1 + 0.2 * torch.randn(count, len(block), generator=generator)
    )
    down = torch.randn(hidden, len(block), generator=generator)
    down = down / down.norm(dim=0)
    start = carved_layer(activations(x, h, torch.ones(count), down), FineLayout(blocks, SIZE, ALWAYS_ON, 1), seed)
    return start, x, kind, block


@pytest.mark.parametrize("seed", range(4))
def test_a_planted_structure_is_found(seed: int) -> None:
    start, x, kind, block = planted(seed)
    found = start.expert_of_neuron
    assert torch.equal(found == -1, block == -1), "the shared part is what fires for all tokens"
    name = {b: found[block == b].unique().tolist() for b in range(BLOCKS)}
    assert all(len(experts) == 1 for experts in name.values()), "an expert is a block"
    assert sorted(itertools.chain(*name.values())) == list(range(BLOCKS))
    chosen = (x @ start.router_weight.T + start.router_bias).argmax(1)
    assert torch.equal(chosen, torch.tensor([name[int(k)][0] for k in kind])), "a token goes where its neurons fire"
    # with its block a token has nearly all of the output: 0.009 to 0.016 over 24 seeds
    assert float(start.loss[1]) < 0.02 * float(start.loss[0])


def test_activations_stay_as_they_are_and_may_be_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    x, h, down = (torch.randn(*shape, generator=generator) for shape in ((400, 16), (400, 40), (16, 40)))
    weight, layout = torch.rand(400, generator=generator), FineLayout(8, 4, 8, 2)
    stored = h.bfloat16()
    start = carved_layer(activations(x, stored, weight, down), layout, 0)
    same = carved_layer(activations(x, h.bfloat16().float(), weight, down), layout, 0)
    assert torch.equal(stored, h.bfloat16())
    for name, tensor in vars(start).items():
        assert torch.equal(tensor, getattr(same, name)), name


def test_moving_neurons_to_the_tokens_that_need_them_lowers_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the clusters mix blocks, because there are too many of them to be found at once: for about half of the seeds."""

    def mixes(start: FineLayer, block: Tensor) -> bool:
        return any(len(start.expert_of_neuron[block == b].unique()) > 1 for b in range(12))

    with monkeypatch.context() as patch:
        patch.setattr(carve, "REASSIGNMENTS", 0)
        left = {seed: planted(seed, blocks=12) for seed in range(8)}
    mixed = {seed: float(start.loss[1]) for seed, (start, *_, block) in left.items() if mixes(start, block)}
    assert len(mixed) >= 2
    # 0.15 to 0.65 over the eleven of 24 seeds that mix
    assert all(float(planted(seed, blocks=12)[0].loss[1]) < 0.8 * loss for seed, loss in mixed.items())
