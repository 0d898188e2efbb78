"""The compiled kernel: where it comes from, where it steps aside. What it computes is tested with all backends."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import test_experts
import torch
from test_experts import CASES, Case, make_inputs, make_mlp, one_by_one, run_reference
from torch import Tensor, nn
from torch.fx import GraphModule

from tomoe.moe.kernels import build, native
from tomoe.moe.kernels.native import Algorithm
from tomoe.moe.modeling_tomoe import BACKENDS, choose_backend

pytestmark = pytest.mark.slow

PRODUCT = 'extern "C" int product(int a, int b) { return a * b; }\n'
compiled = pytest.mark.skipif(
    build.load_library(native.SOURCE) is None, reason="this machine has no C++ compiler with OpenMP"
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOMOE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "product.cpp"
    path.write_text(PRODUCT)
    return path


def load_anew(source: Path) -> object:
    return build.load_library.__wrapped__(source)


def libraries(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "kernels").iterdir())


@compiled
def test_compiled_once_and_kept(source: Path) -> None:
    assert load_anew(source).product(6, 7) == 42
    (library,) = libraries(source)
    before = library.stat().st_mtime_ns
    assert load_anew(source).product(6, 7) == 42
    assert [(p, p.stat().st_mtime_ns) for p in libraries(source)] == [(library, before)]


@compiled
def test_another_source_or_processor_is_another_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_anew(source)
    source.write_text(PRODUCT.replace("a * b", "a + b"))
    assert load_anew(source).product(6, 7) == 13
    monkeypatch.setattr(build, "_processor", lambda: b"another")
    load_anew(source)
    assert len(libraries(source)) == 3


def test_no_compiler_no_kernel(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_anew(source) is None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(source.parent))
    assert load_anew(source) is None


@compiled
@pytest.mark.parametrize("words", ["env {}", "{} -O2", "  {}  "])
def test_cxx_may_be_a_command_of_several_words(source: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """As make, CMake and PyTorch take it: `ccache g++`."""
    monkeypatch.setenv("CXX", words.format(next(filter(None, map(shutil.which, build.COMPILERS)))))
    assert load_anew(source).product(6, 7) == 42


@pytest.mark.parametrize(
    ("cxx", "said"),
    [
        ("no-such-compiler -O2", "CXX names, no-such-compiler, is not there"),
        ("g++ '-O2", 'CXX is "g++ \'-O2", which no shell reads'),
    ],
)
def test_what_is_wrong_with_cxx_is_said(source: Path, monkeypatch: pytest.MonkeyPatch, cxx: str, said: str) -> None:
    monkeypatch.setenv("CXX", cxx)
    assert load_anew(source) is None
    assert said in build._reasons[source]


@compiled
def test_a_library_that_was_cut_off_is_not_called_uncompiled(source: Path) -> None:
    library = build._compiled(source)
    library.write_bytes(b"")
    assert load_anew(source) is None
    assert "it was compiled, but cannot be loaded" in build._reasons[source]
    assert f"delete {library}" in build._reasons[source]


@compiled
def test_what_cannot_be_compiled_or_kept_is_no_error(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_text("this is no C++")
    assert load_anew(source) is None
    assert libraries(source) == []
    source.write_text(PRODUCT)
    monkeypatch.setenv("TOMOE_CACHE", str(source))  # a file, not a folder
    assert load_anew(source) is None


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of files here")
@compiled
def test_a_library_that_others_can_write_is_not_loaded(source: Path) -> None:
    load_anew(source)
    libraries(source)[0].chmod(0o666)
    assert load_anew(source) is None


def test_it_can_be_switched_off(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOMOE_NATIVE", "0")
    assert load_anew(source) is None
    assert not (source.parent / "cache").exists()


def test_a_kernel_that_compiles_here_is_right_and_used() -> None:
    assert (native.kernel() is None) == (build.load_library(native.SOURCE) is None)


@compiled
def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = native._typed
    monkeypatch.setattr(native, "_typed", lambda library: lambda x, *rest: typed(library)(x, *rest) * 1.1)
    assert native.kernel.__wrapped__() is None


@compiled
def test_auto_takes_it_wherever_it_fits() -> None:
    """By dtype, number of tokens and gradients: `test_backends`."""

    def chosen(name: str, tokens: int = 8, dtype: torch.dtype = torch.float32) -> str:
        return choose_backend(make_mlp(CASES[name]), torch.zeros(tokens, 32, dtype=dtype))

    assert chosen("plain") == chosen("fine, 256 experts") == "native"
    assert "native" not in (chosen("plain", 0), chosen("plain", 8, torch.bfloat16), chosen("plain", 8, torch.float64))
    assert chosen("more experts than bits") == chosen("an activation of its own") == "masked"


def test_another_device_does_not_ask_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same choice beside any processor, with matrix units or without."""
    fine, x = (
        make_mlp(CASES["fine"], torch.bfloat16).to("meta"),
        torch.empty(8, 32, dtype=torch.bfloat16, device="meta"),
    )
    for amx in (False, True):
        monkeypatch.setattr(native, "PROCESSOR", {"amx_bf16": amx})
        assert not native.supports(fine, x)


