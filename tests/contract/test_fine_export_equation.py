"""The equation for fine-grained experts: masked dense model == Glm4Moe in the number of experts that the plan chose, and
dense model == Glm4Moe with all of them.

A stock router rounds: experts whose logits are almost tied may change places, and weights are a little off 1. So tokens
without a near tie, after tokens without one, must choose alike and predict alike, within wider limits than the forms that are
exact. A wrong export is off by many times more.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Bool, Int
from margins import assert_same, margins, meaning, redrawn
from safetensors.torch import load_file
from test_export_equation import Case, refusal
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import tomoe as api
from conftest import make_pico, make_plan, tokens, write_export
from tomoe.exporting.choice import TARGETS, choose_target
from tomoe.exporting.export import padding_notice
from tomoe.exporting.stock.table import GLM4_MOE
from tomoe.exporting.target import Options
from tomoe.model.hooks import hooked
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, route
from tomoe.plans import Plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_grad")]

# A pruned attention is filled up, with biases or norms or neither; the output matrix of llama3 is that of the embeddings; dot_moe
# has learned groups and routers.
CASES = [
    ("llama", "off"),
    ("llama", "dot_moe"),
    ("llama3", "static"),
    ("qwen2", "static"),
    ("qwen3", "off"),
    ("qwen3", "static"),
]
# of the largest logit, among tokens without a near tie
TOLERANCE = 1e-3
# A near tie: the last expert that is chosen is nearer to the first that is not than this share of the router's largest logit.
# The router's own rounding is 2^-9.5 of it at most; the rest is for the inputs, which are a little off after the first layer.
NEAR_TIE = 2**-7


def fine_plan(dense: PreTrainedModel, attention: str, **experts: object) -> Plan:
    return make_plan(dense, attention, active=0.7, form="fine", **experts)


def learned_plan(dense: PreTrainedModel) -> Plan:
    """By `dot_moe`, after three fast steps."""
    recipe = {"train.steps": 3, "train.warmup_steps": 0, "train.learning_rate": 0.05, "train.dtype": "float32"}
    plan = api.plan(dense, "dot_moe", tokens(8, 40), active=0.698, recipe=recipe | {"experts.num_experts": 8})
    assert isinstance(plan, Plan)
    return plan


def written(dense: PreTrainedModel, plan: Plan, folder: Path, multiple: int | None = None) -> Case:
    """The plan folded and exported to the class that `auto` takes."""
    moe = fold(dense, plan)
    choice = choose_target(moe, "auto")
    assert choice.target.name == "glm4_moe"
    write_export(choice, moe, None, folder, Options(multiple))
    return Case(dense, plan, moe, folder)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, kind = request.param
    dense = make_pico(family)
    plan = learned_plan(dense) if kind == "dot_moe" else fine_plan(dense, kind)
    return written(dense, plan, tmp_path_factory.mktemp("export") / "out")


def chosen_experts(moe: Any, ids: Tensor, n: int) -> tuple[Tensor, list[Tensor]]:
    """Logits, and for each layer which of the first n experts every token uses [T, n], converted or exported."""
    logits: list[Tensor] = []
    stock = hasattr(moe.model.layers[0].mlp, "gate")
    routers = [layer.mlp.gate if stock else layer.mlp.router for layer in moe.model.layers]
    with hooked(r.register_forward_hook(lambda _, args, out: logits.append(out[2] if stock else out)) for r in routers):
        predicted = moe(ids).logits
    ks = [None if stock else layer.mlp.top_k for layer in moe.model.layers]
    chosen = [out if stock else route(out, k)[0] for out, k in zip(logits, ks, strict=True)]
    return predicted, [torch.zeros(ids.numel(), 64).scatter_(1, experts, 1.0)[:, :n] for experts in chosen]


def decided(converted: ToMoEForCausalLM, ids: Tensor) -> Bool[Tensor, "B S"]:
    """Which tokens have no near tie, nor any token before them."""
    return (margins(converted, ids) > NEAR_TIE).cumprod(1).bool()


def decided_rows(converted: ToMoEForCausalLM) -> Int[Tensor, "8 16"]:
    """Rows of which enough is decided to judge by."""
    return redrawn(lambda seed: tokens(8, 16, seed=seed), lambda ids: margins(converted, ids) <= NEAR_TIE, 0.25)


def compare(case: Case, exported: Any, converted: ToMoEForCausalLM, ids: Tensor) -> tuple[float, float]:
    """The share of decided tokens that choose alike, as all tokens before them do, and the largest difference among them."""
    n, clear = converted.config.tomoe_num_experts, decided(converted, ids)
    meant, ours = chosen_experts(converted, ids, n)
    logits, theirs = chosen_experts(exported, ids, n)
    alike = torch.stack([(a == b).all(1) for a, b in zip(ours, theirs, strict=True)]).all(0).view(ids.shape)
    alike = alike.cumprod(1).bool() & clear
    off = (logits - meant)[alike].abs().max() if alike.any() else torch.tensor(torch.inf)
    return float(alike.sum() / clear.sum()), float(off / meant.abs().max())


def all_experts(case: Case) -> tuple[Any, ToMoEForCausalLM]:
    """The export and the converted model, with all experts for each token."""
    layout = GLM4_MOE.layout(case.folded, None)
    exported = AutoModelForCausalLM.from_pretrained(case.folder, num_experts_per_tok=layout.experts)
    everything = tuple(replace(layer, top_k=len(layer.router_weight)) for layer in case.plan.layers)
    return exported, fold(case.dense, replace(case.plan, layers=everything))


def right(case: Case, exported: Any, converted: ToMoEForCausalLM) -> bool:
    alike, off = compare(case, exported, converted, decided_rows(converted))
    return alike == 1 and off <= TOLERANCE


def test_the_export_computes_what_the_masks_mean(case: Case) -> None:
    ids = tokens(8, 16, seed=5)
    assert_same(case.folded(ids).logits, meaning(case.dense, case.plan, ids))
    exported, report = AutoModelForCausalLM.from_pretrained(case.folder, output_loading_info=True)
    assert not any(report.values()), report
    assert type(exported).__module__.startswith("transformers.models.glm4_moe")
    assert exported.dtype == torch.float32
    assert right(case, exported, case.folded)


def test_with_all_experts_no_router_decides(case: Case) -> None:
    exported, converted = all_experts(case)
    ids = tokens(8, 16, seed=5)
    # the dense model, unless attention was pruned
    meant = (converted if case.folded.config.prunes_attention else case.dense)(ids).logits
    assert compare(case, exported, converted, ids)[0] == 1
    assert float((exported(ids).logits - meant).abs().max()) <= TOLERANCE * float(meant.abs().max())
    assert float((case.folded(ids).logits - meant).abs().max()) > 10 * TOLERANCE, "the router changed nothing"


def set_top_k(plan: Plan, k: int) -> Plan:
    return replace(plan, layers=tuple(replace(layer, top_k=k) for layer in plan.layers))


def test_nothing_is_added_where_all_layers_choose_equally_many(tmp_path: Path) -> None:
    """As many parameters as the dense model and its routers; the output matrix is written out."""
    dense = make_pico("llama3", intermediate_size=64)
    plan = set_top_k(fine_plan(dense, "off"), 3)
    case, options = written(dense, plan, tmp_path / "out", multiple=1), Options(1)
    moe = case.folded
    sizes = TARGETS["glm4_moe"].sizes(moe, options)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    n, d = moe.config.tomoe_num_experts, moe.config.hidden_size
    routers = sum(t.numel() for name, t in stored.items() if ".gate." in name)
    assert routers == 2 * (n * d + n)
    total = sum(t.numel() for t in stored.values())
    assert total - routers == sum(p.numel() for p in dense.parameters()) + dense.lm_head.weight.numel()
    assert sizes.bytes == pytest.approx(4 * total, abs=4 * routers)
    assert not sizes.copies
    assert "of zeros" not in sizes.words
    assert padding_notice(moe, sizes) is None
    uneven = fold(dense, fine_plan(dense, "off"))
    for form in ("glm4_moe", "gguf"):
        notice = padding_notice(uneven, TARGETS[form].sizes(uneven, options))
        assert notice is not None
        assert "one expert of zeros is always chosen" in notice
        assert "converted for target = glm4_moe" in notice
    assert right(case, AutoModelForCausalLM.from_pretrained(case.folder), moe)


def test_first_layers_that_use_all_experts_are_written_whole(tmp_path: Path) -> None:
    dense = make_pico("qwen3")
    plan = fine_plan(dense, "static")
    first, *others = plan.layers
    plan = replace(plan, layers=(replace(first, top_k=8), *others))
    case = written(dense, plan, tmp_path / "out")
    layout = GLM4_MOE.layout(case.folded, None)
    assert (layout.dense_layers, layout.top_k, layout.experts) == (1, 2, 8)
    exported = AutoModelForCausalLM.from_pretrained(case.folder)
    assert exported.model.layers[0].mlp.up_proj.weight.shape == (48, 32)
    ids = tokens(8, 16, seed=5)
    meant = meaning(dense, plan, ids)
    logits = exported(ids).logits
    assert float((logits - meant)[decided(case.folded, ids)].abs().max()) <= TOLERANCE * float(meant.abs().max())
    whole, converted = all_experts(case)
    assert float((whole(ids).logits - converted(ids).logits).abs().max()) <= TOLERANCE * float(meant.abs().max())


def test_other_numbers_of_experts_can_be_asked_for_at_load_time(tmp_path: Path) -> None:
    dense = make_pico("llama")
    plan = set_top_k(fine_plan(dense, "off"), 3)
    case = written(dense, plan, tmp_path / "out")
    for k in (1, 5):
        exported = AutoModelForCausalLM.from_pretrained(case.folder, num_experts_per_tok=k)
        assert right(case, exported, fold(dense, set_top_k(plan, k)))


def test_what_it_cannot_hold_is_refused_in_one_sentence() -> None:
    """What every class with such a decoder refuses is tried on Mixtral."""
    assert "share neurons" in refusal(make_pico("llama"), "glm4_moe")
    assert "sliding window" in refusal(make_pico("mistral"), "glm4_moe", form="fine")
    assert "activation is gelu" in refusal(make_pico("llama", hidden_act="gelu"), "glm4_moe", form="fine")
    moe = fold(make_pico("llama"), fine_plan(make_pico("llama"), "off"))
    assert "fine-grained" in str(TARGETS["mixtral"].supports(moe))
