"""The plan: everything that a conversion learned, as data; the MoE is a pure function of it and the dense weights.

A plan is a folder with `plan.json` (sizes, recipe, source, checksum) and `plan.safetensors` (neuron sets, routers, kept
dims). It holds no dense weight, so it can be shared by itself.
"""

from __future__ import annotations

from tomoe.plan.layer import LayerCounts, LayerPlan
from tomoe.plan.layout import ALWAYS, always_used
from tomoe.plan.manifest import FINETUNED, REPAIRED
from tomoe.plan.plan import Plan

__all__ = ["ALWAYS", "FINETUNED", "REPAIRED", "LayerCounts", "LayerPlan", "Plan", "always_used"]
