"""The structure of a dense model: the parts of each layer that tomoe masks or replaces, its sizes, whether it can be converted.

The MLP is all that a conversion needs (`model/mlp.py`); attention matters only to recipes that prune it
(`model/attention.py`). Everything else stays the family's code.

Shapes: B sequences, S tokens of one, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from tomoe.errors import UserError
from tomoe.model.attention import Attention, attention_checks, attention_of, attention_sizes
from tomoe.model.hooks import hooked, input_of
from tomoe.model.mlp import Mlp, NotFinite, Refused, check_formula, converted_mlps, decoder_layers, mlp_of, refuse
from tomoe.model.offload import iter_weights
from tomoe.model.running import run_model
from tomoe.model.shape import ModelShape

PROBE_TOKENS = 32
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What models call the cache among their arguments: transformers renamed it in 5.24. The modeling file, which imports
nothing of tomoe, has the same line."""


@dataclass(frozen=True)
class LayerParts:
    """The parts of one decoder layer that tomoe masks or replaces."""

    model: nn.Module
    mlp: Mlp

    @property
    def attention(self) -> Attention:
        """The attention. Raises Refused where tomoe cannot prune it."""
        return attention_of(self.model, self.mlp.layer)


def layer_parts(model: nn.Module) -> list[LayerParts]:
    """Return the parts of every decoder layer whose MLP is converted, in order. Raises UserError if there is none."""
    return [LayerParts(model, mlp) for mlp in converted_mlps(model)]


def shape_of(model: nn.Module) -> ModelShape:
    """Read the sizes from the modules; attention's are 0 if it cannot be pruned. Raises UserError if no MLP can be converted."""
    mlps = converted_mlps(model)
    try:
        heads = attention_sizes(model, [mlp.layer for mlp in mlps])
    except Refused:
        heads = {}
    known = ModelShape(
        num_layers=len(mlps),
        hidden_size=mlps[0].up.in_features,
        mlp_size=mlps[0].down.in_features,
        gated=mlps[0].gate is not None,
        **heads,
    )
    neuron = known.hidden_size * (3 if known.gated else 2)
    attention = 2 * known.hidden_size * (known.num_heads + known.num_kv_heads) * known.head_dim
    total = sum(_own_matrices(module) for layer in decoder_layers(model) for module in layer.modules())
    return replace(known, other_params=total - known.num_layers * (neuron * known.mlp_size + attention))


def _own_matrices(module: Any) -> int:
    """Count the parameters of a module's own matrices, without biases and norms, as in the paper."""
    return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)


def check_output(model: PreTrainedModel, attention: bool = False) -> None:
    """Raise UserError if an MLP, or with `attention` an attention, computes something else on a few tokens than the MoE's formula
    for it (folding would silently change it), if outputs are not finite, or if its tokens choose inputs already."""
    _refuse_inputs(model)
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    ids = torch.linspace(vocabulary // 4, vocabulary - 1, PROBE_TOKENS, device=model.device).long()[None]
    try:
        with hooked(_checks(model, attention)), torch.no_grad():
            _, logits = run_model(model, ids, None, every_logit=True)
    except NotFinite:
        raise _not_finite(model) from None
    if not bool(logits.isfinite().all()):
        raise _not_finite(model)


def _refuse_inputs(model: PreTrainedModel) -> None:
    """Raise UserError if the model's tokens choose inputs: it has the modules of a dense one."""
    if getattr(model.config, "tomoe_expert_form", None) == "inputs":
        raise refuse(model, "its tokens choose inputs already; tomoe converts dense models")


def _not_finite(model: PreTrainedModel) -> UserError:
    """Make the error for a model that computes NaN or inf: its first damaged tensor, or too narrow a dtype."""
    for name, tensor, _ in iter_weights(model):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return refuse(model, f"its weights are damaged: {name} holds NaN or inf; get its files again")
    kind = str(model.dtype).removeprefix("torch.")
    return refuse(
        model, f"it computes no finite numbers in {kind}, though its weights are finite; set another train.dtype"
    )


class _EveryAnswerYes(TorchDispatchMode):
    """On the meta device, a Boolean `.item()` is True, such as whether a mask keeps all tokens. FakeTensorMode knows shapes as
    well, but takes more than twice as long, seconds for a model with many layers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        return func(*args, **(kwargs or {}))


def check_without_weights(model: PreTrainedModel) -> None:
    """Raise UserError for what `check_output` would find in layers and an MLP, with a model on the meta device: the first MLP
    runs with random weights, the model without values, unless its code needs them."""
    _refuse_inputs(model)
    mlps = converted_mlps(model)
    first = mlps[0]
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=model.device)
    with _EveryAnswerYes(), hooked(hook for mlp in mlps for hook in _layer_checks(model, mlp)), torch.no_grad():
        try:
            run_model(model, ids, None)
        except UserError:
            raise
        # what asks for numbers cannot run without them
        except Exception:
            pass
    if first.names.flat:
        return
    found = mlp_of(copy.deepcopy(first.layer), first.number, first.name.rpartition(".")[0])
    assert found is not None
    module = found.module.to_empty(device="cpu").float().eval()
    generator = torch.Generator().manual_seed(0)
    for p in (*module.parameters(), *module.buffers()):
        p.data.copy_(torch.rand(p.shape, generator=generator) - 0.5 if p.dim() > 1 else torch.ones(p.shape))
    if "residual" in inspect.signature(module.forward).parameters:
        return
    x = torch.rand(1, PROBE_TOKENS, found.down.out_features, generator=generator) - 0.5
    with hooked(_mlp_checks(model, found)), torch.no_grad():
        module(x)


def _checks(model: PreTrainedModel, attention: bool) -> Iterator[RemovableHandle]:
    """Hooks that compare each part as soon as it has run: only then are the weights of a sharded model complete."""
    layers = {}
    for mlp in converted_mlps(model):
        yield from _mlp_checks(model, mlp)
        layers[mlp.number] = mlp.layer
    if attention:
        attention_sizes(model, list(layers.values()))
        yield from attention_checks(model, layers)


def _layer_checks(model: PreTrainedModel, mlp: Mlp) -> Iterator[RemovableHandle]:
    """Check that a layer runs once per token and passes on one stream of hidden states."""
    runs = itertools.count()

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if input_of(args, kwargs).dim() != 3:
            raise refuse(model, "its layers hand on several streams of hidden states at once")
        if next(runs):
            raise refuse(model, "its layers run several times for each token")

    yield mlp.layer.register_forward_pre_hook(check, with_kwargs=True)


def _mlp_checks(model: PreTrainedModel, mlp: Mlp) -> Iterator[RemovableHandle]:
    """Check that the down projection returns the formula, and the module that, or with the residual it received."""
    seen: dict[str, Tensor] = {}
    what = f"the MLP of layer {mlp.number}"

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.setdefault("x", input_of(args, kwargs))

    def check_down(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> None:
        # The formula runs the projections again.
        if "down" not in seen:
            seen["down"] = out
            check_formula(model, what, out, mlp.formula(seen["x"]))

    def check_module(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        residual = kwargs.get("residual", args[1] if len(args) > 1 else None)
        check_formula(model, what, out, seen["down"] if residual is None else seen["down"] + residual)

    yield from _layer_checks(model, mlp)
    yield mlp.module.register_forward_pre_hook(note, with_kwargs=True)
    yield mlp.down.register_forward_hook(check_down)
    if not mlp.names.flat:
        yield mlp.module.register_forward_hook(check_module, with_kwargs=True)
