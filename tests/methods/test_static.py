"""The same neurons for every token: rankings against brute force, widths that meet the budget, and words that name no expert."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

import tomoe as api
from conftest import make_pico, tokens
from pico_files import CommandLine, proved, refused, succeed, write_pico, write_text
from pico_tokenizer import TOKENIZER
from tomoe.budget import BUDGET_TOLERANCE
from tomoe.methods.static import Static
from tomoe.model.structure import shape_of
from tomoe.plans import Plan
from tomoe.plans.partition.activations import Activations, visit_layers
from tomoe.plans.partition.elimination import (
    ROWS,
    backward_elimination,
    elimination_bytes,
    error_matrix,
    ranked_by_energy,
)
from tomoe.recipe.conversion import Recipe

IDS = tokens(8, 24)
RECIPE = {"train.dtype": "float32", "experts.width_multiple": 1}


def problem(tokens: int = 40, size: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Activations of correlated neurons, weights of tokens, and a down projection."""
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(tokens, 3, generator=generator) @ torch.randn(3, size, generator=generator)
    h += 0.3 * torch.randn(tokens, size, generator=generator)
    return h, torch.rand(tokens, generator=generator), torch.randn(5, size, generator=generator)


def test_the_error_of_a_set_is_that_of_the_output_without_it() -> None:
    h, weight, down = problem()
    error = error_matrix(h, weight, down.T @ down, len(h))
    for gone in itertools.product([0.0, 1.0], repeat=7):
        s = torch.tensor(gone)
        direct = (((h * s) @ down.T).square().sum(1) * weight).mean()
        torch.testing.assert_close(s @ error @ s, direct, atol=1e-4, rtol=1e-4)


def test_elimination_drops_what_adds_least_and_energy_what_weighs_least_alone() -> None:
    h, weight, down = problem()
    error = error_matrix(h, weight, down.T @ down, len(h)).double()

    def cost(gone: Tensor) -> float:
        return float(gone.double() @ error @ gone.double())

    eliminated, energetic = backward_elimination(error), ranked_by_energy(error)
    for ranks, loss in (eliminated, energetic):
        assert sorted(ranks.tolist()) == list(range(7))
        assert loss.tolist() == pytest.approx([cost(ranks >= kept) for kept in range(8)])
    ranks = eliminated[0]
    for kept in range(7):
        options = [i for i in range(7) if ranks[i] <= kept]
        costs = {i: cost((ranks > kept) | (torch.arange(7) == i)) for i in options}
        assert min(costs, key=costs.__getitem__) == int((ranks == kept).nonzero())
    alone = [cost(torch.arange(7) == i) for i in range(7)]
    assert energetic[0].tolist() == [sorted(alone, reverse=True).index(x) for x in alone]


