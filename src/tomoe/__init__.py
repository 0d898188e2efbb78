"""ToMoE: turn a dense causal language model into a Mixture-of-Experts that loads anywhere.

Importing this package registers the converted models with transformers, so that
`AutoModelForCausalLM.from_pretrained(folder)` needs no flag.
"""

from tomoe.errors import UserError
from tomoe.moe import kernels  # noqa: F401  # enters its own into the backends
from tomoe.moe.modeling_tomoe import ToMoEConfig, ToMoEForCausalLM
from tomoe.plan import Plan
from tomoe.recipe.conversion import Recipe

__version__ = "0.1.0"

__all__ = ["Plan", "Recipe", "ToMoEConfig", "ToMoEForCausalLM", "UserError", "__version__"]
