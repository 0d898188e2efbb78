"""The plugin that vLLM finds by the entry point `vllm.general_plugins`. Written against vLLM's source; it has not been run.

Only the form that no stock architecture holds needs it (`model_type: tomoe`); stock exports are served by vLLM as they are.
"""

from __future__ import annotations

ARCHITECTURE = "ToMoEForCausalLM"


def register() -> None:
    """Called by vLLM in each of its processes, so it may come again and must not touch a GPU."""
    from vllm import ModelRegistry

    import tomoe  # noqa: F401 (transformers learns of the config)

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        # by name, not by class: importing the class would import all of vLLM's layers
        ModelRegistry.register_model(ARCHITECTURE, "tomoe.serving.vllm_model:ToMoEForCausalLM")
