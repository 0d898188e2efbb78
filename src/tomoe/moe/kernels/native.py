"""Experts on the CPU in one pass over the shared rows: each row that some token needs is read once for the whole batch."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tomoe.moe.kernels.build import load
from tomoe.moe.modeling_tomoe import ToMoEMLP, run_masked

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("experts.cpp")
DTYPES = (torch.float32, torch.bfloat16)
MAX_EXPERTS = 63  # membership of a neuron is the bits of one signed number
# Up to so many tokens it wins in layers of any size; always where groups of neurons are large: eight halves of 4,096
# neurons make groups of sixteen, as the kernel wants them.
FEW_TOKENS = {torch.float32: 511, torch.bfloat16: 128}
MANY_NEURONS = 4096
CHUNK = 2048  # tokens whose activations are kept at once
# In the order of the kernel's own list.
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (F.silu, F.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh"))


def choose_native(mlp: ToMoEMLP, x: Float[Tensor, "T D"]) -> str | None:
    """For `auto`: native where it can run, and tokens are few or neurons many."""
    suits = 0 < len(x) <= FEW_TOKENS.get(x.dtype, 0) or (len(x) > 0 and len(mlp.up_proj) >= MANY_NEURONS)
    return "native" if suits and fits(mlp, x) else None


def fits(mlp: ToMoEMLP, x: Float[Tensor, "T D"]) -> bool:
    """Whether the kernel can do this: on the CPU, float32 or bfloat16, without gradients, and there is a compiler."""
    if x.device.type != "cpu" or x.dtype not in DTYPES:
        return False
    if mlp.up_proj.dtype != x.dtype or mlp.num_experts > MAX_EXPERTS:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in mlp.parameters())):
        return False
    return activation_kind(mlp) is not None and kernel() is not None


def activation_kind(mlp: ToMoEMLP) -> int | None:
    """Which of ACTIVATIONS the MLP uses, by what it computes; None where it is another one, or learned."""

    def recognise() -> int | None:
        if isinstance(mlp.activation, nn.Module) and next(mlp.activation.parameters(), None) is not None:
            return None
        probe = torch.linspace(-8, 8, 257)
        found = mlp.activation(probe)
        return next((i for i, act in enumerate(ACTIVATIONS) if torch.allclose(found, act(probe), atol=2e-6)), None)

    return mlp.derived("activation", recognise)


def run_native(mlp: ToMoEMLP, x: Float[Tensor, "T D"], expert_ids: Int[Tensor, " T"]) -> Float[Tensor, "T D"]:
    """All experts in one call of the compiled kernel; where it does not fit, `masked`."""
    run = kernel() if len(x) and fits(mlp, x) else None
    kind = None if run is None else activation_kind(mlp)
    if run is None or kind is None:
        return run_masked(mlp, x, expert_ids)
    members = mlp.derived("members", lambda: member_bits(mlp.expert_neurons, len(mlp.up_proj)), mlp.expert_neurons)
    weights = (mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.gate_bias, mlp.up_bias)
    x, expert_ids = x.contiguous(), expert_ids.contiguous()
    if len(x) <= CHUNK:
        return run(x, expert_ids, members, weights, kind)
    chunks = zip(x.split(CHUNK), expert_ids.split(CHUNK), strict=True)
    return torch.cat([run(some, ids, members, weights, kind) for some, ids in chunks])


def member_bits(expert_neurons: Int[Tensor, "N W"], union: int) -> Int[Tensor, " U"]:
    """Bit e of a neuron: expert e has it."""
    bits = torch.zeros(union, dtype=torch.long)
    for expert, neurons in enumerate(expert_neurons.long()):
        bits[neurons] |= 1 << expert
    return bits


Kernel = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor | None], int], Tensor]


@cache
def kernel() -> Kernel | None:
    """The compiled function, or None where it cannot be had or, on this machine, does not compute what it should."""
    library = load(SOURCE)
    if library is None:
        return None
    run = _typed(library)
    if not all(_sound(run, dtype) for dtype in DTYPES):
        log.warning("the native kernel computes something else on this machine; it is not used")
        return None
    return run


def _typed(library: ctypes.CDLL) -> Kernel:
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    compiled = library.tomoe_experts
    compiled.restype = small
    compiled.argtypes = [
        small, pointer, pointer, number, number, number, pointer,
        pointer, pointer, pointer, pointer, pointer, small, pointer, small,
    ]  # fmt: skip

    def run(x: Tensor, expert_ids: Tensor, members: Tensor, weights: Sequence[Tensor | None], kind: int) -> Tensor:
        y = torch.empty_like(x)
        failed = compiled(
            x.dtype == torch.bfloat16, x.data_ptr(), expert_ids.data_ptr(), *x.shape, len(members), members.data_ptr(),
            *(None if w is None else w.data_ptr() for w in weights), kind, y.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise torch.OutOfMemoryError("no memory for the activations of the experts")
        return y

    return run


def _sound(run: Kernel, dtype: torch.dtype) -> bool:
    """Nine tokens of 70 dims, three experts of 40 neurons: what the compiler made of the source, against PyTorch."""
    tokens, size, union = 9, 70, 40
    x, gate, up, down = (
        torch.linspace(-1, 1, rows * size).mul(seed).sin().view(rows, size).to(dtype)
        for rows, seed in ((tokens, 977), (union, 1009), (union, 1511), (union, 2003))
    )
    expert_ids, members = torch.arange(tokens) % 3, torch.arange(union) % 8
    found = run(x, expert_ids, members, (gate, up, down, None, None), 0)
    h = F.silu(x.float() @ gate.float().t()) * (x.float() @ up.float().t()) * (members >> expert_ids[:, None] & 1)
    meant = h @ down.float()
    return bool((found - meant).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * meant.abs().max())
