"""The groups of projections of a dense model that read the same input, of which a token can use the largest entries.

They are found by name and then watched: projections count as a group only if every one of them runs once in a forward pass,
and on the same input as the others. Whatever does not fit stays dense.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from tomoe.model.attention import FUSED_NAMES, OUTPUT_NAMES
from tomoe.model.hooks import hooked
from tomoe.model.mlp import Mlp, WeightMatrix, converted_mlps, refuse
from tomoe.model.running import run_model

Kind = Literal["attention", "output", "up", "down"]
KINDS: tuple[Kind, ...] = ("attention", "output", "up", "down")
"""What reads the same input: Q, K and V; the output projection of attention; gate and up; down."""
QUERY_NAMES = (("q_proj", "k_proj", "v_proj"), *((name,) for name in FUSED_NAMES))
# Those of attention where its parts have other names than a pruned one needs.
OTHER_OUTPUT_NAMES = (*OUTPUT_NAMES, "c_proj", "wo")
PROBE_TOKENS = 8


@dataclass(frozen=True)
class Group:
    """Projections of one layer that read the same input."""

    names: tuple[str, ...]  # of the modules, from the decoder layer on
    modules: tuple[nn.Module, ...]

    @property
    def width(self) -> int:
        """Size of the input."""
        return WeightMatrix(self.modules[0]).in_features

    @property
    def columns(self) -> int:
        """Total size of all outputs: the weights of one input."""
        return sum(WeightMatrix(module).out_features for module in self.modules)


Layer = Mapping[Kind, Group]  # the groups of one layer


def groups_of(model: PreTrainedModel) -> list[Layer]:
    """Return the groups of every layer whose MLP can be converted, in order; a kind has the same names in all layers that have
    it. Raises UserError if no MLP can be converted, or no projection fits."""
    mlps = converted_mlps(model)
    named = [dict(_named(mlp)) for mlp in mlps]
    runs = _watch(model, [group for layer in named for group in layer.values()])
    usual: dict[Kind, tuple[str, ...]] = {}
    for kind in KINDS:
        names = Counter(layer[kind].names for layer in named if kind in layer and _fits(layer[kind], runs))
        if names:
            usual[kind] = names.most_common(1)[0][0]
    if not usual:
        raise refuse(model, "none of its projections can be run on a part of their inputs")
    return [
        {kind: group for kind, group in layer.items() if usual.get(kind) == group.names and _fits(group, runs)}
        for layer in named
    ]


def _named(mlp: Mlp) -> Iterator[tuple[Kind, Group]]:
    """Return the modules with the usual names in the decoder layer of an MLP."""
    found = _attention(mlp.layer)
    if found is not None:
        prefix, query, output = found
        yield "attention", _group(mlp.layer, [f"{prefix}.{name}" for name in query])
        yield "output", _group(mlp.layer, [f"{prefix}.{output}"])
    prefix = "" if mlp.names.flat else mlp.name.rpartition(".")[2] + "."
    gate = () if mlp.names.gate is None else (mlp.names.gate,)
    yield "up", _group(mlp.layer, [prefix + name for name in (*gate, mlp.names.up)])
    yield "down", _group(mlp.layer, [prefix + mlp.names.down])


def _group(layer: nn.Module, names: Sequence[str]) -> Group:
    return Group(tuple(names), tuple(layer.get_submodule(name) for name in names))


def _attention(layer: nn.Module) -> tuple[str, tuple[str, ...], str] | None:
    """Name the attention in a layer and its projections; None if none has known names."""
    for prefix, module in layer.named_children():
        query = next((names for names in QUERY_NAMES if all(_is_matrix(module, name) for name in names)), None)
        output = next((name for name in OTHER_OUTPUT_NAMES if _is_matrix(module, name)), None)
        if query is not None and output is not None:
            return prefix, query, output
        inner = _attention(module)
        if inner is not None:
            return f"{prefix}.{inner[0]}", *inner[1:]
    return None


def _is_matrix(module: nn.Module, name: str) -> bool:
    part: Any = getattr(module, name, None)
    weight = getattr(part, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()


def _watch(model: PreTrainedModel, groups: Sequence[Group]) -> dict[nn.Module, list[Tensor]]:
    """Record the inputs of every module of these groups while a few tokens run."""
    runs: dict[nn.Module, list[Tensor]] = {module: [] for group in groups for module in group.modules}

    def watched() -> Iterator[RemovableHandle]:
        for module, inputs in runs.items():
            yield module.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.extend(args[:1]))

    ids = torch.linspace(3, 50, PROBE_TOKENS, device=model.device).long()[None]
    with hooked(watched()), torch.no_grad():
        run_model(model, ids, None)
    return runs


def _fits(group: Group, runs: Mapping[nn.Module, Sequence[Tensor]]) -> bool:
    """Whether all its modules ran once, on one input of their width."""
    inputs = [runs[module] for module in group.modules]
    if any(len(own) != 1 for own in inputs):
        return False
    first = inputs[0][0]
    return first.shape[-1] == group.width and all(own[0] is first or torch.equal(own[0], first) for own in inputs)
