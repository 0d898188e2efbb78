"""Experts on the CPU in one pass over the shared rows: each row that some token needs is read once for the whole batch."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tomoe.moe.kernels.build import load
from tomoe.moe.modeling_tomoe import ToMoEMLP, run_masked

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("experts.cpp")
DTYPES = (torch.float32, torch.bfloat16)
MAX_EXPERTS = 63  # membership of a neuron is the bits of one signed number
# From so many tokens on the kernel multiplies matrices in panels of tokens; fewer meet one row after another. Eight halves
# of 4,096 neurons make groups of sixteen, which suit row after row longer.
PANEL_TOKENS = {"few neurons": 64, "many neurons": 192}
MANY_NEURONS = 4096
CHUNK = 2048  # tokens whose activations are kept at once
# In the order of the kernel's own list.
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (F.silu, F.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh"))


# What torch.compile traces has no shapes in its signature (x is [T, D]): checking them would break the graph.
def choose_native(mlp: ToMoEMLP, x: Tensor) -> str | None:
    """For `auto`: native wherever it can run."""
    return "native" if len(x) and fits(mlp, x) else None


def fits(mlp: ToMoEMLP, x: Tensor) -> bool:
    """Whether the kernel can do this: on the CPU, float32 or bfloat16, without gradients, and there is a compiler."""
    if x.device.type != "cpu" or x.dtype not in DTYPES:
        return False
    if mlp.up_proj.dtype != x.dtype or mlp.num_experts > MAX_EXPERTS:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in mlp.parameters())):
        return False
    return working_kind(mlp) is not None


# Asked once while compiling, because what it does would break the graph.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def working_kind(mlp: ToMoEMLP) -> int | None:
    """The number of the MLP's activation, if the kernel knows it and is there."""
    return None if kernel() is None else activation_kind(mlp)


def activation_kind(mlp: ToMoEMLP) -> int | None:
    """Which of ACTIVATIONS the MLP uses, by what it computes; None where it is another one, or learned."""

    def recognise() -> int | None:
        if isinstance(mlp.activation, nn.Module) and next(mlp.activation.parameters(), None) is not None:
            return None
        probe = torch.linspace(-8, 8, 257)
        found = mlp.activation(probe)
        return next((i for i, act in enumerate(ACTIVATIONS) if torch.allclose(found, act(probe), atol=2e-6)), None)

    return mlp.derived("activation", recognise)


def run_native(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor) -> Tensor:
    """All experts in one call of the compiled kernel; where it does not fit, `masked`.

    Within torch.compile it is the operator `tomoe::experts`, one node of the graph.
    """
    kind = working_kind(mlp) if len(x) and fits(mlp, x) else None
    if kind is None:
        return run_masked(mlp, x, expert_ids)
    weights = (mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.gate_bias, mlp.up_bias)
    if torch.compiler.is_compiling():
        return experts(x, expert_ids, mlp.expert_neurons, *weights, kind)
    members = mlp.derived("members", lambda: member_bits(mlp.expert_neurons, len(mlp.up_proj)), mlp.expert_neurons)
    return call(x, expert_ids, members, weights, kind)


def call(
    x: Float[Tensor, "T D"],
    expert_ids: Int[Tensor, " T"],
    members: Int[Tensor, " U"],
    weights: Sequence[Tensor | None],
    kind: int,
) -> Float[Tensor, "T D"]:
    """The kernel, on a bounded number of tokens at a time. Raises RuntimeError where there is none."""
    run = kernel()
    if run is None:
        raise RuntimeError(
            "the native kernel is not there: no C++ compiler, or TOMOE_NATIVE=0; compile the model again"
        )
    x, expert_ids = x.contiguous(), expert_ids.contiguous()
    limit = PANEL_TOKENS["few neurons" if len(members) < MANY_NEURONS else "many neurons"]
    chunks = zip(x.split(CHUNK), expert_ids.split(CHUNK), strict=True)
    found = [run(some, ids, members, weights, kind, len(some) >= limit) for some, ids in chunks]
    return found[0] if len(found) == 1 else torch.cat(found)


