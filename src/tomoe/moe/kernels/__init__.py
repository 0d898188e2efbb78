"""Kernels of its own for the experts, entered into the modelling file's backends: importing this is enough."""

from tomoe.moe.kernels import grouped, native
from tomoe.moe.modeling_tomoe import BACKEND_CHOICES, EXPERT_BACKENDS

EXPERT_BACKENDS["native"] = native.run_native
EXPERT_BACKENDS["triton"] = grouped.run_triton
BACKEND_CHOICES.append(native.choose_native)
