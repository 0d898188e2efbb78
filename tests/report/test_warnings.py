"""Warnings: each with a case that brings it up and one that does not; overlap against a plain search."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_report import some_plan

from conftest import make_pico, make_plan
from pico_files import CommandLine
from tomoe.budget import BUDGET_TOLERANCE
from tomoe.data.corpus import Sequences
from tomoe.evaluation.compare import shared_share
from tomoe.evaluation.param_counts import model_facts
from tomoe.evaluation.results import ExpertUsage, Measurement, Row, to_json
from tomoe.plans import ALWAYS, Plan
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.target_rules import GGUF_TOLERANCE
from tomoe.report.warnings import OVERLAP, find_warnings, find_worsening

DENSE = make_pico("llama")


def sound_plan() -> Plan:
    """Nothing to complain of: every neuron is in an expert, and the budget is what it is."""
    plan = some_plan(DENSE, per_token=False)
    layers = []
    for layer in plan.layers:
        neurons = layer.expert_masks.clone()
        neurons[1] = ~neurons[0]
        layers.append(replace(layer, expert_masks=neurons))
    plan = replace(plan, layers=tuple(layers))
    return asked(plan, plan.active_fraction())


def asked(plan: Plan, active: float, **recipe: object) -> Plan:
    return replace(plan, recipe=Recipe(model="a/b", active=active, **recipe).model_dump(mode="json"))


def changed(plan: Plan, layer: int, **parts: object) -> Plan:
    """One layer changed, with the budget that comes out of it."""
    layers = list(plan.layers)
    layers[layer] = replace(layers[layer], **parts)
    made = replace(plan, layers=tuple(layers))
    return asked(made, made.active_fraction())


def row(context: int = 16, usage: ExpertUsage | None = None, overlap: float | None = None, sequences: int = 10) -> Row:
    measured = Measurement(2.0, 0.1, 0.7, 100, sequences, context)
    return Row(measured, model_facts(DENSE), usage, overlap)


def kinds(plan: Plan | None = None, *rows: Row) -> list[str]:
    return [warning.kind for warning in find_warnings(plan, rows)]


def test_nothing_is_said_where_nothing_is_wrong() -> None:
    fair = ExpertUsage([[0.3, 0.3, 0.4], [0.5, 0.25, 0.25]], 4096)
    assert find_warnings(sound_plan(), [row(), row(64, fair, OVERLAP * 0.9)]) == []
    assert find_warnings(replace(sound_plan(), recipe={})) == []
    assert find_warnings() == []


@pytest.mark.parametrize(("target", "tolerance"), [("hf", BUDGET_TOLERANCE), ("gguf", GGUF_TOLERANCE)])
def test_a_missed_budget(target: str, tolerance: float) -> None:
    """For GGUF its wide experts meet no budget more exactly."""
    plan = sound_plan()
    active = plan.active_fraction()
    for sign in (1, -1):
        assert kinds(asked(plan, active + sign * 0.9 * tolerance, target=target)) == []
        wanted = active + sign * 1.1 * tolerance
        (found,) = find_warnings(asked(plan, wanted, target=target))
        assert found.kind == "budget missed"
        assert found.text.startswith(f"{active:.1%} of")
        assert f"asks for {wanted:.1%}" in found.text


def test_attention_that_is_nearly_empty() -> None:
    plan = sound_plan()  # heads of 8 dims: one of eight is nearly nothing, two are not
    one, two = (changed(plan, 1, value_kept=torch.arange(8) < dims, value_top_k=dims) for dims in (1, 2))
    (found,) = find_warnings(one)
    assert found.kind == "narrow attention"
    assert found.text.startswith("layer 1: almost nothing is left of V/O (layer 1: 1 of 8 dims)")
    assert kinds(two) == []
    one_pair = torch.arange(4) < 1  # 2 of 8 dims: the least that Q and K can have here
    assert kinds(changed(plan, 0, qk_kept=one_pair)) == []
    wide = make_pico("llama", hidden_size=64)  # heads of 16
    narrow = changed(asked(some_plan(wide, per_token=False), 1.0), 0, qk_kept=torch.arange(8) < 1)
    (text,) = (warning.text for warning in find_warnings(narrow) if warning.kind == "narrow attention")
    assert "left of Q/K (layer 0: 2 of 16 dims)" in text
    # attention that no recipe can prune has no dims, and is whole
    shape, none = replace(plan.shape, num_heads=0, num_kv_heads=0, head_dim=0, rotary_size=0), torch.ones(0).bool()
    layers = [replace(layer, qk_kept=none, value_kept=none, value_top_k=0) for layer in plan.layers]
    assert "narrow attention" not in kinds(replace(plan, shape=shape, layers=layers))


def test_neurons_that_no_expert_uses() -> None:
    for used, told in ((35, True), (36, False)):  # of 48: 73 % and 75 %
        expert = torch.arange(48) < used - 12
        neurons = torch.stack([expert, expert.roll(12), expert])
        plan = changed(sound_plan(), 0, expert_masks=neurons)
        assert kinds(plan) == ["unused neurons"] * told
        if told:
            assert "layer 0: only 73% are in use" in find_warnings(plan)[0].text
            # all layers of one kind share a sentence
            (found,) = find_warnings(changed(plan, 1, expert_masks=neurons))
            assert found.text.startswith("layers 0, 1: many neurons are in none of the experts")


def test_dead_and_overloaded_experts_are_named() -> None:
    usage = ExpertUsage([[0.4, 0.6, 0.0], [0.0, 0.5, 0.5], [0.001, 0.499, 0.5], [0.0, 0.0, 1.0]], 4096)
    found = find_warnings(rows=[row(), row(usage=usage)])
    assert [(warning.kind, warning.text) for warning in found] == [
        ("dead experts", "layer 0: expert 2 got none of the 4,096 tokens"),
        ("overloaded expert", "layer 0: expert 1 got 60% of the 4,096 tokens"),
        ("dead experts", "layer 1: expert 0 got none of the 4,096 tokens"),
        ("dead experts", "layer 3: experts 0, 1 got none of the 4,096 tokens"),
        ("overloaded expert", "layer 3: expert 2 got 100% of the 4,096 tokens"),
    ]
    assert kinds(None, row(usage=ExpertUsage([[1.0], [0.4, 0.6]], 4096))) == []
    # few tokens say nothing
    shares = [[0.4, 0.6, 0.0]]
    assert kinds(None, row(usage=ExpertUsage(shares, 1499))) == []
    assert kinds(None, row(usage=ExpertUsage(shares, 1500))) == ["dead experts", "overloaded expert"]


def test_fine_grained_experts_that_are_never_or_always_chosen() -> None:
    """A token chooses several: dead is who none chooses, and a router that always chooses the same has collapsed."""
    fair, dead = [0.25, 0.3, 0.25, 0.2], [0.4, 0.5, 0.1, 0.0]
    assert find_warnings(rows=[row(usage=ExpertUsage([fair, [0.25] * 4], 4096, [2, 4]))]) == []
    (found,) = find_warnings(rows=[row(usage=ExpertUsage([fair, dead], 4096, [2, 2]))])
    assert (found.kind, found.text) == ("dead experts", "layer 1: 1 of 4 experts (3) got none of the 4,096 tokens")
    # 2,000 tokens choose 500 experts each, on average
    assert kinds(None, row(usage=ExpertUsage([dead], 1000, [2]))) == ["dead experts"]
    assert kinds(None, row(usage=ExpertUsage([dead], 999, [2]))) == []
    same = [0.5, 0.48, 0.01, 0.01]
    (found,) = find_warnings(rows=[row(usage=ExpertUsage([same], 4096, [2]))])
    assert (found.kind, "98% of the choices fall on the same 2 of 4" in found.text) == ("collapsed routing", True)
    # a token chooses 19 of 20: 95 % of the choices of even use, and nearly all of them if one is always left out
    assert find_warnings(rows=[row(usage=ExpertUsage([[0.05] * 20], 40_960, [19]))]) == []
    assert kinds(None, row(usage=ExpertUsage([[0.052] * 19 + [0.012]], 40_960, [19]))) == []
    assert kinds(None, row(usage=ExpertUsage([[0.0525] * 19 + [0.0025]], 40_960, [19]))) == ["collapsed routing"]
    many = ExpertUsage([[1 / 16] * 16 + [0.0] * 16], 4096, [12])
    assert "16 of 32 experts (16, 17, 18, 19, 20, 21, 22, 23, ...)" in find_warnings(rows=[row(usage=many)])[0].text


def test_experts_that_all_tokens_use_by_their_bias_are_no_choice() -> None:
    dense = make_pico("llama")
    plan = make_plan(dense, "off", form="fine")
    bias = torch.where(torch.arange(8) < 2, ALWAYS, 0.0)
    layers = [replace(layer, top_k=4, router_bias=bias) for layer in plan.layers]
    plan = replace(plan, layers=tuple(layers), recipe={})
    rest = [0.1, 0.1, 0.1, 0.1, 0.05, 0.05]
    fair, same = [0.25, 0.25, *rest], [0.25, 0.25, 0.25, 0.23, 0.02, 0.0, 0.0, 0.0]
    usage = [ExpertUsage([shares] * len(layers), 40_960, [4] * len(layers)) for shares in (fair, same)]
    assert kinds(plan, row(usage=usage[0])) == []
    assert set(kinds(plan, row(usage=usage[1]))) == {"dead experts", "collapsed routing"}


def test_contexts_longer_than_the_model() -> None:
    assert kinds(None, row(64), row(64)) == []  # pico models are made for 64 tokens
    (found,) = find_warnings(rows=[row(65), row(65)])
    assert (found.kind, "of 65 tokens, but is made for 64" in found.text) == ("context", True)
    plan = replace(sound_plan(), dense_config={"max_position_embeddings": 64})
    active = plan.active_fraction()
    assert kinds(asked(plan, active, data={"seq_len": 64})) == []
    assert kinds(asked(plan, active, data={"seq_len": 65})) == ["context"]
    assert kinds(asked(replace(plan, dense_config={}), active, data={"seq_len": 65})) == []


def test_a_text_of_few_sequences_is_noisy() -> None:
    assert kinds(None, row(sequences=8)) == []
    for sequences, words in ((7, "on 7 sequences of text"), (1, "on 1 sequence of text")):
        (found,) = find_warnings(rows=[row(sequences=sequences), row(sequences=sequences)])
        assert (found.kind, words in found.text, "noisy" in found.text) == ("few sequences", True, True)


def test_evaluation_text_out_of_the_training_text() -> None:
    assert kinds(None, row(overlap=0.0), row(overlap=None)) == []
    (found,) = find_warnings(rows=[row(), row(overlap=0.5)])
    assert (found.kind, found.text.startswith("50.0% of the evaluation tokens")) == ("training text", True)


def sequences(rows: list[list[int]]) -> Sequences:
    """Token 0 is padding, wherever it stands, with the id of another token."""
    ids = torch.tensor(rows)
    return Sequences(ids.clamp(min=1), ids != 0)


def plain_share(text: list[list[int]], fitted: list[list[int]], n: int) -> float:
    """By looking at every run of n tokens."""

    def runs(rows: list[list[int]]) -> list[tuple[tuple[int, int, int], tuple[int, ...]]]:
        found = [((b, i, n), tuple(row[i : i + n])) for b, row in enumerate(rows) for i in range(len(row) - n + 1)]
        return [(place, run) for place, run in found if 0 not in run]

    known = {run for _, run in runs(fitted)}
    covered = {(b, i + k) for (b, i, n), run in runs(text) for k in range(n) if run in known}
    return len(covered) / max(sum(token != 0 for row in text for token in row), 1)


rows_of = st.integers(3, 9).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, 2), min_size=size, max_size=size), min_size=1, max_size=4)
)


@settings(deadline=None, max_examples=75, derandomize=True)
@given(rows_of, rows_of, st.integers(1, 6))
def test_overlap_is_what_a_plain_search_finds(text: list[list[int]], fitted: list[list[int]], n: int) -> None:
    assert shared_share(sequences(text), sequences(fitted), n) == pytest.approx(plain_share(text, fitted, n))


def test_overlap_of_long_runs_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    fitted = torch.randint(1, 50_000, (8, 64), generator=draw)
    text = torch.randint(1, 50_000, (4, 100), generator=draw)
    text[1, 20:32] = fitted[5, 10:22]  # twelve tokens in a row are chance
    assert shared_share(sequences(text.tolist()), sequences(fitted.tolist())) == 0.0
    text[2, 7:37] = fitted[3, 30:60]
    assert shared_share(sequences(text.tolist()), sequences(fitted.tolist())) == pytest.approx(30 / 400)


def test_inspect_tells_what_convert_found(tomoe: CommandLine, tmp_path: Path) -> None:
    asked(sound_plan(), 0.9).save(tmp_path)
    (tmp_path / "evaluation.json").write_text(to_json([row(overlap=0.5)]))
    told = json.loads(tomoe("inspect", tmp_path, "--json").out)["warnings"]
    assert [warning["kind"] for warning in told] == ["budget missed", "training text"]
    assert f"Warning: {told[1]['text']}.\n" in tomoe("inspect", tmp_path).out
    (tmp_path / "evaluation.json").write_text("{}")  # of another version
    assert [w["kind"] for w in json.loads(tomoe("inspect", tmp_path, "--json").out)["warnings"]] == ["budget missed"]


def test_an_improvement_that_made_it_worse_says_so() -> None:
    unmeasured = row()
    before, after = (replace(row(), measurement=replace(row().measurement, kl=kl)) for kl in (0.38, 0.78))
    (found,) = find_worsening(before, after)
    assert (found.kind, "KL 0.7800 instead of 0.3800" in found.text) == ("worse than before", True)
    assert find_worsening(after, before) == find_worsening(before, before) == find_worsening(unmeasured, after) == []
