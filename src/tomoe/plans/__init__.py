"""The plan: everything that a conversion learned, as data; the MoE is a pure function of it and the dense weights.

A plan is a folder with `plan.json` (sizes, recipe, source, checksum) and, for experts, `plan.safetensors` (neuron sets,
routers, kept dims). It holds no dense weight, so it can be shared by itself.
"""

from __future__ import annotations

from pathlib import Path

from tomoe.plans.inputs import InputsPlan as InputsPlan
from tomoe.plans.inputs import PathPoint as PathPoint
from tomoe.plans.layer import LayerCounts as LayerCounts
from tomoe.plans.layer import LayerPlan as LayerPlan
from tomoe.plans.manifest import FINETUNED as FINETUNED
from tomoe.plans.manifest import REPAIRED as REPAIRED
from tomoe.plans.manifest import is_of_inputs, read_head
from tomoe.plans.plan import Plan as Plan
from tomoe.plans.tensors import ALWAYS as ALWAYS
from tomoe.plans.tensors import always_used as always_used

AnyPlan = Plan | InputsPlan  # a plan of any form


def read_plan(folder: Path) -> AnyPlan:
    """Read and check a plan of any form. Raises UserError if the folder holds none or a damaged one."""
    return InputsPlan.load(folder) if is_of_inputs(read_head(folder)) else Plan.load(folder)
