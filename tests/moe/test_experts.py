"""Expert backends: each computes what one float64 product per token and neuron computes."""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tomoe.moe import modeling_tomoe
from tomoe.moe.kernels import gpu
from tomoe.moe.modeling_tomoe import BACKENDS, Backend, ToMoEMLP

ROUNDOFF = 2.0**-8  # of bfloat16


@dataclass(frozen=True)
class Case:
    tokens: int = 37
    experts: int = 4
    width: int = 16
    union: int = 40
    hidden: int = 32
    gated: bool = True
    bias: bool = False
    activation: str = "silu"
    used: tuple[int, ...] = ()  # experts that tokens go to; all if empty
    top_k: int = 0  # fine-grained experts of a token; 0 for one overlapping expert

    @property
    def shared(self) -> int:
        return self.union - self.experts * self.width if self.top_k else 0


CASES = {
    "plain": Case(),
    "odd sizes": Case(tokens=5, width=19, union=47, hidden=33),
    "wide": Case(tokens=9, width=150, union=300, hidden=72),
    "one token": Case(tokens=1),
    "no token": Case(tokens=0),
    "all on one expert": Case(used=(2,)),
    "empty experts": Case(used=(1, 3)),
    "width 1": Case(width=1, union=4),
    "one expert of everything": Case(experts=1, width=40),
    "more experts than bits": Case(tokens=90, experts=70),
    "biases": Case(bias=True),
    "no gate": Case(gated=False, bias=True, activation="gelu_new"),
    "exact gelu": Case(activation="gelu", hidden=31),
    "relu without gate": Case(gated=False, activation="relu"),
    "an activation of its own": Case(activation="mish"),
    "many tokens": Case(tokens=300),
    "many groups of neurons": Case(tokens=83, experts=8, width=350, union=700, hidden=45),
    "fine": Case(experts=6, width=5, top_k=3),
    "fine, one token": Case(tokens=1, experts=6, width=5, top_k=2),
    "fine, nothing shared": Case(experts=8, width=5, top_k=3),
    "fine, all experts": Case(experts=6, width=5, top_k=6),
    "fine, biases": Case(experts=3, width=11, bias=True, top_k=2),
    "fine, no gate": Case(experts=3, width=8, gated=False, bias=True, activation="gelu_new", top_k=1),
    "fine, 64 experts, many tokens": Case(tokens=300, experts=64, width=3, union=200, top_k=20),
    "fine, 256 experts": Case(tokens=70, experts=256, width=5, union=1300, top_k=90),
    "fine, wide experts": Case(tokens=100, experts=6, width=40, union=260, hidden=96, top_k=2),
    "fine, experts of whole groups": Case(tokens=90, experts=6, width=16, union=120, top_k=2, bias=True),
    "fine, experts of whole groups, no gate": Case(tokens=3, experts=6, width=8, union=48, top_k=2, gated=False),
    "fine, one expert a token, many tokens": Case(tokens=300, experts=9, width=20, union=200, top_k=1),
}
ALL = pytest.mark.parametrize("name", CASES)
EACH_BACKEND = pytest.mark.parametrize("backend", list(BACKENDS["experts"]))


PARTS = {
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "fused": False,
    "flat": False,
    "activation": "act_fn",
}


def make_mlp(case: Case, dtype: torch.dtype = torch.float32) -> ToMoEMLP:
    """Random weights; expert i has neuron i, the rest of each is drawn, and the same at every call."""
    dense = nn.Module()
    dense.act_fn = ACT2FN[case.activation]
    for name in ("gate_proj", "up_proj") if case.gated else ("up_proj",):
        dense.register_module(name, nn.Linear(case.hidden, case.union, bias=case.bias, dtype=dtype))
    dense.down_proj = nn.Linear(case.union, case.hidden, bias=case.bias, dtype=dtype)
    config = SimpleNamespace(
        tomoe_num_experts=case.experts,
        tomoe_expert_form="fine" if case.top_k else "overlapping",
        tomoe_expert_sizes=[case.width],
        tomoe_union_sizes=[case.union],
        tomoe_shared_sizes=[case.shared],
        tomoe_mlp_parts=PARTS | ({} if case.gated else {"gate": None}),
        layer_top_k=lambda layer: case.top_k,
        num_experts_per_tok=case.top_k,
        top_k_key="num_experts_per_tok",
        tomoe_expert_backend="auto",
    )
    mlp = ToMoEMLP(dense, config, 0)
    generator = torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    if case.top_k:
        return mlp.requires_grad_(False)
    members = torch.rand(case.experts, case.union, generator=generator).index_put(
        (torch.arange(case.experts), torch.arange(case.experts) % case.union), torch.tensor(2.0)
    )
    mlp.expert_rows.copy_(members.topk(case.width).indices.sort().values)
    return mlp.requires_grad_(False)