@cache
def library_with(*flags: str) -> ctypes.CDLL:
    """The kernel as other processors run it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
        return build.load_library.__wrapped__(native.SOURCE)


@compiled
@pytest.mark.parametrize("name", CASES)
def test_registers_of_the_other_width_compute_the_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors with AVX-512 hold more sums in registers than others: here runs what the others, or they, run."""
    wide = bool(native.PROCESSOR.get("avx512_f"))
    other = native._typed(library_with(f"-DWIDE_REGISTERS={int(not wide)}"))
    monkeypatch.setattr(native, "kernel", lambda: other)
    monkeypatch.setattr(native, "fastest_algorithm", lambda *_: Algorithm.ROWS)
    test_experts.test_backends_compute_the_experts(name, "native")
    test_experts.test_bfloat16_rounds_no_more_often_than_it_must(name, "native")


@compiled
def test_a_compiler_that_is_told_of_no_processor_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that only some processors have is needed: so it builds on ARM, too."""
    monkeypatch.setattr(build, "FLAGS", tuple(flag for flag in build.FLAGS if not flag.startswith("-march")))
    run = native._typed(build.load_library.__wrapped__(native.SOURCE))
    for dtype, how in (
        (torch.float32, Algorithm.ROWS),
        (torch.bfloat16, Algorithm.ROWS),
        (torch.bfloat16, Algorithm.MATRIX),
    ):
        assert all(native._agrees_with_pytorch(run, dtype, fine, how) for fine in (False, True))


# Products of tiles by the units of this processor, if it has them, and in plain C++ as processors with AVX-512 and others run it.
TILES = ((), ("-DPORTABLE_TILES",), ("-DPORTABLE_TILES", "-DWIDE_REGISTERS=0"))


@pytest.fixture(params=TILES, ids=["processor", "plain", "plain, narrow"])
def in_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that fits goes to products of tiles."""
    kernel = native._typed(library_with(*request.param))
    monkeypatch.setattr(native, "kernel", lambda: kernel)

    def algorithm(tokens: int, size: int, dtype: torch.dtype) -> Algorithm:
        return Algorithm.MATRIX if dtype == torch.bfloat16 and size % native.MATRIX_DIMS == 0 else Algorithm.ROWS

    monkeypatch.setattr(native, "fastest_algorithm", algorithm)


@compiled
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.hidden % native.MATRIX_DIMS == 0])
def test_products_of_tiles_compute_the_experts(name: str, in_tiles: None) -> None:
    test_experts.test_bfloat16_rounds_no_more_often_than_it_must(name, "native")


@compiled
def test_tiles_of_any_number_of_threads_or_chunks_give_the_same(
    in_tiles: None, monkeypatch: pytest.MonkeyPatch, set_threads: Callable[[int], None]
) -> None:
    case = CASES["fine, wide experts"]
    mlp, (x, expert_ids) = make_mlp(case, torch.bfloat16), make_inputs(case, torch.bfloat16)
    expected = native.run_native(mlp, x, expert_ids)
    for threads in (2, 3, 1):
        set_threads(threads)
        assert torch.equal(native.run_native(mlp, x, expert_ids), expected)
    monkeypatch.setattr(native, "AT_ONCE", dict.fromkeys((False, True), dict.fromkeys(Algorithm, 41)))
    found = native.run_native(mlp, x, expert_ids)
    torch.testing.assert_close(found, expected, atol=2.0**-7 * float(expected.abs().max()), rtol=0)


