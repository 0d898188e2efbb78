"""ToMoE: turn a dense causal language model into a Mixture-of-Experts that loads anywhere.

Importing this package registers the converted models with transformers, so that
`AutoModelForCausalLM.from_pretrained(folder)` needs no flag. PyTorch and transformers are imported when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tomoe.errors import UserError
from tomoe.moe.registration import register_when_imported
from tomoe.version import __version__

if TYPE_CHECKING:
    from tomoe.conversion.convert import convert
    from tomoe.evaluation.evaluate import evaluate
    from tomoe.exporting.export import export
    from tomoe.finetuning.finetune import finetune
    from tomoe.model.generation import generate
    from tomoe.moe.load import load
    from tomoe.moe.modeling_tomoe import ToMoEConfig, ToMoEForCausalLM
    from tomoe.plan import Plan
    from tomoe.recipe.conversion import Recipe

__all__ = [
    "Plan",
    "Recipe",
    "ToMoEConfig",
    "ToMoEForCausalLM",
    "UserError",
    "__version__",
    "convert",
    "evaluate",
    "export",
    "finetune",
    "generate",
    "load",
]

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
    "load": "tomoe.moe.load",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


register_when_imported()
