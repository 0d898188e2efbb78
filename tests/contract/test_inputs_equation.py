"""The equation of the form `inputs`: masks on the dense model == folded == what comes back from disk == what kernels compute,
for passes of any length and batches of any size, whatever is written to the weights; all inputs == dense, bit by bit."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from family_contract import inputs_masked
from margins import assert_same
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from conftest import make_pico, tokens
from tomoe.errors import UserError
from tomoe.methods.inputs import plan_inputs
from tomoe.model.structure import shape_of
from tomoe.moe import modeling_tomoe
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.moe.kernels import prepare
from tomoe.moe.kernels.inputs import InputsLinear, kernel
from tomoe.moe.modeling_tomoe import FEW_TOKENS, ToMoEForCausalLM, choices_of, column_norms
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


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with its matrices laid for the kernel, as `tomoe.load` lays them."""
    model = copy.deepcopy(model)
    prepare(model)
    kinds = {type(projection) for _, projections in model.choices() for projection in projections}
    assert kinds == {nn.Linear if kernel() is None else InputsLinear}
    return model


def test_folded_and_reloaded_compute_what_the_masks_mean(case: Case) -> None:
    """At any length of a pass: five rows at once, two, tokens one by one; copies, too."""
    ids = clear_tokens(case.dense, case.plan, rows=FEW_TOKENS + 1)
    whole = case.dense(ids).logits
    with inputs_masked(case.dense, case.plan.inputs()):
        meant = case.dense(ids).logits
    assert (meant - whole).abs().max() > 1e-2, "the masks changed nothing"
    laid = prepared(case.reloaded)
    for model in (
        case.folded,
        case.reloaded,
        pickle.loads(pickle.dumps(case.reloaded)),
        laid,
        pickle.loads(pickle.dumps(laid)),
    ):
        assert_same(model(ids).logits, meant)
        assert_same(model(ids[:2]).logits, meant[:2])
        assert_same(one_by_one(model, ids), meant)
        for i in range(len(ids)):
            assert_same(one_by_one(model, ids[i : i + 1]), meant[i : i + 1])
            assert_same(model(ids[i : i + 1]).logits, meant[i : i + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_call_and_later_ones_give_the_same_bytes(case: Case, dtype: torch.dtype) -> None:
    """Nothing that runs in between, short passes or long ones, changes how a model computes."""
    ids = case.ids
    for prepares in (False, True):
        model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=dtype)
        if prepares:
            prepare(model)
        first = model(ids).logits
        tokens_first = one_by_one(model, ids[:1])
        model(ids[:, :2])
        assert torch.equal(model(ids).logits, first)
        assert torch.equal(one_by_one(model, ids[:1]), tokens_first)


def test_a_batch_of_five_writes_what_each_row_writes_alone(case: Case) -> None:
    ids = clear_tokens(case.dense, case.plan, rows=FEW_TOKENS + 1)
    greedy = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
    for model in (case.reloaded, prepared(case.reloaded)):
        together = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        with inputs_masked(case.dense, case.plan.inputs()):
            meant = case.dense.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        alone = [model.generate(row[None], attention_mask=torch.ones_like(row[None]), **greedy)[0] for row in ids]
        assert torch.equal(together, meant)
        assert torch.equal(together, torch.stack(alone))


def test_whole_prompts_use_all_inputs_if_that_is_asked_for(case: Case, tmp_path: Path) -> None:
    """Passes of a few tokens still choose; the saved folder and a copy say the same."""
    ids = case.ids[:1]
    model = AutoModelForCausalLM.from_pretrained(case.folder, tomoe_prompts="whole")
    model.save_pretrained(tmp_path / "whole")
    with inputs_masked(case.dense, case.plan.inputs()):
        few_meant = case.dense(ids[:, :FEW_TOKENS]).logits
    for again in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "whole"), prepared(model)):
        assert_same(again(ids[:, :FEW_TOKENS]).logits, few_meant)
        assert_same(again(ids).logits, case.dense(ids).logits)
        # after a whole prompt, the next token chooses
        cache = case.dense(ids[:, :-1], use_cache=True)[modeling_tomoe.CACHE]
        with inputs_masked(case.dense, case.plan.inputs()):
            meant = case.dense(ids[:, -1:], use_cache=True, **{modeling_tomoe.CACHE: cache}).logits
        cache = again(ids[:, :-1], use_cache=True)[modeling_tomoe.CACHE]
        assert_same(again(ids[:, -1:], use_cache=True, **{modeling_tomoe.CACHE: cache}).logits, meant)
    model.config.tomoe_prompts = "chosen"
    assert_same(model(ids).logits, case.reloaded(ids).logits)
    for wrong in ("all", True, ["whole"]):
        with pytest.raises(ValueError, match=r"tomoe_prompts is .*, which must be chosen or whole"):
            AutoModelForCausalLM.from_pretrained(case.folder, tomoe_prompts=wrong)