def test_many_neurons_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    h, weight, down = problem()
    error = error_matrix(h, weight, down.T @ down, len(h))
    whole = ranked_by_energy(error)
    monkeypatch.setitem(ranked_by_energy.__globals__, "ROWS", 3)
    assert ROWS > 7
    for ours, theirs in zip(ranked_by_energy(error), whole, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("ranking", ["activation", "elimination"])
@pytest.mark.parametrize("recipe", [{}, {"target": "dense"}], ids=["own", "dense"])
def test_the_budget_is_met_and_the_best_ranked_neurons_are_kept(ranking: str, recipe: dict[str, str]) -> None:
    model = make_pico("qwen2", intermediate_size=512)
    found = Static(ranking=ranking)
    for active in (0.3, 0.55, 0.8):
        plan = api.plan(model, found, IDS, active=active, recipe=RECIPE | recipe)
        assert abs(plan.active_fraction() - active) <= BUDGET_TOLERANCE
        assert plan.is_static
        assert len({layer.width for layer in plan.counts}) == 1 or not recipe
    ranks = _ranks(model, found)
    for layer, rank in zip(plan.layers, ranks, strict=True):
        assert torch.equal(layer.expert_masks[0], rank < int(layer.expert_masks.sum()))


def _ranks(model: PreTrainedModel, found: Static) -> list[Tensor]:
    ranks: list[Tensor] = []

    def note(i: int, seen: Activations) -> Activations:
        ranks.append(found.ranked(seen)[0])
        return seen

    with torch.no_grad():
        visit_layers(model, IDS, torch.ones_like(IDS, dtype=torch.bool), note, lambda device: None)
    return ranks


def test_a_width_that_64_divides_is_taken_where_it_meets_the_budget() -> None:
    model = make_pico("qwen2", intermediate_size=512)
    exact = api.plan(model, "static", IDS, active=0.55, recipe=RECIPE | {"target": "dense"})
    shape = shape_of(model)
    coarse = Plan(shape, exact.layers).active_fraction()
    # the share of 320 neurons, five times 64
    share = coarse + (320 - exact.counts[0].width) * 2 * 3 * 32 / (2 * (3 * 32 * 512 + 2 * 32 * 48))
    assert api.plan(model, "static", IDS, active=share, recipe={"target": "dense"}).counts[0].width == 320


def test_elimination_sees_that_two_neurons_nearly_cancel_each_other() -> None:
    """Once the weaker of the pair is gone, the other is worse than none; by itself it weighs more than the third."""
    torch.manual_seed(0)
    pair, other, last = torch.linalg.qr(torch.randn(300, 3)).Q.T * 300**0.5
    h = torch.stack([pair, pair, 0.9 * other, 1.1 * last], 1)
    down = torch.tensor([[1.0, -0.8, 1.0, 1.0]])
    error = error_matrix(h, torch.ones(300), down.T @ down, 300)
    (first, eliminated), (second, energetic) = backward_elimination(error), ranked_by_energy(error)
    assert first.tolist() == [2, 3, 1, 0]
    assert second.tolist() == [1, 3, 2, 0]
    assert float(eliminated[2]) == pytest.approx(0.04, abs=1e-4)
    assert float(energetic[2]) == pytest.approx(0.64 + 0.81, abs=1e-4)


def test_peak_counts_the_matrix_of_a_layer() -> None:
    shape = shape_of(make_pico("qwen2"))
    recipe = Recipe(target="dense")
    peak = Static().peak(recipe, shape, torch.float32, 64)
    assert sum(peak.values()) >= elimination_bytes(shape, 1, torch.float32, recipe.data.calibration_tokens)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`moe`, a conversion with measurements and report, exported as the dense class."""
    place = tmp_path_factory.mktemp("static")
    dense, text = write_pico(place / "dense", vocab_size=len(TOKENIZER)), write_text(place / "text.txt")
    TOKENIZER.save_pretrained(dense)
    sets = [f"--set={key}={value}" for key, value in SIZES.items()]
    succeed("convert", dense, "--format", "dense", "--data", text, "-o", place / "moe", *sets)
    return place


SIZES = {
    "train.dtype": "float32", "data.seq_len": 16, "data.tokens": 1200, "data.calibration_tokens": 128,
    "data.evaluation_tokens": 128,
}  # fmt: skip


@pytest.mark.slow
def test_the_target_implies_the_method_and_the_export_is_the_dense_class(place: Path) -> None:
    plan = Plan.load(place / "moe")
    assert plan.notes["method"]["name"] == "static"
    assert plan.notes["repair"]["error_after"] < plan.notes["repair"]["error_before"]
    exported = place / "moe" / "export-dense"
    assert json.loads((exported / "export.json").read_text())["proof"]["same"] is True
    config = AutoConfig.from_pretrained(exported)
    assert config.model_type == "llama"
    assert config.intermediate_size == plan.counts[0].width < 512
    dense, moe = json.loads((place / "moe" / "evaluation.json").read_text())["rows"]
    assert moe["usage"] is None
    assert moe["facts"]["block_params"] == moe["facts"]["active_block_params"] < dense["facts"]["block_params"]


@pytest.mark.slow
def test_no_word_of_experts(place: Path, tomoe: CommandLine) -> None:
    """Where there is nothing to choose: in the report, on the cards, in tables and in errors."""
    moe = place / "moe"
    shown = tomoe("inspect", moe)
    assert "Neurons: " in shown.out
    for name, text in {
        "inspect": shown.out,
        "card": (moe / "README.md").read_text(),
        "card of the export": (moe / "export-dense" / "README.md").read_text(),
        "page": (moe / "report.html").read_text(),
    }.items():
        # the recipe, which cards repeat as a command, has the key of that name
        assert "expert" not in text.lower().replace("experts.", ""), name
        assert "Mixture" not in text, name
        assert "router" not in text, name
    refused(tomoe("route", moe, "the sea"), "no routers", "the same neurons")
    refused(tomoe("generate", moe, "the sea", "--active", "0.5"), "the same neurons for every token")
    refused(
        tomoe("export", moe, "--format", "glm4_moe", "-o", moe / "x"), "glm4_moe cannot represent", "these can: dense"
    )


@pytest.mark.slow
def test_what_does_not_go_with_it_is_refused(place: Path, tomoe: CommandLine) -> None:
    static = ["convert", place / "dense", "--method", "static", "--data", place / "text.txt", "-o", place / "no"]
    refused(tomoe(*static, "--steps", "3"), "method static needs train.steps = 0")
    refused(tomoe(*static, "--set", "experts.num_experts=4"), "needs experts.num_experts = 1")
    refused(tomoe(*static, "--set", "target=glm4_moe"), "target glm4_moe does not support what method static makes")
    refused(tomoe(*static, "--set", "method.ranking=size"), "ranking is 'size'")


@pytest.mark.slow
@pytest.mark.engine
def test_llama_cpp_reads_it_as_a_plain_llama(place: Path, tomoe: CommandLine) -> None:
    out = place / "gguf"
    made = tomoe("export", place / "moe", "--format", "gguf", "--weights", "f32", "-o", out)
    proved(made, out)
    reader = gguf.GGUFReader(next(out.glob("*.gguf")))
    assert "llama.expert_count" not in reader.fields
    assert {"blk.0.ffn_gate.weight", "blk.1.ffn_down.weight"} <= {tensor.name for tensor in reader.tensors}
    assert "expert" not in made.out + made.err
