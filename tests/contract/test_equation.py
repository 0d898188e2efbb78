"""The equation: masked model == folded MoE == what comes back from disk, for every family, attention and backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
import torch
from margins import assert_same, clear_prompts, clear_tokens, meaning
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from conftest import ATTENTION_MODES, FAMILIES, FORMS, make_pico, make_plan, tokens
from grouping_methods import METHODS, plan_by
from tomoe.budget import decoder_params, mlp_params, router_params
from tomoe.methods.tomoe.carving import carve_
from tomoe.methods.tomoe.extract import extract_plan
from tomoe.methods.tomoe.method import new_network
from tomoe.model.structure import shape_of
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import BACKENDS, Backend, ToMoEForCausalLM
from tomoe.plans import Plan
from tomoe.plans.masking import masked, planned_masks
from tomoe.plans.partition.layouts import FineLayout, layout_of
from tomoe.recipe.conversion import Recipe

pytestmark = pytest.mark.usefixtures("no_grad")
# together beyond the sliding window of mistral
PROMPT, NEW = 7, 4
# Every family with each kind of attention that is pruned, and both forms of experts: MLPs and attention are folded apart. The
# last three are MLPs alone, beside a window, without a gate and with one; `test_families` has more of them.
CELLS = [
    *((family, "static", FORMS[i % 2]) for i, family in enumerate(FAMILIES)),
    *((family, "per_token", FORMS[1 - i % 2]) for i, family in enumerate(FAMILIES)),
    ("mistral", "off", "fine"),
    ("phi", "off", "fine"),
    ("qwen2", "off", "overlapping"),
]


@dataclass(frozen=True)
class Case:
    dense: PreTrainedModel
    plan: Plan
    folded: ToMoEForCausalLM
    reloaded: ToMoEForCausalLM
    folder: Path

    @cached_property
    def ids(self) -> Tensor:
        """Two rows."""
        return clear_tokens(self.folded, lambda seed: tokens(2, 24, seed))

    @cached_property
    def prompts(self) -> Tensor:
        """Two rows that go on for NEW tokens, none of which is the end."""
        return clear_prompts(self.folded, lambda seed: tokens(2, PROMPT, seed), NEW, but=[2])


@pytest.fixture(scope="module", params=CELLS, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, attention, form = request.param
    dense = make_pico(family)
    plan = make_plan(dense, attention, form=form)
    folded = fold(dense, plan)
    folder = tmp_path_factory.mktemp("moe") / family
    save_moe(folded, plan, None, folder)
    return Case(dense, plan, folded, AutoModelForCausalLM.from_pretrained(folder), folder)


@contextmanager
def running(moe: ToMoEForCausalLM, backend: str) -> Iterator[ToMoEForCausalLM]:
    before = moe.config.tomoe_expert_backend
    moe.config.tomoe_expert_backend = backend
    try:
        yield moe
    finally:
        moe.config.tomoe_expert_backend = before


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_folded_and_reloaded_compute_what_the_masks_mean(case: Case, implementation: str) -> None:
    ids = case.ids
    for model in (case.dense, case.folded, case.reloaded):
        model.set_attn_implementation(implementation)
    meant = meaning(case.dense, case.plan, ids)
    assert (meant - case.dense(ids).logits).abs().max() > 1e-2, "the masks changed nothing"
    for moe, backends in ((case.folded, BACKENDS["experts"]), (case.reloaded, ("auto",))):
        assert moe.model.layers[0].self_attn.config._attn_implementation == implementation
        for backend in backends:
            with running(moe, backend):
                assert_same(moe(ids).logits, meant)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", ["qwen2", "phi"])
def test_the_plan_of_a_method_folded_and_reloaded(family: str, name: str, tmp_path: Path) -> None:
    dense = make_pico(family)
    plan = plan_by(name, dense)
    folded = fold(dense, plan)
    save_moe(folded, plan, None, tmp_path / "moe")
    ids = clear_tokens(folded, lambda seed: tokens(2, 24, seed))
    meant = meaning(dense, plan, ids)
    assert (meant - dense(ids).logits).abs().max() > 1e-2, "the masks changed nothing"
    for moe in (folded, AutoModelForCausalLM.from_pretrained(tmp_path / "moe")):
        assert_same(moe(ids).logits, meant)


@pytest.mark.parametrize("case", CELLS[-2:], indirect=True, ids="-".join)
def test_few_and_many_tokens_take_other_backends(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `auto` chooses for one token, for a few and for many: all must be reached, and be right."""
    taken: list[str] = []

    def noting(name: str) -> Backend:
        backend = BACKENDS["experts"][name]
        return replace(backend, run=lambda *a: taken.append(name) or backend.run(*a))

    # without kernels of the package
    monkeypatch.setitem(BACKENDS, "experts", {name: noting(name) for name in ("runs", "masked")})
    ids = clear_tokens(case.folded, lambda seed: tokens(8, 32, seed))  # 256 tokens, 64 for each of 4 experts
    meant = meaning(case.dense, case.plan, ids)
    with running(case.folded, "auto") as moe:
        runs = "masked" if case.folded.config.tomoe_expert_form == "fine" else "runs"
        for rows, backend in ((ids, runs), (ids[:1], "masked"), (ids[:1, :1], runs)):
            taken.clear()
            assert_same(moe(rows).logits, meant[: rows.shape[0], : rows.shape[1]])
            assert set(taken) == {backend}