def test_all_inputs_are_the_dense_model(case: Case) -> None:
    """To the last bit; a kernel rounds otherwise."""
    ids = tokens(2, 8, seed=5)
    moe = AutoModelForCausalLM.from_pretrained(case.folder, tomoe_active=1.0)
    assert torch.equal(moe(ids).logits, case.dense(ids).logits)
    assert torch.equal(one_by_one(moe, ids), one_by_one(case.dense, ids))
    assert_same(one_by_one(prepared(moe), ids), one_by_one(case.dense, ids))


@pytest.mark.parametrize("case", ["llama3"], indirect=True)
def test_the_share_is_chosen_when_loading(case: Case) -> None:
    for active in (0.45, 0.83):
        moe = AutoModelForCausalLM.from_pretrained(case.folder, tomoe_active=active)
        other = replace(case.plan, active=active)
        ids = clear_tokens(case.dense, other)
        assert abs(other.active_fraction() - active) < 0.01  # an input of a pico model is 0.3 %
        assert {c.count for c in choices_of(moe)} <= {n for numbers in other.inputs().values() for n in numbers}
        with inputs_masked(case.dense, other.inputs()):
            assert_same(moe(ids).logits, case.dense(ids).logits)
    for wrong in (0.0, 0.01, 1.5, "0.5"):
        with pytest.raises(ValueError, match="tomoe_active is"):
            AutoModelForCausalLM.from_pretrained(case.folder, tomoe_active=wrong)


def test_the_file_is_that_of_the_dense_model_and_the_norms(case: Case, tmp_path: Path) -> None:
    """Names, shapes and values, however the matrices lie in memory."""
    dense = case.dense.state_dict()
    for model in (case.reloaded, prepared(case.reloaded)):
        norms = {name: t for name, t in model.state_dict().items() if ".tomoe_choices." in name}
        meant = dense | norms
        assert len(norms) == len(choices_of(model))
        for place, given in enumerate((None, model.state_dict())):
            model.save_pretrained(tmp_path / str(place), state_dict=given)
            again = AutoModelForCausalLM.from_pretrained(tmp_path / str(place)).state_dict()
            assert again.keys() == meant.keys()
            assert all(torch.equal(again[name], t) for name, t in meant.items())
        save_model(model, str(tmp_path / "model.safetensors"))
        written = load_file(tmp_path / "model.safetensors")
        assert meant.keys() - written.keys() <= {"lm_head.weight", "model.embed_tokens.weight"}, (
            "one of two that are tied"
        )
        assert all(torch.equal(t, meant[name]) for name, t in written.items())


