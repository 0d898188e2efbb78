"""The converted model as `torch.compile` takes it in training: one graph of a decoder layer serves all layers.

What torch.compile traces has no shapes in its signature. T tokens, D hidden size, N experts, k experts of a token.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tomoe.errors import Note, UserError
from tomoe.model.compiled import CompiledLayers, asked
from tomoe.model.mlp import named_layers
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP
from tomoe.recipe.finetuning import FinetuneRecipe


class CompiledMLP(ToMoEMLP):
    """Fine-grained experts that train, by operations that are the same for all layers: k, which differs, is a tensor."""

    k: Tensor  # of this layer: []
    valid: Tensor | None = None  # 1 for tokens that count in the balance term and 0 for padding [T, 1]; None: all count
    balance: Tensor | None = None  # the balance term of the last forward pass

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor:
        x = hidden_states.flatten(0, -2)
        chosen, probs = choice(F.linear(x.to(self.router.weight.dtype), self.router.weight, self.router.bias), self.k)
        self.balance = (self.mean(chosen) * self.mean(probs)).sum() / self.k**2
        if torch.is_grad_enabled() and self.router.weight.requires_grad:
            chosen = chosen * (1 + (probs - probs.detach()))
        mask = chosen.to(x.dtype).repeat_interleave(self.expert_rows.shape[1], 1)
        mask = F.pad(mask, (self.shared_size, 0), value=1.0)
        y = (self.activations(x, slice(None)) * mask) @ self.down_proj
        if self.down_bias is not None:
            y = y + self.down_bias
        y = y.view_as(hidden_states)
        return y if residual is None else y + residual

    def mean(self, numbers: Tensor) -> Tensor:
        """Over the tokens that count: [T, N] -> [N]."""
        return numbers.mean(0) if self.valid is None else (numbers * self.valid).sum(0) / self.valid.sum()


def choice(logits: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """What `modeling_tomoe.route` chooses, as 0 and 1, and its `expert_probs`, both [T, N]; of logits [T, N] and a tensor k."""
    values, order = logits.detach().sort(-1, descending=True)
    number = logits.shape[-1]
    first_k = (torch.arange(number, device=logits.device) < k).to(logits.dtype)
    chosen = torch.zeros_like(values).scatter(-1, order, first_k.expand_as(values))
    border = torch.stack([k - 1, k.clamp(max=number - 1)])
    probs = (logits - values.index_select(-1, border).mean(-1, keepdim=True)).sigmoid()
    return chosen, torch.where(k == number, torch.ones_like(probs), probs)


def compiles(recipe: FinetuneRecipe, moe: ToMoEForCausalLM) -> bool:
    """Whether the layers are compiled. If no graph could serve them all a note says so, or a UserError is raised where the
    recipe insists."""
    if not asked(recipe.train.compile, moe.device):
        return False
    obstacle = _obstacle(recipe, moe)
    if obstacle and recipe.train.compile is True:
        raise UserError(f"train.compile = true needs one graph for all layers, but {obstacle}; set it to auto or false")
    if obstacle:
        warnings.warn(f"the layers do not run compiled: {obstacle}", Note, stacklevel=2)
    return not obstacle


def _obstacle(recipe: FinetuneRecipe, moe: ToMoEForCausalLM) -> str:
    if recipe.weights == "lora":
        return "adapters are not compiled"
    if moe.config.tomoe_expert_form != "fine":
        return "overlapping experts differ in size from layer to layer"
    sizes = {tuple((name, t.shape) for name, t in layer.state_dict().items()) for layer in named_layers(moe)[1]}
    return "" if len(sizes) == 1 else "the layers of this model differ in size"


def compile_student_(moe: ToMoEForCausalLM) -> CompiledLayers:
    """Prepare a converted model for one graph, until `release_student_`; returns the context in which it runs compiled."""
    for mlp in moe.mlps():
        k = mlp.top_k
        mlp.__class__ = CompiledMLP
        cast(Any, mlp).k = torch.tensor(k, device=mlp.up_proj.device)
    return CompiledLayers(moe)


def release_student_(moe: ToMoEForCausalLM) -> None:
    """Undo `compile_student_`."""
    for mlp in moe.mlps():
        for name in ("k", "valid", "balance"):
            mlp.__dict__.pop(name, None)
        mlp.__class__ = ToMoEMLP