@pytest.mark.parametrize(("family", "attention"), [*zip(FAMILIES, ATTENTION_MODES[::-1] * 2, strict=True)])
def test_full_masks_are_the_dense_model(family: str, attention: str) -> None:
    dense = make_pico(family)
    plan = make_plan(dense, attention, active=1.0)
    shape = shape_of(dense)
    assert plan.widths() == [(shape.mlp_size, shape.head_dim, shape.head_dim)] * shape.num_layers
    ids = tokens(2, 24, seed=5)
    meant = dense(ids).logits
    assert_same(meaning(dense, plan, ids), meant)
    assert_same(fold(dense, plan)(ids).logits, meant)


def with_top_k(plan: Plan, most: int, k: int) -> Plan:
    """The plan in which tokens use more or fewer experts, as `ToMoEConfig.layer_top_k` says it; `most` is its largest k."""

    def of(top_k: int, n: int) -> int:
        return max(1, round(top_k * k / most)) if k <= most else n - round((n - top_k) * (n - k) / (n - most))

    layers = tuple(replace(layer, top_k=of(layer.top_k, len(layer.router_weight))) for layer in plan.layers)
    return replace(plan, layers=layers)


@pytest.mark.parametrize("family", ["qwen2", "phi"])
def test_fine_experts_can_be_used_in_other_numbers(family: str, tmp_path: Path) -> None:
    """The number of experts is chosen at load time; all of them are the dense model."""
    dense = make_pico(family)
    plan = make_plan(dense, "off", form="fine")
    save_moe(fold(dense, plan), plan, None, tmp_path / "moe")
    for k in (1, 2, 3, 5, 8):
        moe = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", num_experts_per_tok=k)
        ids = clear_tokens(moe, lambda seed: tokens(2, 24, seed))
        meant = meaning(dense, with_top_k(plan, 3, k), ids)
        for backend in ("auto", *BACKENDS["experts"]):
            with running(moe, backend):
                assert_same(moe(ids).logits, meant)
        assert bool((meant - dense(ids).logits).abs().max() < 1e-5 * meant.abs().max()) == (k == 8)
    for k in (0, 9, -1):
        with pytest.raises(ValueError, match="num_experts_per_tok"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "moe", num_experts_per_tok=k)


def test_few_wide_experts_as_a_gpu_wants_them(tmp_path: Path) -> None:
    """`target = gpu`, from the layout to the folder; all experts are the dense model."""
    dense = make_pico("qwen2", intermediate_size=2688)
    shape, width = shape_of(dense), 640 + 7.5 * 128
    left_out = shape.num_layers * (mlp_params(shape, shape.mlp_size - width) - router_params(shape, 16))
    recipe, text = Recipe(active=1 - left_out / decoder_params(shape), target="gpu"), tokens(2, 24, seed=5)
    calibration = text, torch.ones_like(text, dtype=torch.bool)
    assert layout_of(recipe, shape) == FineLayout(16, 128, 640, 8, allows_dense=False)
    net = new_network(recipe, dense)
    carve_(net, dense, *calibration, recipe.active, seed=0)
    plan = extract_plan(net, dense, recipe.active, calibration)
    assert sorted(layer.top_k for layer in plan.layers) == [7, 8]
    folded = fold(dense, plan)
    save_moe(folded, plan, None, tmp_path / "moe")
    ids = clear_tokens(folded, lambda seed: tokens(2, 24, seed))
    meant = meaning(dense, plan, ids)
    whole = dense(ids).logits
    assert (meant - whole).abs().max() > 1e-2, "the masks changed nothing"
    for moe in (folded, AutoModelForCausalLM.from_pretrained(tmp_path / "moe")):
        for backend in ("auto", *BACKENDS["experts"]):
            with running(moe, backend):
                assert_same(moe(ids).logits, meant)
    everything = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", num_experts_per_tok=16)
    assert_same(everything(ids).logits, whole)