SCHEMA = (
    "(Tensor x, Tensor expert_ids, Tensor expert_neurons, Tensor? gate, Tensor up, Tensor down, "
    "Tensor? gate_bias, Tensor? up_bias, int kind) -> Tensor"
)


@torch.library.custom_op("tomoe::experts", mutates_args=(), schema=SCHEMA)
def experts(
    x: Tensor, expert_ids: Tensor, expert_neurons: Tensor, gate: Tensor | None, up: Tensor, down: Tensor,
    gate_bias: Tensor | None, up_bias: Tensor | None, kind: int,
) -> Tensor:  # fmt: skip
    """The kernel as an operator of PyTorch, for graphs."""
    return call(x, expert_ids, _members_of(expert_neurons, len(up)), (gate, up, down, gate_bias, up_bias), kind)


@experts.register_fake
def _like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_members = WeakTensorKeyDictionary()


def _members_of(expert_neurons: Int[Tensor, "N W"], union: int) -> Int[Tensor, " U"]:
    """`member_bits`, made once for a tensor until it changes."""
    stamp = (expert_neurons.data_ptr(), -1 if expert_neurons.is_inference() else expert_neurons._version, union)
    kept = _members.get(expert_neurons)
    if kept is None or kept[0] != stamp:
        kept = _members[expert_neurons] = (stamp, member_bits(expert_neurons, union))
    return cast(Tensor, kept[1])


def member_bits(expert_neurons: Int[Tensor, "N W"], union: int) -> Int[Tensor, " U"]:
    """Bit e of a neuron: expert e has it."""
    bits = torch.zeros(union, dtype=torch.long)
    for expert, neurons in enumerate(expert_neurons.long()):
        bits[neurons] |= 1 << expert
    return bits


Kernel = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor | None], int, bool], Tensor]


@cache
def kernel() -> Kernel | None:
    """The compiled function, or None where it cannot be had or, on this machine, does not compute what it should."""
    library = load(SOURCE)
    if library is None:
        return None
    run = _typed(library)
    if not all(_sound(run, dtype, panels) for dtype in DTYPES for panels in (False, True)):
        log.warning("the native kernel computes something else on this machine; it is not used")
        return None
    return run


def _typed(library: ctypes.CDLL) -> Kernel:
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    compiled = library.tomoe_experts
    compiled.restype = small
    compiled.argtypes = [
        small, small, pointer, pointer, number, number, number, pointer,
        pointer, pointer, pointer, pointer, pointer, small, pointer, small,
    ]  # fmt: skip

    def run(
        x: Tensor, expert_ids: Tensor, members: Tensor, weights: Sequence[Tensor | None], kind: int, panels: bool
    ) -> Tensor:
        y = torch.empty_like(x)
        failed = compiled(
            x.dtype == torch.bfloat16, panels, x.data_ptr(), expert_ids.data_ptr(), *x.shape, len(members), members.data_ptr(),
            *(None if w is None else w.data_ptr() for w in weights), kind, y.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise torch.OutOfMemoryError("no memory for the activations of the experts")
        return y

    return run


def _sound(run: Kernel, dtype: torch.dtype, panels: bool) -> bool:
    """Nine tokens of 70 dims, three experts of 40 neurons: what the compiler made of the source, against PyTorch."""
    tokens, size, union = 9, 70, 40
    x, gate, up, down = (
        torch.linspace(-1, 1, rows * size).mul(seed).sin().view(rows, size).to(dtype)
        for rows, seed in ((tokens, 977), (union, 1009), (union, 1511), (union, 2003))
    )
    expert_ids, members = torch.arange(tokens) % 3, torch.arange(union) % 8
    found = run(x, expert_ids, members, (gate, up, down, None, None), 0, panels)
    h = F.silu(x.float() @ gate.float().t()) * (x.float() @ up.float().t()) * (members >> expert_ids[:, None] & 1)
    meant = h @ down.float()
    return bool((found - meant).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * meant.abs().max())
