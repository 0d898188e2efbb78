"""The equation of the form `inputs`: masks on the dense model == folded == what comes back from disk, with the choice on every
token; all inputs == dense, bit by bit; one token after another == all at once."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from family_contract import inputs_masked
from margins import assert_same
from safetensors.torch import load_file, save_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from conftest import make_pico, tokens
from tomoe.errors import UserError
from tomoe.methods.inputs import plan_inputs
from tomoe.model.structure import shape_of
from tomoe.moe import modeling_tomoe
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.moe.kernels.inputs import kernel
from tomoe.moe.modeling_tomoe import FEW_TOKENS, ToMoEForCausalLM, choices_of, choosing_all
from tomoe.plans import InputsPlan

pytestmark = pytest.mark.usefixtures("no_grad")
# Projections with and without biases and a gate, grouped heads and as many of them, heads wider than the hidden size; tied
# embeddings.
FAMILIES = ("llama3", "qwen2", "qwen3", "phi")


def make_inputs_plan(model: PreTrainedModel, active: float = 0.6) -> InputsPlan:
    ids = tokens(2, 24, seed=4)
    return plan_inputs(model, shape_of(model), ids, torch.ones_like(ids, dtype=torch.bool), active)


def clear_tokens(model: PreTrainedModel, plan: InputsPlan, rows: int = 2, length: int = 8) -> Tensor:
    """Tokens that no rounding lets choose otherwise: computed in another order, numbers differ by some 1e-7."""
    for seed in range(100):
        ids = tokens(rows, length, seed=seed)
        with inputs_masked(model, plan.inputs()) as margins:
            model(ids)
        if min(margins) > 1e-5:
            return ids
    raise AssertionError("no tokens with wide margins")


@dataclass(frozen=True)
class Case:
    dense: PreTrainedModel
    plan: InputsPlan
    folded: ToMoEForCausalLM
    reloaded: ToMoEForCausalLM
    folder: Path
    ids: Tensor


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    dense = make_pico(request.param)
    plan = make_inputs_plan(dense)
    folded = fold(dense, plan)
    folder = tmp_path_factory.mktemp("inputs") / request.param
    save_moe(folded, plan, None, folder, check=True)
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    return Case(dense, plan, folded, reloaded, folder, clear_tokens(dense, plan))


def one_by_one(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of tokens that come one after another, as in decoding."""
    cache, logits = None, []
    for column in ids.split(1, 1):
        out = model(column, use_cache=True, **{modeling_tomoe.CACHE: cache})
        cache = out[modeling_tomoe.CACHE]
        logits.append(out.logits)
    return torch.cat(logits, 1)