def test_layers_that_use_all_experts_stay_whole(llama: PreTrainedModel, tmp_path: Path) -> None:
    plan = make_plan(llama, "off", form="fine")
    first, *others = (replace(layer, top_k=top_k) for layer, top_k in zip(plan.layers, (8, 2), strict=True))
    plan = replace(plan, layers=(first, *others))
    save_moe(fold(llama, plan), plan, None, tmp_path / "moe")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "moe").config.num_experts_per_tok == 2
    for k in (1, 2, 5, 8):
        moe = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", num_experts_per_tok=k)
        ids = clear_tokens(moe, lambda seed: tokens(2, 24, seed))
        asked = replace(plan, layers=(first, *(replace(layer, top_k=k) for layer in others)))
        assert_same(moe(ids).logits, meaning(llama, asked, ids))


def write(moe: ToMoEForCausalLM, ids: Tensor, mask: Tensor, cache: str) -> tuple[Tensor, Tensor]:
    """NEW tokens behind each row, none of which is the end, and the logits that they were chosen by."""
    made = moe.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        cache_implementation=cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return made.sequences[:, ids.shape[1] :], torch.stack(made.logits, 1)


def assert_written(written: Tensor, by: Tensor, whole: Tensor, moe: ToMoEForCausalLM) -> None:
    """What was written at the end of the row `whole` [S] is what one pass over it predicts."""
    one_pass = moe(whole[None, :-1], use_cache=False).logits[0, -NEW:]
    assert_same(by, one_pass)
    one_pass[:, 2] = -torch.inf
    assert torch.equal(written, one_pass.argmax(-1))


def test_generating_with_a_cache_is_one_pass_without(case: Case) -> None:
    written, logits = write(case.reloaded, case.prompts, torch.ones_like(case.prompts), "dynamic")
    for row, new, by in zip(case.prompts, written, logits, strict=True):
        assert_written(new, by, torch.cat([row, new]), case.reloaded)


def test_left_padding_changes_no_row(case: Case) -> None:
    """Nor does it in a static cache, which holds the padding, too."""
    rows = clear_prompts(case.folded, lambda seed: [tokens(1, n, seed)[0] for n in (4, 9, 12)], NEW, but=[2])
    ids = torch.stack([torch.nn.functional.pad(row, (12 - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(12) >= 12 - len(row) for row in rows]).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    together = case.reloaded(ids, attention_mask=mask, position_ids=positions).logits
    for row, beside, new, by in zip(rows, together, *write(case.reloaded, ids, mask, "static"), strict=True):
        assert_same(beside[-len(row) :], case.reloaded(row[None]).logits[0])
        assert_written(new, by, torch.cat([row, new]), case.reloaded)


def decisions(model: PreTrainedModel, plan: Plan, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits, and for every layer what each token chose: its expert, and its V/O dims."""
    chosen: list[Tensor] = []
    masks = planned_masks(plan)
    handles = []
    for m, layer in zip(masks, model.model.layers, strict=True):

        def attend(_: object, args: tuple, kwargs: dict, m: object = m) -> None:
            if m.attention is not None and m.attention.value_router:
                x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                chosen.append(m.attention.values(x.flatten(0, -2)))

        def route(_: object, args: tuple, m: object = m) -> None:
            chosen.append(m.experts.choose(args[0].flatten(0, -2))[0].assignment.round())

        handles.append(layer.self_attn.register_forward_pre_hook(attend, with_kwargs=True))
        handles.append(layer.mlp.register_forward_pre_hook(route))
    try:
        logits = model(ids).logits.float()
    finally:
        for handle in handles:
            handle.remove()
    return logits, [c.view(*ids.shape, -1) for c in chosen]


def test_bfloat16_from_disk_rounds_no_worse_than_masked_bfloat16(case: Case, tmp_path: Path) -> None:
    """Both are roundings of one float32 function; where they choose alike, their errors must be of one size.

    A wrong float32 part (a rotary table cast to bfloat16, say) would show as an error many times larger.
    """
    exact, plan = case.dense, case.plan
    exact.save_pretrained(tmp_path)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    moe = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.bfloat16)
    for name, parameter in moe.named_parameters():
        assert parameter.dtype == (torch.float32 if "router." in name else torch.bfloat16), name

    ids = tokens(64, 4, seed=9)
    with masked(exact, planned_masks(plan)):
        meant, chosen_exactly = decisions(exact, plan, ids)
    with masked(dense, planned_masks(plan)):
        ours, chosen_masked = decisions(dense, plan, ids)
    theirs, chosen_folded = decisions(moe, plan, ids)
    alike = torch.ones(ids.shape, dtype=torch.bool)
    for three in zip(chosen_exactly, chosen_masked, chosen_folded, strict=True):
        alike &= (three[0] == three[1]).all(-1) & (three[1] == three[2]).all(-1)
    alike = alike.cumprod(1).bool()  # a token sees those before it
    assert alike.sum() >= 40, "too few tokens to judge by"
    error_masked, error_folded = ((logits - meant)[alike].square().mean().sqrt() for logits in (ours, theirs))
    scale = meant[alike].square().mean().sqrt()
    assert error_folded <= 1.5 * error_masked
    assert error_masked <= 0.05 * scale
