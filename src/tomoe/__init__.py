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
    from tomoe.conversion.convert import convert as convert
    from tomoe.evaluation.evaluate import evaluate as evaluate
    from tomoe.exporting.export import export as export
    from tomoe.finetuning.finetune import finetune as finetune
    from tomoe.model.generation import generate as generate
    from tomoe.moe.active_experts import load as load
    from tomoe.moe.kernels import prepare as prepare
    from tomoe.moe.modeling_tomoe import ToMoEConfig as ToMoEConfig
    from tomoe.moe.modeling_tomoe import ToMoEForCausalLM as ToMoEForCausalLM
    from tomoe.plan import Plan as Plan
    from tomoe.recipe.conversion import Recipe as Recipe

_MODULES = {
    "Plan": "tomoe.plan",
    "Recipe": "tomoe.recipe.conversion",
    "ToMoEConfig": "tomoe.moe.modeling_tomoe",
    "ToMoEForCausalLM": "tomoe.moe.modeling_tomoe",
    "convert": "tomoe.conversion.convert",
    "evaluate": "tomoe.evaluation.evaluate",
    "export": "tomoe.exporting.export",
    "finetune": "tomoe.finetuning.finetune",
    "generate": "tomoe.model.generation",
    "load": "tomoe.moe.active_experts",
    "prepare": "tomoe.moe.kernels",
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
