"""Experts on the CPU in one pass over the shared rows: each row that some token needs is read once per batch."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tomoe.moe.kernels.build import INT32, INT64, POINTER, function, load_library, why_missing
from tomoe.moe.modeling_tomoe import ToMoEMLP, keep, learns, run_masked

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("experts.cpp")
DTYPES = (torch.float32, torch.bfloat16)
MAX_OVERLAPPING = 64  # membership of a neuron in experts that overlap is the bits of one number
PROCESSOR = torch.cpu.get_capabilities()
# On a processor with matrix units for bfloat16 (AMX), experts are faster in products of tiles from this many tokens on.
MATRIX_TOKENS = 8
MATRIX_DIMS = 32  # the kernel takes this many dims at once to such a product
# In the order of the kernel's own list.
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (F.silu, F.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh"))


class Algorithm(IntEnum):
    """How the kernel runs experts: row by row, or in matrix products of tiles (bfloat16)."""

    ROWS = 0
    MATRIX = 1


# Tokens whose activations are kept at once, by whether experts are fine-grained, and by the algorithm.
AT_ONCE = {
    False: dict.fromkeys(Algorithm, 256 if PROCESSOR.get("avx512_f") else 128),
    True: {Algorithm.ROWS: 1024, Algorithm.MATRIX: 512},
}


def membership(expert_rows: Int[Tensor, "N W"], union: int, fine: bool) -> Int[Tensor, " U"]:
    """Encode the experts of each neuron: for overlapping experts bit e means expert e; for fine-grained ones 1 + its expert, or 0
    if all tokens use it."""
    members = torch.zeros(union, dtype=torch.long)
    if fine:
        members[expert_rows.long()] = 1 + torch.arange(len(expert_rows))[:, None]
        return members
    for expert, neurons in enumerate(expert_rows.long()):
        members[neurons] |= 1 << expert if expert < 63 else -(1 << 63)
    return members


# What torch.compile traces has no shapes in its signature (x is [T, D]): checking them would break the graph.
def supports(mlp: ToMoEMLP, x: Tensor) -> bool:
    """Whether `auto` takes native: wherever it can run and is not slower than the dense MLP."""
    # A processor beside another device has no say in what that one runs.
    if x.device.type != "cpu" or not len(x):
        return False
    return fastest_algorithm(len(x), x.shape[1], x.dtype) is not None and fits(mlp, x)


def fastest_algorithm(tokens: int, size: int, dtype: torch.dtype) -> Algorithm | None:
    """Return the algorithm that was fastest on this kind of processor; None if the dense MLP was."""
    if dtype != torch.bfloat16 or not PROCESSOR.get("amx_bf16") or tokens < MATRIX_TOKENS:
        return Algorithm.ROWS
    # PyTorch multiplies matrices by the units, too, so row after row is slower than all neurons.
    return Algorithm.MATRIX if size % MATRIX_DIMS == 0 and has_matrix_units() else None


def fits(mlp: ToMoEMLP, x: Tensor) -> bool:
    """Whether the kernel can run this: CPU, float32 or bfloat16, no gradients, a known activation, a C++ compiler."""
    if x.device.type != "cpu" or x.dtype not in DTYPES:
        return False
    if mlp.up_proj.dtype != x.dtype or (not mlp.fine and mlp.num_experts > MAX_OVERLAPPING):
        return False
    return not learns(x, mlp.parameters()) and working_kind(mlp) is not None


def obstacle(mlp: ToMoEMLP, x: Tensor) -> str | None:
    """Say what a user could change so that the kernel runs this on a CPU; None if nothing."""
    if learns(x, mlp.parameters()) or not len(x):
        return None
    return obstacle_of(SOURCE, kernel() is not None, x, mlp.up_proj)


def obstacle_of(source: Path, works: bool, x: Tensor, weight: Tensor) -> str | None:
    """Say what keeps a compiled kernel, working or not, from this input and weight; None if nothing does."""
    if not works:
        return why_missing(source) or "on this machine the kernel computes something else than PyTorch"
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        found = " and ".join(sorted({str(t.dtype).removeprefix("torch.") for t in (x, weight)}))
        return f"it computes in bfloat16 and float32, and this model in {found}; load it with dtype=torch.bfloat16"
    return None


# Evaluated once while compiling, because what it does would break the graph.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def working_kind(mlp: ToMoEMLP) -> int | None:
    """Return the number of the MLP's activation; None if the kernel does not support it or did not compile."""
    return None if kernel() is None else activation_kind(mlp)


def activation_kind(mlp: ToMoEMLP) -> int | None:
    """Return which of ACTIVATIONS the MLP uses, judged by its outputs; None for another one, or with parameters."""
    return keep(mlp._cache, "activation", mlp.activation, lambda: _recognized(mlp.activation))


def _recognized(activation: Callable[[Tensor], Tensor]) -> int | None:
    if isinstance(activation, nn.Module) and next(activation.parameters(), None) is not None:
        return None
    probe = torch.linspace(-8, 8, 257)
    values = activation(probe)
    return next((i for i, act in enumerate(ACTIVATIONS) if torch.allclose(values, act(probe), atol=2e-6)), None)


def run_native(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor, algorithm: Algorithm | None = None) -> Tensor:
    """Run all experts in one kernel call, with the fastest algorithm if none is given; `masked` if unsupported."""
    kind = working_kind(mlp) if len(x) and fits(mlp, x) else None
    if kind is None:
        return run_masked(mlp, x, expert_ids)
    if algorithm is None:
        algorithm = fastest_algorithm(len(x), x.shape[1], x.dtype) or Algorithm.ROWS
    weights = (mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.gate_bias, mlp.up_bias)
    run: Callable[..., Tensor] = experts if torch.compiler.is_compiling() else run_experts
    return run(x, expert_ids, mlp.expert_rows, *weights, kind, mlp.fine, algorithm)


