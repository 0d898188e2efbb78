"""What `active` says is what decoding reads: every form, counted by watching one step with a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

import tomoe as api
from conftest import make_pico, tokens
from tomoe.budget import BUDGET_TOLERANCE, decoder_params
from tomoe.evaluation.param_counts import model_facts
from tomoe.model.structure import shape_of
from tomoe.moe import modeling_tomoe
from tomoe.moe.modeling_tomoe import CACHE, Router, ToMoEAttention, ToMoEForCausalLM
from tomoe.plans import Plan

TEXT, ACTIVE = tokens(16, 24), 0.6
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "carve": ("carve", {"experts.num_experts": 64}),
    "few experts": ("carve", {"experts.num_experts": 8, "experts.expert_size": 48, "active": 0.607}),
    "a stock target": ("carve", {"experts.num_experts": 16, "target": "glm4_moe"}),
    "cmoe": ("cmoe", {}),
    "expert_weaver": ("expert_weaver", {"experts.num_experts": 16}),
    "llama_moe": ("llama_moe", {}),
    "random_split": ("random_split", {"experts.num_experts": 16, "active": 0.598}),
    "dot_moe": ("dot_moe", {"experts.num_experts": 16, "train.steps": 1}),
    "learned routers": ("tomoe", {"experts.num_experts": 16, "train.steps": 1}),
    "pruned attention": ("tomoe", {"experts.num_experts": 16, "attention.pruning": "static"}),
    "V/O dims by token": ("tomoe", {"experts.num_experts": 16, "attention.pruning": "per_token"}),
    "overlapping": ("tomoe", {"experts.form": "overlapping", "experts.width_multiple": 8}),
    "overlapping, V/O dims by token": (
        "tomoe",
        {"experts.form": "overlapping", "experts.width_multiple": 8, "attention.pruning": "per_token"},
    ),
    "the paper's": (
        "tomoe",
        {"start": "random", "train.steps": 1, "experts.width_multiple": 8, "attention.pruning": "per_token"},
    ),
    "static": ("static", {"experts.width_multiple": 8}),
    "inputs": ("inputs", {}),
}


def dense_model() -> PreTrainedModel:
    """Fine enough for the budget: eight neurons of one layer are 0.35 % of the decoder parameters."""
    return make_pico("llama", hidden_size=64, intermediate_size=512, num_hidden_layers=4, num_key_value_heads=2)


class Reading(TorchFunctionMode):
    """Counts the elements of the decoder's matrices that products of one token read: of a chosen row all, of a column for which
    its input is zero none."""

    def __init__(self, model: ToMoEForCausalLM):
        super().__init__()
        # the row of a single expert decides nothing
        single = {id(m.weight) for m in model.modules() if isinstance(m, Router) and len(m.weight) == 1}
        matrices = (p for layer in model.model.layers for p in layer.parameters() if p.dim() == 2)
        self.read = {id(p): 0 for p in matrices if id(p) not in single}
        for attention in (m for m in model.modules() if isinstance(m, ToMoEAttention) and m.value_router is not None):
            attention.value_router.register_forward_hook(self._leaves_out(attention.v_proj))

    def _leaves_out(self, values: nn.Linear) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, mask: Tensor) -> None:
            self.read[id(values.weight)] -= round(float(1 - mask.mean()) * values.weight.numel())

        return hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.linear and id(args[1]) in self.read:
            x, weight = args[:2]
            assert x.numel() == x.shape[-1], "one token"
            self.read[id(weight)] += int(x.count_nonzero()) * len(weight)
        elif func in (Tensor.__getitem__, Tensor.index_select) and id(args[0]) in self.read:
            self.read[id(args[0])] += result.numel()
        return result


def read_by_decoding(moe: ToMoEForCausalLM, monkeypatch: pytest.MonkeyPatch) -> int:
    """Elements of decoder matrices that one token reads after others."""
    # by PyTorch, and of experts only the rows that are chosen
    plain = ("pytorch", "runs", "masked")
    for step, backends in modeling_tomoe.BACKENDS.items():
        kept = {name: backend for name, backend in backends.items() if name in plain}
        monkeypatch.setitem(modeling_tomoe.BACKENDS, step, kept)
    moe.config.tomoe_expert_backend = "runs"
    ids = tokens(1, 9)
    with torch.no_grad():
        cache = moe(ids[:, :-1], use_cache=True)[CACHE]
        reading = Reading(moe)
        with reading:
            moe(ids[:, -1:], use_cache=True, **{CACHE: cache})
    assert all(count > 0 for count in reading.read.values())
    return sum(reading.read.values())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_decoding_step_reads_what_the_plan_says(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, keys = CASES[case]
    dense = dense_model()
    learning = {"data.seq_len": 24, "train.dtype": "float32"}
    active = float(str(keys.get("active", ACTIVE)))
    plan = api.plan(dense, method, TEXT, active=active, recipe=learning | keys)
    moe = api.fold(dense, plan).eval()
    share = read_by_decoding(moe, monkeypatch) / decoder_params(shape_of(dense))
    assert share == pytest.approx(plan.active_fraction(), abs=1e-9)
    assert model_facts(moe)["active_share"] == pytest.approx(share, abs=1e-4)
    if isinstance(plan, Plan):
        assert plan.totals()["active_decoder_params"] == round(share * decoder_params(shape_of(dense)))
        assert sum(row["active"] for row in plan.describe()) / len(plan.layers) == pytest.approx(share)
    paper = keys.get("start") == "random"
    budgeted = plan.active_fraction(routers=False) if paper else share
    # an input of a pico model is 0.3 %
    assert abs(budgeted - active) <= (0.005 if method == "inputs" else BUDGET_TOLERANCE)
    if paper:
        assert share > active + BUDGET_TOLERANCE, "its budget leaves the routers out, and the plan says so"