@compiled
def test_in_tiles_numbers_that_are_none_stay_none(in_tiles: None) -> None:
    """One token has them, and a neuron that another one does not use."""
    case = CASES["fine, wide experts"]
    mlp, (x, expert_ids) = make_mlp(case, torch.bfloat16), make_inputs(case, torch.bfloat16)
    x[3, 5] = torch.nan
    found = native.run_native(mlp, x, expert_ids)
    assert found.isnan().any(1).nonzero().tolist() == [[3]]
    assert found[3].isnan().all()


CAPABILITIES = {
    "amx": {"avx512_f": True, "avx512_bf16": True, "amx_bf16": True},
    "avx512_bf16": {"avx512_f": True, "avx512_bf16": True},
    "avx2": {},
}


def measured() -> list[list[str]]:
    lines = Path(__file__).with_name("measured_algorithms.txt").read_text().splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("processor", CAPABILITIES)
def test_auto_takes_what_was_the_fastest_where_it_was_measured(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows, products of tiles, and all neurons in PyTorch, which take as long as dense: within 5 %, as noise allows."""
    monkeypatch.setattr(native, "PROCESSOR", CAPABILITIES[processor])
    monkeypatch.setattr(native, "kernel", lambda: native.run_native)
    monkeypatch.setattr(native, "has_matrix_units", lambda: True)
    cells = [cell for cell in measured() if cell[0] == processor]
    assert cells
    for _, name, form, shape, _, _, tokens, *ratios in cells:
        dtype, hidden = getattr(torch, name), int(shape.split("x")[0])
        mlp = make_mlp(replace(CASES["fine"] if form == "fine" else Case(), hidden=hidden), dtype)
        taken = choose_backend(mlp, torch.empty(int(tokens), hidden, dtype=dtype))
        algorithm = native.fastest_algorithm(int(tokens), hidden, dtype)
        found = float(ratios[algorithm]) if taken == "native" and algorithm is not None else 1.0
        best = max(1.0, *(float(ratio) for ratio in ratios if ratio != "-"))
        assert found >= 0.95 * best, (form, shape, name, tokens)


@compiled
def test_a_processor_whose_units_the_compiler_does_not_know_runs_all_neurons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "PROCESSOR", {"amx_bf16": True})
    mlp = make_mlp(CASES["fine"], torch.bfloat16)
    for units in (True, False):
        monkeypatch.setattr(native, "has_matrix_units", lambda units=units: units)
        chosen = [choose_backend(mlp, torch.zeros(n, 32, dtype=torch.bfloat16)) for n in (1, 300)]
        assert chosen == ["native", "native" if units else "masked"]


@compiled
@pytest.mark.parametrize("name", ["plain", "no gate", "one token", "an activation of its own"])
def test_a_graph_holds_it_as_one_operator(name: str) -> None:
    """Compiled without a break it gives the same bytes; where it does not fit, the graph masks."""
    mlp, (x, _) = make_mlp(CASES[name], torch.bfloat16), make_inputs(CASES[name], torch.bfloat16)
    mlp.router.float()
    called: list[str] = []

    def note(graph: GraphModule, _: list[Tensor]) -> GraphModule:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    with torch.no_grad():
        compiled_mlp = torch.compile(mlp, fullgraph=True, backend=note)
        torch.testing.assert_close(compiled_mlp(x), mlp(x), rtol=0, atol=0)
        assert ("tomoe.experts.default" in called) == (name != "an activation of its own")
        # Other experts in place: the graph keeps no neurons of its own.
        mlp.expert_rows.copy_(39 - mlp.expert_rows.flip(1))
        torch.testing.assert_close(compiled_mlp(x), mlp(x), rtol=0, atol=0)


@compiled
def test_the_operator_is_one_that_pytorch_can_trust() -> None:
    for case in (Case(), CASES["fine, no gate"]):
        mlp, (x, expert_ids) = make_mlp(case), make_inputs(case)
        weights = (mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.gate_bias, mlp.up_bias)
        kind = native.activation_kind(mlp)
        torch.library.opcheck(
            native.experts, (x, expert_ids, mlp.expert_rows, *weights, kind, mlp.fine, Algorithm.ROWS)
        )


def test_activations_are_known_by_what_they_compute() -> None:
    known = {"silu": 0, "relu": 1, "gelu": 2, "gelu_new": 3, "gelu_pytorch_tanh": 3, "quick_gelu": None, "relu2": None}
    for activation, kind in known.items():
        assert native.activation_kind(make_mlp(Case(activation=activation))) == kind, activation


def test_a_learned_activation_is_another_one() -> None:
    mlp = make_mlp(Case())
    mlp.activation = nn.PReLU(init=0.0)  # a relu today
    assert native.activation_kind(mlp) is None


@compiled
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu", "gelu_new"])
def test_activations_far_out(activation: str) -> None:
    """Where exponentials overflow and where they vanish."""
    mlp = make_mlp(Case(gated=False, activation=activation, hidden=16))
    mlp.up_proj.zero_()[:, 0] = torch.linspace(-300, 300, 40)
    x = torch.zeros(37, 16)
    x[:, 0] = 1.0
    expert_ids = torch.arange(37)[:, None] % 4
    meant, _ = one_by_one(mlp, x, expert_ids)
    found = native.run_native(mlp, x, expert_ids)
    torch.testing.assert_close(found.double(), meant, rtol=1e-5, atol=1e-5 * float(meant.abs().max()))


@compiled
def test_numbers_that_are_none_stay_none() -> None:
    for dtype in native.DTYPES:
        mlp, (x, expert_ids) = make_mlp(Case(), dtype), make_inputs(Case(), dtype)
        x[3, 5] = torch.nan
        found = native.run_native(mlp, x, expert_ids)
        assert found[3].isnan().all()
        assert not found[[0, 1, 2, *range(4, 37)]].isnan().any()


@compiled
def test_any_number_of_threads_gives_the_same_bytes(set_threads: Callable[[int], None]) -> None:
    mlp, (x, expert_ids) = make_mlp(CASES["wide"]), make_inputs(CASES["wide"])
    found = []
    for threads in (1, 2, 3):
        set_threads(threads)
        found.append(native.run_native(mlp, x, expert_ids))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], run_reference(mlp, x, expert_ids), atol=1e-4, rtol=1e-5)


@compiled
@pytest.mark.parametrize("name", CASES)
def test_tokens_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of overlapping experts are sorted first; each gets what is its own."""
    monkeypatch.setattr(native, "AT_ONCE", dict.fromkeys((False, True), dict.fromkeys(Algorithm, 7)))
    test_experts.test_backends_compute_the_experts(name, "native")
    test_experts.test_bfloat16_rounds_no_more_often_than_it_must(name, "native")


@compiled
def test_inputs_need_not_be_contiguous() -> None:
    mlp, (x, expert_ids) = make_mlp(Case()), make_inputs(Case())
    strided = torch.stack([x, x], -1)[..., 0]
    ids = torch.stack([expert_ids, expert_ids], -1)[..., 0]
    assert not strided.is_contiguous()
    found, expected = native.run_native(mlp, strided, ids), native.run_native(mlp, x, expert_ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["plain", "fine"])
@pytest.mark.parametrize("backend", ["native", "runs"])
def test_neurons_of_experts_that_were_written_in_any_way_are_followed(name: str, backend: str) -> None:
    """A version counter does not count what is written through `.data`, as averages of weights are."""
    case = CASES[name]
    mlp, (x, ids) = make_mlp(case), make_inputs(case)
    run = BACKENDS["experts"][backend].run
    run(mlp, x, ids)
    mlp.expert_neurons.data.copy_(mlp.expert_neurons.flip(0).clone())
    meant = BACKENDS["experts"]["masked"].run(mlp, x, (ids if not mlp.fine else mlp.num_experts - 1 - ids))
    if not mlp.fine:
        meant = one_by_one(mlp, x, ids)[0].to(x.dtype)
    torch.testing.assert_close(run(mlp, x, ids), meant, rtol=1e-4, atol=1e-5)


def test_an_activation_that_was_replaced_is_another_one() -> None:
    mlp, (x, ids) = make_mlp(CASES["plain"]), make_inputs(CASES["plain"])
    native.run_native(mlp, x, ids)
    mlp.activation = nn.ReLU()
    torch.testing.assert_close(
        native.run_native(mlp, x, ids), BACKENDS["experts"]["masked"].run(mlp, x, ids), rtol=1e-4, atol=1e-5
    )