def make_inputs(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(case.tokens, case.hidden, generator=generator).to(dtype)
    used = torch.tensor(case.used or range(case.experts))
    if case.top_k:
        return x, torch.rand(case.tokens, case.experts, generator=generator).topk(case.top_k).indices
    return x, used[torch.randint(len(used), (case.tokens, 1), generator=generator)]


def one_by_one(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Token after token in float64, on its experts' neurons alone; and the sum of the sizes of all that was added."""
    y, sizes = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(x.shape, dtype=torch.float64)
    for t, (token, experts) in enumerate(zip(x.double(), expert_ids.tolist(), strict=True)):
        rows = [*range(mlp.shared_size), *(row for expert in experts for row in mlp.expert_rows[expert].tolist())]

        def project(weight: Tensor, bias: Tensor | None, token: Tensor = token, rows: list[int] = rows) -> Tensor:
            return weight[rows].double() @ token + (0 if bias is None else bias[rows].double())

        up, down = project(mlp.up_proj, mlp.up_bias), mlp.down_proj[rows].double()
        if mlp.gate_proj is None:
            h, size = mlp.activation(up), up.abs()
        else:
            gate = project(mlp.gate_proj, mlp.gate_bias)
            h, size = mlp.activation(gate) * up, (gate * up).abs()
        y[t], sizes[t] = h @ down, size @ down.abs()
    return y, sizes


@functools.cache
def expected_of(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`one_by_one` of a case, computed once for all backends."""
    return one_by_one(make_mlp(CASES[name], dtype), *make_inputs(CASES[name], dtype))


@ALL
@EACH_BACKEND
def test_backends_compute_the_experts(name: str, backend: str) -> None:
    mlp, (x, expert_ids) = make_mlp(CASES[name]), make_inputs(CASES[name])
    expected, _ = expected_of(name, torch.float32)
    y = BACKENDS["experts"][backend].run(mlp, x, expert_ids)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    scale = max(1.0, float(expected.abs().max())) if len(x) else 1.0
    torch.testing.assert_close(y.double(), expected, atol=1e-5 * scale, rtol=0)


def run_reference(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor) -> Tensor:
    """`one_by_one` as a backend; gradients flow through it."""
    return one_by_one(mlp, x, expert_ids)[0].to(x.dtype)


@ALL
@EACH_BACKEND
def test_bfloat16_rounds_no_more_often_than_it_must(name: str, backend: str) -> None:
    """With u the unit roundoff and |act(g)| <= |g|, |act'| <= 1.1: rounding g costs 1.1 u |g v|, act(g), v and their
    product u |g v| each, a partial sum over a block u |g v d|: 5.1 u in all, 6 u with terms of second order."""
    mlp, (x, expert_ids) = make_mlp(CASES[name], torch.bfloat16), make_inputs(CASES[name], torch.bfloat16)
    expected, sizes = expected_of(name, torch.bfloat16)
    y = BACKENDS["experts"][backend].run(mlp, x, expert_ids)
    assert y.dtype == torch.bfloat16
    excess = (y.double() - expected).abs() - 6 * ROUNDOFF * sizes - ROUNDOFF * expected.abs()
    assert not len(x) or excess.max() <= 0


@EACH_BACKEND
@pytest.mark.parametrize("name", ["plain", "odd sizes", "biases", "no gate", "empty experts"])
def test_gradients_are_those_of_the_reference(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.setitem(BACKENDS["experts"], "reference", Backend(run_reference))

    def gradients(backend: str) -> dict[str, Tensor]:
        mlp = make_mlp(case).requires_grad_()
        mlp.config.tomoe_expert_backend = backend
        x = make_inputs(case)[0].requires_grad_()
        (mlp(x) * torch.linspace(-1, 1, x.numel()).view_as(x)).sum().backward()
        return {"x": x.grad} | {name: p.grad for name, p in mlp.named_parameters()}

    expected, y = gradients("reference"), gradients(backend)
    assert all(g.abs().max() > 0 for g in expected.values()), "a gradient that is zero tells nothing"
    for which, gradient in expected.items():
        torch.testing.assert_close(y[which], gradient, atol=1e-4, rtol=1e-4, msg=lambda m, w=which: f"{w}: {m}")


@EACH_BACKEND
def test_any_batch_shape(backend: str) -> None:
    mlp = make_mlp(CASES["biases"])
    mlp.config.tomoe_expert_backend = backend
    x = make_inputs(Case(tokens=24))[0]
    expected = mlp(x)
    for shape in ((2, 12, 32), (24, 1, 32), (2, 3, 4, 32)):
        torch.testing.assert_close(mlp(x.view(shape)), expected.view(shape), atol=1e-5, rtol=0)
    with torch.inference_mode():
        torch.testing.assert_close(mlp(x), expected, atol=1e-5, rtol=0)


def test_masking_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, (x, expert_ids) = make_mlp(Case()), make_inputs(Case())
    monkeypatch.setattr(modeling_tomoe, "MASKED_ELEMENTS", 200)  # five tokens at once
    torch.testing.assert_close(
        BACKENDS["experts"]["masked"].run(mlp, x, expert_ids), run_reference(mlp, x, expert_ids), atol=1e-5, rtol=0
    )


def test_runs_are_the_long_ones_and_the_rest_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_tomoe, "LONG_RUN", 3)
    monkeypatch.setattr(modeling_tomoe, "GATHER_SIZE", 4)
    mlp = make_mlp(Case(experts=2, width=10))
    rows = [[0, 1, 2, 3, 5, 6, 8, 10, 12, 14], [0, 2, 3, 10, 11, 12, 20, 21, 22, 23]]
    mlp.expert_rows.copy_(torch.tensor(rows))
    assert mlp.runs() == [
        [(0, 4, 0), (4, 8, -1), (8, 10, -1)],
        [(0, 3, -1), (3, 6, 10), (6, 10, 20)],
    ]
    x, expert_ids = make_inputs(Case(experts=2))
    expected, _ = one_by_one(mlp, x, expert_ids)
    torch.testing.assert_close(
        BACKENDS["experts"]["runs"].run(mlp, x, expert_ids).double(), expected, atol=1e-5, rtol=0
    )


@EACH_BACKEND
def test_what_is_kept_follows_the_weights(backend: str) -> None:
    """Cached structures are rebuilt after a load, a change in place, a move, and are not shared with a copy."""
    first, (x, expert_ids) = make_mlp(CASES["plain"]), make_inputs(CASES["plain"])
    run = BACKENDS["experts"][backend].run
    before = run(first, x, expert_ids)
    other = make_mlp(CASES["plain"])
    other.expert_rows.copy_((other.expert_rows + 7) % 40).copy_(other.expert_rows.sort().values)
    for parameter in other.parameters():
        parameter.data.mul_(-1.5)
    expected = run_reference(other, x, expert_ids)
    assert (before - expected).abs().max() > 0.1

    twin = copy.deepcopy(first)
    twin.load_state_dict(other.state_dict())
    torch.testing.assert_close(run(twin, x, expert_ids), expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    torch.testing.assert_close(run(first, x, expert_ids), before)
    assert set(twin.state_dict()) == set(first.state_dict()) == set(other.state_dict())

    double = run(first.double(), x.double(), expert_ids)
    torch.testing.assert_close(double.float(), before, atol=1e-5, rtol=0)
    assert double.dtype == torch.float64
    with torch.no_grad():
        first.up_proj.mul_(2)  # as an optimizer changes it
    changed = run(first, x.double(), expert_ids)
    torch.testing.assert_close(changed, run_reference(first, x.double(), expert_ids), atol=1e-9, rtol=0)
    assert (changed - double).abs().max() > 0.1


@pytest.mark.slow
def test_every_size_of_a_few_tokens_has_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = make_mlp(CASES["fine, experts of whole groups"])
    monkeypatch.setattr(gpu.torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    gpu.compiled.cache_clear()
    weights = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.gate_bias, mlp.up_bias
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens_, top_k in itertools.product((1, 3), (2, 6)):
            x, ids = torch.randn(tokens_, 32), torch.rand(tokens_, 6).topk(top_k).indices
            y = gpu.compiled(tokens_, top_k)(x, ids, weights, mlp.shared_size, 6, gpu.ACTIVATIONS[0])
            torch.testing.assert_close(y, gpu.run_few(mlp, x, ids))
    gpu.compiled.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["few", "grouped", "masked"])
def test_experts_for_a_gpu_do_not_break_a_graph(backend: str) -> None:
    case = CASES["fine, wide experts"]
    mlp, (x, expert_ids) = make_mlp(case, torch.bfloat16), make_inputs(case)
    run = torch.compile(BACKENDS["experts"][backend].run, backend="eager", fullgraph=True)
    with torch.no_grad():
        y = BACKENDS["experts"]["masked"].run(mlp, x.bfloat16(), expert_ids)
        torch.testing.assert_close(run(mlp, x.bfloat16(), expert_ids), y, atol=0.02 * float(y.abs().max()), rtol=0)
