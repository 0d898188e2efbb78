"""Linear layers for a few tokens: the output matrix and, beside experts, the projections of attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tomoe.moe.kernels.build import INT32, INT64, POINTER, function, load_library
from tomoe.moe.kernels.native import PROCESSOR, SOURCE, kernel, trial
from tomoe.moe.modeling_tomoe import FEW_TOKENS, few, learns


# What torch.compile traces has no shapes in its signature: x is [.., D], what it returns [.., V].
def supports(module: Any, x: Tensor) -> bool:
    """Whether the kernel can compute a linear layer and was faster than PyTorch on this kind of processor."""
    if torch.compiler.is_compiling() or PROCESSOR.get("amx_bf16") or not (x.numel() and few(x)):
        return False
    # nothing but a linear layer: not one that something was added to, or whose weight only looks like a tensor
    if type(module) not in (nn.Linear, KernelLinear) or type(module.weight.data) is not Tensor:
        return False
    weight = module.weight
    if not (x.is_cpu and weight.is_cpu and x.dtype == weight.dtype == torch.bfloat16 and weight.is_contiguous()):
        return False
    return not learns(x, [weight]) and multiplier() is not None


class KernelLinear(nn.Linear):
    """A linear layer that runs in the kernel for a few tokens. A class, so that one torch.compile graph serves all layers."""

    def forward(self, x: Tensor) -> Tensor:
        return product(self, x) if supports(self, x) else super().forward(x)


def prepare_(model: nn.Module) -> None:
    """Run the attention projections of a loaded model with experts in the kernel; routers are left alone. Not at construction:
    quantizers look for PyTorch's own class."""
    mlps: list[nn.Module] = getattr(model, "mlps", list)()
    for name, module in list(model.named_modules()) if mlps else ():
        if type(module) is nn.Linear and name.endswith("_proj") and "router" not in name and not hooks_of(module):
            made = KernelLinear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
            made.weight, made.bias = module.weight, module.bias
            model.set_submodule(name, made.train(module.training))


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks that others registered on a module, which would be lost with it."""
    own = [module._hf_hook] if hasattr(module, "_hf_hook") else []
    return [*own, *module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def product(module: nn.Linear, x: Tensor) -> Tensor:
    """Compute the layer in the kernel, with float32 sums."""
    multiply = multiplier()
    assert multiply is not None, "the native kernel is missing"
    y = multiply(x, module.weight)
    return y if module.bias is None else y + module.bias


Multiplier = Callable[[Tensor, Tensor], Tensor]


@cache
def multiplier() -> Multiplier | None:
    """The compiled product of x [.., D] and weight [V, D] in bfloat16; None if it is missing or disagrees with PyTorch."""
    library = load_library(SOURCE) if kernel() else None
    if library is None:
        return None
    arguments = [POINTER, INT64, INT64, POINTER, INT64, POINTER, INT32]
    compiled = function(library, "tomoe_logits", arguments, "the logits")

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        x, (rows, size) = x.contiguous(), weight.shape
        y = x.new_empty(*x.shape[:-1], rows)
        tokens = (x.data_ptr(), x.numel() // size, size)
        compiled(*tokens, weight.data_ptr(), rows, y.data_ptr(), torch.get_num_threads())
        return y

    return multiply if all(_agrees_with_pytorch(multiply, tokens) for tokens in range(1, FEW_TOKENS + 1)) else None


def _agrees_with_pytorch(multiply: Multiplier, tokens: int) -> bool:
    """Compare the compiled kernel with PyTorch: 70 dims, 37 rows."""
    x, weight = (trial(n, 70, seed).bfloat16() for n, seed in ((tokens, 977), (37, 1009)))
    meant = F.linear(x.float(), weight.float())
    return bool((multiply(x, weight).float() - meant).abs().max() <= 1e-2 * meant.abs().max())
