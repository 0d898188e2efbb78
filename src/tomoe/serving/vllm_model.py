"""A converted model inside vLLM: its generic transformers backend around our decoder. It has not been run.

The backend makes `AutoModel.from_config(config)`, puts its own linear layers and attention in, and loads the weights. What
it does not know of is done here: routers stay float32, and the numbers of rows and pairs are loaded as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.transformers import TransformersForCausalLM

from tomoe.moe.modeling_tomoe import ToMoEMLP, ValueRouter

NUMBERS = ("expert_neurons", "rotary_ids")


class ToMoEForCausalLM(TransformersForCausalLM):
    """The name that stands under `architectures` in config.json."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.model.modules():
            if isinstance(module, ToMoEMLP):  # a near tie must fall as it fell in training
                rows, hidden = module.num_experts, module.up_proj.shape[1]
                module.router = nn.Linear(hidden, rows, bias=False, device=module.up_proj.device, dtype=torch.float32)
            elif getattr(module, "value_router", None) is not None:
                e, device = self.config.value_embedding_size, module.o_proj.weight.device
                module.value_router = ValueRouter(self.config.hidden_size, e, module.value_size).to(
                    device, torch.float32
                )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """vLLM loads parameters; these numbers are buffers, and a cast to the model's dtype would spoil them."""
        numbers: set[str] = set()

        def others() -> Iterator[tuple[str, Tensor]]:
            buffers = dict(self.model.named_buffers())
            for name, tensor in weights:
                if not name.endswith(NUMBERS):
                    yield name, tensor
                elif (buffer := buffers.get(name.removeprefix("model."))) is not None:  # None: on another rank
                    buffer.copy_(tensor)
                    numbers.add(name)

        loaded = super().load_weights(others())
        self.model.check_ids()
        return set(loaded) | numbers