@pytest.mark.parametrize("case", ["llama3"], indirect=True)
@pytest.mark.parametrize("way", ["removed", "not a number"])
def test_a_folder_without_its_norms_is_refused(case: Case, tmp_path: Path, way: str) -> None:
    """Tokens would choose by whatever the memory held."""
    shutil.copytree(case.folder, tmp_path / "moe")
    state = load_file(file := tmp_path / "moe" / "model.safetensors")
    norms = state.pop("model.layers.1.tomoe_choices.down.norms")
    if way != "removed":
        state["model.layers.1.tomoe_choices.down.norms"] = norms / 0 * 0
    save_file(state, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.tomoe_choices\.down\.norms holds numbers that are not finite"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "moe")


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
@pytest.mark.parametrize("buffers", [False, True])
def test_offloaded_weights_choose_by_the_stored_norms(case: Case, buffers: bool) -> None:
    """accelerate has the weights of one module in memory at a time."""
    model = accelerate.cpu_offload(copy.deepcopy(case.reloaded), execution_device="cpu", offload_buffers=buffers)
    prepare(model)  # leaves them as they are
    assert torch.equal(model(case.ids).logits, case.reloaded(case.ids).logits)


def scale(weight: Tensor) -> Tensor:
    """Other weights, whose columns have other norms."""
    return weight * torch.linspace(0.2, 3, weight.shape[1])


def flattened(projections: list[Any]) -> None:
    weights = [projection.weight for projection in projections]
    vector_to_parameters(torch.cat([scale(weight).flatten() for weight in weights]), weights)


def stepped(projections: list[Any]) -> None:
    """An optimizer, with operations on many tensors at once."""
    weights = [projection.weight.requires_grad_() for projection in projections]
    for weight in weights:
        weight.grad = weight.detach() - scale(weight.detach())
    torch.optim.SGD(weights, lr=1.0, foreach=True).step()
    for weight in weights:
        weight.requires_grad_(False).grad = None


def each(write: Callable[[Any], object]) -> Callable[[list[Any]], None]:
    return lambda projections: [write(projection) for projection in projections] and None


WRITES: dict[str, Callable[[list[Any]], None]] = {
    "copy_": each(lambda p: p.weight.copy_(scale(p.weight))),
    "data.copy_": each(lambda p: p.weight.data.copy_(scale(p.weight))),
    "data": each(lambda p: setattr(p.weight, "data", scale(p.weight).contiguous())),
    "a parameter": each(
        lambda p: setattr(p, "weight", nn.Parameter(scale(p.weight).contiguous(), requires_grad=False))
    ),
    "load_state_dict": each(lambda p: p.load_state_dict(p.state_dict() | {"weight": scale(p.weight).contiguous()})),
    "assign": each(lambda p: p.load_state_dict(p.state_dict() | {"weight": scale(p.weight).contiguous()}, assign=True)),
    "detach": each(lambda p: p.weight.detach().set_(p.weight.detach()).copy_(scale(p.weight))),
    "numpy": each(lambda p: np.copyto(p.weight.detach().numpy(), scale(p.weight).numpy())),
    "flattened": flattened,
    "optimizer": stepped,
    "fused data": each(lambda p: torch._foreach_copy_([p.weight.data], [scale(p.weight)])),
}


@pytest.mark.parametrize("case", ["llama3", "qwen2"], indirect=True)
@pytest.mark.parametrize("lays", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_whatever_writes_weights_is_followed_and_leaves_the_choice(
    case: Case, tmp_path: Path, write: str, lays: bool
) -> None:
    """A model in memory computes what its saved copy does: with the weights written, chosen by the stored norms."""
    model = (prepared if lays else copy.deepcopy)(case.reloaded)
    ids = clear_tokens(case.dense, case.plan)
    before = one_by_one(model, ids)
    for _, projections in model.choices():
        WRITES[write](projections)
    after = one_by_one(model, ids)
    assert (after - before).abs().max() > 1e-2, "nothing was written"
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    # by the same norms as before, although those of the columns are others now
    for choice, saved in zip(choices_of(model), choices_of(again), strict=True):
        assert torch.equal(choice.norms, saved.norms)
    for found in (model(ids).logits, again(ids).logits, one_by_one(again, ids)):
        assert (found - after).abs().max() < 1e-4 * after.abs().max(), write


@pytest.mark.parametrize("case", ["llama3"], indirect=True)
def test_weights_of_the_dense_model_leave_the_norms(case: Case) -> None:
    model = copy.deepcopy(case.reloaded)
    norms = [choice.norms.clone() for choice in choices_of(model)]
    model.load_state_dict({name: 2 * t for name, t in case.dense.state_dict().items()})
    assert all(torch.equal(choice.norms, before) for choice, before in zip(choices_of(model), norms, strict=True))
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, 2 * case.dense.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize("case", ["llama3"], indirect=True)
def test_norms_survive_a_cast(case: Case) -> None:
    """They are bfloat16 values: a model that is cast chooses by what it would choose by if it were loaded so."""
    loaded = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.bfloat16)
    cast = copy.deepcopy(case.reloaded).to(torch.bfloat16)
    for own, other, stored in zip(choices_of(loaded), choices_of(cast), choices_of(case.reloaded), strict=True):
        assert torch.equal(own.norms.float(), stored.norms)
        assert torch.equal(other.norms.float(), stored.norms)
    assert torch.equal(prepared(cast)(case.ids[:, :1]).logits, prepared(loaded)(case.ids[:, :1]).logits)


@pytest.mark.parametrize("case", ["llama3"], indirect=True)
def test_libraries_that_want_contiguous_weights_find_them_after_a_text_was_written(case: Case, tmp_path: Path) -> None:
    model = copy.deepcopy(case.reloaded)
    model.generate(case.ids[:1], attention_mask=torch.ones_like(case.ids[:1]), max_new_tokens=2, do_sample=False)
    assert len(parameters_to_vector(model.parameters())) == sum(p.numel() for p in model.parameters())
    save_file({name: p.data.clone() for name, p in model.named_parameters()}, tmp_path / "weights.safetensors")
    assert all(p.is_contiguous() for p in model.parameters())
    projection = model.model.layers[0].mlp.up_proj
    prune.remove(prune.l1_unstructured(projection, "weight", 0.5), "weight")
    assert float((projection.weight == 0).float().mean()) == pytest.approx(0.5, abs=0.01)


def test_a_model_of_random_weights_chooses_by_their_norms(llama: PreTrainedModel) -> None:
    plan = make_inputs_plan(llama)
    model = AutoModelForCausalLM.from_config(fold(llama, plan).config)
    for choice, projections in model.choices():
        assert torch.equal(choice.norms, column_norms([projection.weight for projection in projections]))


def test_router_logits_of_a_model_without_routers_are_none_and_cost_nothing(llama: PreTrainedModel) -> None:
    """Trainers set the key wherever a config has it."""
    model, ids = fold(llama, make_inputs_plan(llama)), tokens(1, 8)
    plain = model(ids, labels=ids)
    asked = model(ids, labels=ids, output_router_logits=True)
    model.config.output_router_logits = True
    for found in (asked, model(ids, labels=ids)):
        assert torch.equal(found.loss, plain.loss)
        assert (found.router_logits, float(found.aux_loss)) == ((), 0.0)
    assert model.model(ids, output_router_logits=True).router_logits == ()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama3"], indirect=True)
def test_quantizers_pack_the_projections_and_tokens_choose(case: Case) -> None:
    """bitsandbytes puts its own modules in place of PyTorch's."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(case.folder, quantization_config=config, device_map="cpu")
    prepare(model)  # leaves them as they are
    packed = [projection for _, projections in model.choices() for projection in projections]
    assert {type(projection) for projection in packed} == {bitsandbytes.nn.Linear4bit}
    found, ids = model(case.ids).logits, case.ids
    model.config.tomoe_active = 1.0
    assert (model(ids).logits - found).abs().max() > 1e-2, "no token chose"


@pytest.mark.parametrize("lays", [False, True])
@pytest.mark.parametrize("length", [3, 9])
def test_compiled_it_computes_the_same(length: int, lays: bool) -> None:
    dense = make_pico("llama", num_hidden_layers=1)
    plan = make_inputs_plan(dense)
    model, ids = fold(dense, plan), clear_tokens(dense, plan, 1, length)
    meant = model(ids).logits
    if lays:
        prepare(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(compiled(ids, use_cache=False).logits, meant)
