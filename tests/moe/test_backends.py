"""Which backend `auto` takes: a table of every form, dtype and number of tokens, with and without kernel and gradients."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from test_experts import CASES, Case, make_inputs, make_mlp, one_by_one

from tomoe.moe import modeling_tomoe
from tomoe.moe.kernels import gpu, native
from tomoe.moe.modeling_tomoe import BACKENDS, Backend, choose, choose_backend, sum_rows

FORMS = {"overlapping": Case(), "fine": CASES["fine"]}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# one, few, many
TOKENS = (1, 8, 4096)


@pytest.fixture(params=["kernel", "no kernel", "no tomoe"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What there is to run experts by; whether this machine has a compiler makes no difference."""
    monkeypatch.setattr(native, "PROCESSOR", {})
    monkeypatch.setattr(native, "kernel", (lambda: "one") if request.param == "kernel" else lambda: None)
    if request.param == "no tomoe":
        monkeypatch.setitem(BACKENDS, "experts", {name: BACKENDS["experts"][name] for name in ("runs", "masked")})
    return request.param


@pytest.mark.parametrize("learns", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("form", FORMS)
def test_the_backend_of_every_form_dtype_and_number_of_tokens(form: str, learns: bool, kernel: str) -> None:
    for dtype, tokens in itertools.product(DTYPES, TOKENS):
        mlp = make_mlp(FORMS[form], dtype).requires_grad_(learns)
        expected = "masked"
        if kernel == "kernel" and dtype in (torch.float32, torch.bfloat16) and not learns:
            expected = "native"
        elif form == "overlapping" and tokens != 8:
            # one wide expert after another: its part of the neurons, and no others
            expected = "runs"
        assert choose_backend(mlp, torch.empty(tokens, 32, dtype=dtype)) == expected, (dtype, tokens)


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_compute_on_the_processor_is_not_asked_to_wait(form: str, kernel: str) -> None:
    """Which experts got tokens is known on the device alone: one token goes without, and so do thin experts."""
    mlp = make_mlp(FORMS[form], torch.bfloat16).to("meta")
    backends = [choose_backend(mlp, torch.empty(n, 32, dtype=torch.bfloat16, device="meta")) for n in TOKENS]
    assert backends == ["masked", "masked", "runs" if form == "overlapping" else "masked"]


def test_a_graph_has_no_runs(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for case, tokens in itertools.product(FORMS.values(), TOKENS):
        assert choose_backend(make_mlp(case), torch.empty(tokens, 32)) != "runs"


@dataclass(frozen=True)
class OnGpu:
    """What a choice asks of tokens on CUDA."""

    tokens: int
    dtype: torch.dtype = torch.bfloat16
    is_cuda: bool = True
    requires_grad: bool = False
    device = SimpleNamespace(type="cuda")

    def __len__(self) -> int:
        return self.tokens


def test_fine_experts_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(name: str, *counts: int) -> list[str]:
        return [choose_backend(make_mlp(CASES[name], torch.bfloat16), OnGpu(count)) for count in counts]

    assert taken("fine, 256 experts", 1, 2, 4096) == ["few", "masked", "masked"]
    monkeypatch.setattr(gpu, "MOST_FOR_FEW", 0.1)
    assert taken("fine, 256 experts", 1) == ["masked"]
    monkeypatch.setattr(gpu, "WIDE", 40)
    monkeypatch.setattr(gpu, "MANY_PRODUCTS", 384 * 260 * 96)
    # these choose two of six experts, which reads x too often
    assert taken("fine, wide experts", 384) == ["masked"]
    monkeypatch.setattr(gpu, "MOST_FOR_GROUPED", 1 / 3)
    assert taken("fine, wide experts", 383, 384) == ["masked", "grouped"]
    assert taken("plain", 1, 192) == ["masked", "masked"]


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is noted, as in a process that has noted nothing yet."""
    monkeypatch.setattr(modeling_tomoe, "NOTED", set())
    return caplog


def test_a_note_once_says_what_is_missing(
    kernel: str, monkeypatch: pytest.MonkeyPatch, notes: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "why_missing", lambda source: "no C++ compiler; install one")
    for _ in range(2):
        choose_backend(make_mlp(CASES["fine"]), torch.empty(1, 32))
    expected = {"kernel": [], "no kernel": ["no C++ compiler; install one"], "no tomoe": [modeling_tomoe.NO_KERNELS]}
    assert [note.partition("kernel: ")[2] for note in notes.messages] == expected[kernel]


def test_a_dtype_that_the_kernel_does_not_compute_is_noted(
    monkeypatch: pytest.MonkeyPatch, notes: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "kernel", lambda: "one")
    mlp = make_mlp(CASES["fine"], torch.float16)
    choose_backend(mlp, torch.empty(1, 32, dtype=torch.float16))
    assert "this model in float16; load it with dtype=torch.bfloat16" in notes.messages[0]
    mlp.requires_grad_()
    choose_backend(mlp, torch.empty(1, 32, dtype=torch.float64))  # who trains is told nothing
    assert len(notes.messages) == 1


def test_a_registered_backend_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "experts", {"masked": BACKENDS["experts"]["masked"]})
    taken: list[int] = []
    special = Backend(lambda mlp, x, ids: taken.append(len(x)) or x, lambda mlp, x: len(x) < 9)
    modeling_tomoe.register("experts", special=special)
    mlp = make_mlp(Case())
    assert [choose_backend(mlp, torch.empty(n, 32)) for n in (8, 9)] == ["special", "masked"]
    mlp(torch.zeros(8, 32))
    assert taken == [8]
    mlp.config.tomoe_expert_backend = "native"
    with pytest.raises(ValueError, match="no expert backend 'native' here; take auto, special, masked"):
        mlp(torch.zeros(8, 32))


def test_every_step_ends_in_a_backend_that_supports_everything() -> None:
    for step, backends in BACKENDS.items():
        assert list(backends.values())[-1].supports is modeling_tomoe.always, step
    assert choose("largest logits", torch.zeros(2, 3, dtype=torch.float64), 1) == "pytorch"


@pytest.mark.parametrize("backend", ["masked", "runs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "wide", "one token", "no token", "fine", "fine, one token"])
def test_16_bits_on_a_processor_without_such_products(
    name: str, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are added up, or multiplied in float32; neither rounds more than PyTorch's own product."""
    monkeypatch.setattr(modeling_tomoe, "multiplies", lambda dtype: False)
    monkeypatch.setattr(modeling_tomoe, "GATHER_SIZE", 16)
    mlp, (x, expert_ids) = make_mlp(CASES[name], dtype), make_inputs(CASES[name], dtype)
    expected, sizes = one_by_one(mlp, x, expert_ids)
    y = BACKENDS["experts"][backend].run(mlp, x, expert_ids)
    assert y.dtype == dtype
    excess = (y.double() - expected).abs() - torch.finfo(dtype).eps * (3 * sizes + expected.abs())
    assert not len(x) or excess.max() <= 0


def test_gradients_flow_where_rows_would_be_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_tomoe, "multiplies", lambda dtype: False)
    h, rows = torch.ones(1, 3, dtype=torch.bfloat16, requires_grad=True), torch.ones(3, 2, dtype=torch.bfloat16)
    sum_rows(h, rows).sum().backward()
    assert h.grad.tolist() == [[2, 2, 2]]