def run_experts(
    x: Float[Tensor, "T D"],
    expert_ids: Int[Tensor, "T k"],
    expert_rows: Int[Tensor, "N W"],
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    kind: int,
    fine: bool,
    algorithm: int,
) -> Float[Tensor, "T D"]:
    """Run the kernel on chunks of the tokens. Raises RuntimeError if it could not be compiled."""
    run = kernel()
    if run is None:
        raise RuntimeError(
            "the native kernel is missing (no C++ compiler, or TOMOE_NATIVE=0); run torch.compile on the model again"
        )
    x, expert_ids = x.contiguous(), expert_ids.contiguous()
    rest = (_members_of(expert_rows, len(up), fine), (gate, up, down, gate_bias, up_bias), kind, fine, algorithm)
    most = AT_ONCE[fine][Algorithm(algorithm)]
    if len(x) <= most:
        return run(x, expert_ids, *rest)
    y = torch.empty_like(x)
    # Where experts overlap, sorted tokens go to one or two of them, and need their neurons only.
    order = torch.arange(len(x)) if fine else expert_ids[:, 0].argsort(stable=True)
    for some in order.split(most):
        y[some] = run(x[some], expert_ids[some], *rest)
    return y


SCHEMA = (
    "(Tensor x, Tensor expert_ids, Tensor expert_rows, Tensor? gate, Tensor up, Tensor down, "
    "Tensor? gate_bias, Tensor? up_bias, int kind, bool fine, int algorithm) -> Tensor"
)
# The kernel as a PyTorch operator, for graphs.
experts = torch.library.custom_op("tomoe::experts", run_experts, mutates_args=(), schema=SCHEMA)


@experts.register_fake
def _like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_members = WeakTensorKeyDictionary()


def _members_of(expert_rows: Int[Tensor, "N W"], union: int, fine: bool) -> Int[Tensor, " U"]:
    """Return the encoded membership of each neuron, cached until the tensor changes."""
    kept = _members.setdefault(expert_rows, {})
    return cast(Tensor, keep(kept, f"{union} {fine}", expert_rows, lambda: membership(expert_rows, union, fine)))


Kernel = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor | None], int, bool, int], Tensor]


@cache
def kernel() -> Kernel | None:
    """The compiled function; None if it does not compile or disagrees with PyTorch on this machine."""
    library = load_library(SOURCE)
    if library is None:
        return None
    run = _typed(library)
    algorithms = [(dtype, Algorithm.ROWS) for dtype in DTYPES]
    if _tiles() == MATRIX_UNITS:
        algorithms.append((torch.bfloat16, Algorithm.MATRIX))
    if not all(_agrees_with_pytorch(run, dtype, fine, how) for dtype, how in algorithms for fine in (False, True)):
        log.warning("the native kernel computes something else than PyTorch on this machine; it is not used")
        return None
    return run


MATRIX_UNITS = 2  # what the compiled `tomoe_tiles` returns where matrix units multiply tiles


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_matrix_units() -> bool:
    """Whether the kernel multiplies tiles by the processor's matrix units, with correct results."""
    return kernel() is not None and _tiles() == MATRIX_UNITS


@cache
def _tiles() -> int:
    library = load_library(SOURCE)
    return 0 if library is None else int(library.tomoe_tiles())


def _typed(library: ctypes.CDLL) -> Kernel:
    arguments = [*[INT32] * 3, *[POINTER] * 2, *[INT64] * 4, *[POINTER] * 6, INT32, POINTER, INT32]
    compiled = function(library, "tomoe_experts", arguments, "the activations of the experts")

    def run(
        x: Tensor,
        expert_ids: Tensor,
        members: Tensor,
        weights: Sequence[Tensor | None],
        kind: int,
        fine: bool,
        algorithm: int,
    ) -> Tensor:
        y = torch.empty_like(x)
        compiled(
            x.dtype == torch.bfloat16,
            fine,
            algorithm,
            x.data_ptr(),
            expert_ids.data_ptr(),
            expert_ids.shape[1],
            *x.shape,
            len(members),
            members.data_ptr(),
            *(None if w is None else w.data_ptr() for w in weights),
            kind,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    return run


def trial(rows: int, size: int, seed: int) -> Float[Tensor, "rows size"]:
    """Return deterministic numbers to test a kernel with."""
    return torch.linspace(-1, 1, rows * size).mul(seed).sin().view(rows, size)


def _agrees_with_pytorch(run: Kernel, dtype: torch.dtype, fine: bool, algorithm: Algorithm) -> bool:
    """Compare the compiled kernel with PyTorch: 37 tokens of 70 or 96 dims, 40 neurons in three experts."""
    tokens, size, union = 37, 70 if algorithm == Algorithm.ROWS else 96, 40
    x, gate, up, down = (
        trial(rows, size, seed).to(dtype) for rows, seed in ((tokens, 977), (union, 1009), (union, 1511), (union, 2003))
    )
    expert_ids, neurons = torch.arange(tokens) % 3, torch.arange(union)
    masks = torch.stack([neurons % 4 == 1 + e if fine else (neurons >> e & 1).bool() for e in range(3)])
    members = membership(torch.stack([mask.nonzero().squeeze(1) for mask in masks]), union, fine)
    y = run(x, expert_ids[:, None], members, (gate, up, down, None, None), 0, fine, algorithm)
    used = masks[expert_ids] | (neurons % 4 == 0) if fine else masks[expert_ids]
    h = F.silu(x.float() @ gate.float().t()) * (x.float() @ up.float().t()) * used
    expected = h @ down.float()
    return bool((y - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * expected.abs().max())
