"""ToMoE: turn a dense causal language model into a Mixture-of-Experts that loads anywhere.

Importing this package registers the converted models with transformers, so that
`AutoModelForCausalLM.from_pretrained(folder)` needs no flag. PyTorch and transformers are imported when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tomoe.errors import UserError as UserError
from tomoe.moe.registration import register_when_imported
from tomoe.version import __version__ as __version__

if TYPE_CHECKING:
    from tomoe.evaluation.evaluate import evaluate as evaluate
    from tomoe.exporting.export import export as export
    from tomoe.finetuning.finetune import finetune as finetune

    # what a method of one's own needs
    from tomoe.methods.base import Method as Method
    from tomoe.methods.base import MethodConfig as MethodConfig
    from tomoe.methods.registry import method as method
    from tomoe.model.generation import generate as generate
    from tomoe.moe.active_experts import load as load
    from tomoe.moe.modeling_tomoe import ToMoEConfig as ToMoEConfig
    from tomoe.moe.modeling_tomoe import ToMoEForCausalLM as ToMoEForCausalLM
    from tomoe.pipeline.api import fold as fold
    from tomoe.pipeline.api import plan as plan
    from tomoe.pipeline.api import repair as repair
    from tomoe.pipeline.api import save as save
    from tomoe.pipeline.convert import convert as convert
    from tomoe.plans import Plan as Plan
    from tomoe.plans.partition.activations import Activations as Activations
    from tomoe.plans.partition.experts import Experts as Experts
    from tomoe.plans.partition.experts import Room as Room
    from tomoe.recipe.conversion import Recipe as Recipe

_MODULES = {
    "Activations": "tomoe.plans.partition.activations",
    "Experts": "tomoe.plans.partition.experts",
    "Method": "tomoe.methods.base",
    "MethodConfig": "tomoe.methods.base",
    "Room": "tomoe.plans.partition.experts",
    "fold": "tomoe.pipeline.api",
    "method": "tomoe.methods.registry",
    "plan": "tomoe.pipeline.api",
    "repair": "tomoe.pipeline.api",
    "save": "tomoe.pipeline.api",
    "Plan": "tomoe.plans",
    "Recipe": "tomoe.recipe.conversion",
    "ToMoEConfig": "tomoe.moe.modeling_tomoe",
    "ToMoEForCausalLM": "tomoe.moe.modeling_tomoe",
    "convert": "tomoe.pipeline.convert",
    "evaluate": "tomoe.evaluation.evaluate",
    "export": "tomoe.exporting.export",
    "finetune": "tomoe.finetuning.finetune",
    "generate": "tomoe.model.generation",
    "load": "tomoe.moe.active_experts",
}
__all__ = ["UserError", "__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


register_when_imported()
