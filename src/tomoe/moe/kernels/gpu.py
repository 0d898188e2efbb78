"""Experts on a GPU: two grouped products on rows of the shared weights, by index. Nothing is copied, nothing waits.

Tokens are sorted by expert, in tiles of one expert each. How many tiles an expert has is known on the device only, so
the grid holds as many as there can be, and each finds its expert by itself; tiles that are left over do nothing.
The kernels were checked in Triton's interpreter only, and never timed on a GPU.

Shapes in signatures are those of `grouped.py`, which calls this: checks of shapes would wrap the kernels, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tomoe.moe.modeling_tomoe import ToMoEMLP

# Sizes of a tile; DEPTH is summed at once.
TOKENS, NEURONS, DIMS, DEPTH = 16, 64, 64, 64


@triton.jit  # type: ignore[untyped-decorator]
def _find(tile, offsets, experts: tl.constexpr, tokens: tl.constexpr):  # type: ignore[no-untyped-def]
    """(expert or -1, first token, end) of a tile; `offsets` [N + 1] are the experts' places among the sorted tokens."""
    expert, first, end, before = -1, 0, 0, 0
    for e in range(experts):
        start, stop = tl.load(offsets + e), tl.load(offsets + e + 1)
        after = before + tl.cdiv(stop - start, tokens)
        if (tile >= before) & (tile < after):
            expert, first, end = e, start + (tile - before) * tokens, stop
        before = after
    return expert, first, end


@triton.jit  # type: ignore[untyped-decorator]
def _activate(x, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    if kind == 0:
        return x * tl.sigmoid(x)
    elif kind == 1:
        return tl.maximum(x, 0.0)
    elif kind == 2:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit  # type: ignore[untyped-decorator]
def _hidden(  # type: ignore[no-untyped-def]
    x, order, offsets, neurons, gate, up, gate_bias, up_bias, h, size, width,
    experts: tl.constexpr, gated: tl.constexpr, gate_biased: tl.constexpr, up_biased: tl.constexpr, kind: tl.constexpr,
    TOKENS: tl.constexpr, NEURONS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """h[i, n] = act(gate_u x_t) (up_u x_t) with t the token at place i and u the n-th neuron of its expert."""
    expert, first, end = _find(tl.program_id(0), offsets, experts, TOKENS)
    if expert >= 0:
        places = first + tl.arange(0, TOKENS)
        t = tl.load(order + places, mask=places < end, other=0)
        n = tl.program_id(1) * NEURONS + tl.arange(0, NEURONS)
        u = tl.load(neurons + expert * width + n, mask=n < width, other=0).to(tl.int64)
        ups = tl.zeros((TOKENS, NEURONS), tl.float32)
        gates = tl.zeros((TOKENS, NEURONS), tl.float32)
        for start in range(0, size, DEPTH):
            d = start + tl.arange(0, DEPTH)
            xs = tl.load(
                x + t[:, None] * size + d[None, :], mask=(places < end)[:, None] & (d < size)[None, :], other=0.0
            )
            rows = u[None, :] * size + d[:, None]
            inside = (n < width)[None, :] & (d < size)[:, None]
            ups = tl.dot(xs, tl.load(up + rows, mask=inside, other=0.0), ups, input_precision="ieee")
            if gated:
                gates = tl.dot(xs, tl.load(gate + rows, mask=inside, other=0.0), gates, input_precision="ieee")
        if up_biased:
            ups += tl.load(up_bias + u)[None, :].to(tl.float32)
        if gate_biased:
            gates += tl.load(gate_bias + u)[None, :].to(tl.float32)
        activations = _activate(gates, kind) * ups if gated else _activate(ups, kind)
        tl.store(
            h + places[:, None] * width + n[None, :],
            activations.to(h.dtype.element_ty),
            mask=(places < end)[:, None] & (n < width)[None, :],
        )


@triton.jit  # type: ignore[untyped-decorator]
def _output(  # type: ignore[no-untyped-def]
    h, order, offsets, neurons, down, y, size, width,
    experts: tl.constexpr, TOKENS: tl.constexpr, DIMS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """y[t] = sum over n of h[i, n] down_u."""
    expert, first, end = _find(tl.program_id(0), offsets, experts, TOKENS)
    if expert >= 0:
        places = first + tl.arange(0, TOKENS)
        t = tl.load(order + places, mask=places < end, other=0)
        d = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
        sums = tl.zeros((TOKENS, DIMS), tl.float32)
        for start in range(0, width, DEPTH):
            n = start + tl.arange(0, DEPTH)
            u = tl.load(neurons + expert * width + n, mask=n < width, other=0).to(tl.int64)
            hs = tl.load(
                h + places[:, None] * width + n[None, :], mask=(places < end)[:, None] & (n < width)[None, :], other=0.0
            )
            rows = tl.load(
                down + u[:, None] * size + d[None, :], mask=(n < width)[:, None] & (d < size)[None, :], other=0.0
            )
            sums = tl.dot(hs, rows, sums, input_precision="ieee")
        tl.store(
            y + t[:, None] * size + d[None, :],
            sums.to(y.dtype.element_ty),
            mask=(places < end)[:, None] & (d < size)[None, :],
        )


def run(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor, kind: int) -> Tensor:
    """All experts in two kernels; `kind` is the activation's number in `native.ACTIVATIONS`."""
    x, (count, size), width = x.contiguous(), x.shape, mlp.expert_rows.shape[1]
    expert_ids = expert_ids.flatten()
    order = expert_ids.argsort(stable=True)
    ends = torch.nn.functional.one_hot(expert_ids, mlp.num_experts).sum(0).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    h, y = x.new_empty(count, width), torch.empty_like(x)
    tiles = triton.cdiv(count, TOKENS) + min(mlp.num_experts, count) - 1
    # never read without a gate
    gate = mlp.up_proj if mlp.gate_proj is None else mlp.gate_proj
    _hidden[(tiles, triton.cdiv(width, NEURONS))](
        x, order, offsets, mlp.expert_rows, gate, mlp.up_proj,
        mlp.up_proj if mlp.gate_bias is None else mlp.gate_bias, mlp.up_proj if mlp.up_bias is None else mlp.up_bias,
        h, size, width, mlp.num_experts, mlp.gate_proj is not None, mlp.gate_bias is not None, mlp.up_bias is not None,
        kind, TOKENS, NEURONS, DEPTH,
    )  # fmt: skip
    _output[(tiles, triton.cdiv(size, DIMS))](
        h, order, offsets, mlp.expert_rows, mlp.down_proj, y, size, width, mlp.num_experts, TOKENS, DIMS, DEPTH
    )
    return y