def test_folded_and_reloaded_compute_what_the_masks_mean(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = case.ids
    whole = case.dense(ids).logits
    with inputs_masked(case.dense, case.plan.inputs()):
        meant = case.dense(ids).logits
    assert (meant - whole).abs().max() > 1e-2, "the masks changed nothing"
    for model in (case.folded, case.reloaded, copy.deepcopy(case.reloaded), pickle.loads(pickle.dumps(case.reloaded))):
        assert torch.equal(model(ids).logits, whole), "a prompt uses all inputs"
        with choosing_all(model):
            assert_same(model(ids).logits, meant)
            assert_same(one_by_one(model, ids), meant)
            monkeypatch.setitem(
                modeling_tomoe.WAYS, "choosing product", {"masked": modeling_tomoe.WAYS["choosing product"]["masked"]}
            )
            assert_same(one_by_one(model, ids), meant)
            monkeypatch.undo()


def test_single_tokens_choose_and_prompts_do_not(case: Case) -> None:
    ids, model = case.ids[:1], case.reloaded
    with inputs_masked(case.dense, case.plan.inputs()):
        meant = case.dense(ids[:, :FEW_TOKENS]).logits
    assert_same(model(ids[:, :FEW_TOKENS]).logits, meant)
    assert torch.equal(model(ids).logits, case.dense(ids).logits)
    # after a whole prompt, the next token chooses
    cache = case.dense(ids[:, :-1], use_cache=True)[modeling_tomoe.CACHE]
    with inputs_masked(case.dense, case.plan.inputs()):
        meant = case.dense(ids[:, -1:], use_cache=True, **{modeling_tomoe.CACHE: cache}).logits
    cache = model(ids[:, :-1], use_cache=True)[modeling_tomoe.CACHE]
    assert_same(model(ids[:, -1:], use_cache=True, **{modeling_tomoe.CACHE: cache}).logits, meant)


def test_rows_do_not_depend_on_each_other(case: Case) -> None:
    ids = case.ids
    with choosing_all(case.reloaded):
        together = one_by_one(case.reloaded, ids)
        for i in range(len(ids)):
            assert_same(together[i : i + 1], one_by_one(case.reloaded, ids[i : i + 1]))


def test_all_inputs_are_the_dense_model(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit; a kernel rounds otherwise, and runs where it can."""
    ids = tokens(2, 8, seed=5)
    moe = AutoModelForCausalLM.from_pretrained(case.folder, tomoe_active=1.0)
    meant = one_by_one(case.dense, ids)
    ways = modeling_tomoe.WAYS["choosing product"]
    with choosing_all(moe), monkeypatch.context() as patch:
        patch.setitem(modeling_tomoe.WAYS, "choosing product", {"masked": ways["masked"]})
        assert torch.equal(moe(ids).logits, case.dense(ids).logits)
        assert torch.equal(one_by_one(moe, ids), meant)
    assert_same(one_by_one(moe, ids), meant)
    ready = {choice.kept["ready"][0] for choice in choices_of(moe) if "ready" in choice.kept}
    assert ready == ({"native"} if kernel() is not None else set())


@pytest.mark.parametrize("case", ["llama3"], indirect=True)
def test_the_share_is_chosen_when_loading(case: Case) -> None:
    for active in (0.45, 0.83):
        moe = AutoModelForCausalLM.from_pretrained(case.folder, tomoe_active=active)
        other = replace(case.plan, active=active)
        ids = clear_tokens(case.dense, other)
        assert abs(other.active_fraction() - active) < 0.01  # an input of a pico model is 0.3 %
        assert {c.count for c in choices_of(moe)} <= {n for numbers in other.inputs().values() for n in numbers}
        with inputs_masked(case.dense, other.inputs()), choosing_all(moe):
            assert_same(moe(ids).logits, case.dense(ids).logits)
    for wrong in (0.0, 0.01, 1.5, "0.5"):
        with pytest.raises(ValueError, match="tomoe_active is"):
            AutoModelForCausalLM.from_pretrained(case.folder, tomoe_active=wrong)


def test_the_file_is_that_of_the_dense_model(case: Case, tmp_path: Path) -> None:
    """Names and shapes, and values however the matrices lie in memory after decoding."""
    one_by_one(case.reloaded, tokens(1, 3))
    dense = case.dense.state_dict()
    for folder, given in ("again", None), ("given", case.reloaded.state_dict()):
        one_by_one(case.reloaded, tokens(1, 3))
        case.reloaded.save_pretrained(tmp_path / folder, state_dict=given)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        assert again.keys() == dense.keys()
        assert all(torch.equal(again[name], t) for name, t in dense.items())
    one_by_one(case.reloaded, tokens(1, 3))
    save_model(case.reloaded, str(tmp_path / "model.safetensors"))
    written = load_file(tmp_path / "model.safetensors")
    assert dense.keys() - written.keys() <= {"lm_head.weight", "model.embed_tokens.weight"}, "one of two that are tied"
    assert all(torch.equal(t, dense[name]) for name, t in written.items())


@pytest.mark.parametrize("case", ["llama3"], indirect=True)
@pytest.mark.parametrize(
    ("names", "words"),
    {
        "a word": ("mlp.up_proj", "names no projections"),
        "none": ([], "names no projections"),
        "unknown": (["mlp.gate_proj", "mlp.other"], "'mlp.other' of layer 0"),
        "no matrix": (["input_layernorm"], "has 0 inputs"),
        "another width": (["mlp.down_proj"], "not 32"),
        "twice": (["mlp.up_proj", "mlp.up_proj"], "has 0 inputs"),
        "of another kind": (["self_attn.q_proj"], "has 0 inputs"),
        "a number": ([3], "'3' of layer 0"),
    }.values(),
)
def test_a_config_that_names_other_projections_is_refused(case: Case, names: Any, words: str) -> None:
    config = copy.deepcopy(case.reloaded.config)
    config.tomoe_projections["up"] = names
    with pytest.raises(ValueError, match=words):
        ToMoEForCausalLM(config)


@pytest.mark.parametrize("case", ["llama3"], indirect=True)
def test_a_plan_of_other_projections_is_not_folded(case: Case) -> None:
    other = replace(case.plan, names={**case.plan.names, "up": ("mlp.other",)})
    with pytest.raises(UserError, match=r"was not made for this model: 'mlp\.other' of layer 0"):
        fold(case.dense, other)
    with pytest.raises(UserError, match="tokens choose inputs already"):
        fold(case.reloaded, case.plan)


@pytest.mark.parametrize("case", ["llama3"], indirect=True)
def test_offloaded_weights_are_refused_where_tokens_choose(case: Case) -> None:
    """accelerate has the weights of one module in memory at a time."""
    model = copy.deepcopy(case.reloaded)
    ids = tokens(1, 1)
    accelerate.cpu_offload(model, execution_device="cpu")
    with torch.no_grad(), pytest.raises(RuntimeError, match="attention projections of layer 0 are offloaded"):
        model(ids)
    model.config.tomoe_active = 1
    with torch.no_grad():
        assert torch.equal(model(ids).logits, case.dense(ids).logits)


def test_weights_that_change_change_the_choice(llama: PreTrainedModel) -> None:
    """Norms of columns, and matrices side by side in memory, follow what is written to the weights."""
    plan = make_inputs_plan(llama)
    model = fold(copy.deepcopy(llama), plan)
    one_by_one(model, tokens(1, 5))
    for scale in (3.0, 0.2):
        for module in (model, llama):
            weight = module.model.layers[0].mlp.up_proj.weight
            weight.mul_(torch.linspace(1, scale, weight.shape[1]))
        ids = clear_tokens(llama, plan, 1, 5)
        with choosing_all(model), inputs_masked(llama, plan.inputs()):
            assert_same(one_by_one(model, ids), llama(ids).logits)
    replaced = torch.randn_like(llama.model.layers[1].self_attn.k_proj.weight)
    for module in (model, llama):
        module.model.layers[1].self_attn.k_proj.weight.data = replaced.clone()
    ids = clear_tokens(llama, plan, 1, 5)
    with choosing_all(model), inputs_masked(llama, plan.inputs()):
        assert_same(one_by_one(model, ids), llama(ids).logits)


def test_compiled_it_computes_the_same() -> None:
    dense = make_pico("llama", num_hidden_layers=1)
    plan = make_inputs_plan(dense)
    model, ids = fold(dense, plan), clear_tokens(dense, plan, 1, 3)
    meant = model(ids).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(compiled(ids, use_cache=False).logits, meant)
