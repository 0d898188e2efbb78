"""Where a dense model keeps its decoder layers and their MLPs.

All that a conversion needs of a decoder layer is an MLP that computes down(act(gate x) * up x), or down(act(up x)). It is
found by structure and by the names in one table. Layers without such an MLP (state spaces, convolutions, layers that are
Mixtures of Experts already) stay dense.

Shapes: T tokens, D hidden size, F neurons of an MLP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tomoe.errors import UserError

# Modules of other towers of a multimodal model, whose layers are not the decoder's.
OTHER_TOWERS = ("vision", "visual", "audio", "image", "video", "speech", "encoder")


@dataclass(frozen=True)
class MlpNames:
    """A family's names for the parts of its MLP and for its activation."""

    gate: str | None
    up: str
    down: str
    fused: bool = False  # whether `up` holds the rows of the gate, then those of the up projection
    flat: bool = False
    """Whether they are parts of the decoder layer itself, one after another, and not of a module of their own."""


# Every MLP that is known. A row fits if the module has all of its names.
MLP_NAMES = (
    MlpNames("gate_proj", "up_proj", "down_proj"),
    MlpNames("w1", "w3", "w2"),
    MlpNames("proj_up_gate", "proj_up", "proj_down"),
    MlpNames(None, "gate_up_proj", "down_proj", fused=True),
    MlpNames(None, "input_linear", "output_linear", fused=True),
    MlpNames(None, "Wi", "Wo", fused=True),
    MlpNames(None, "fc1", "fc2", fused=True),
    MlpNames(None, "up_proj", "down_proj"),
    MlpNames(None, "fc1", "fc2"),
    MlpNames(None, "fc_in", "fc_out"),
    MlpNames(None, "c_fc", "c_proj"),
    MlpNames(None, "dense_h_to_4h", "dense_4h_to_h"),
    MlpNames(None, "fc1", "fc2", flat=True),
)
ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation", "activation_func", "gelu_impl")


@dataclass(frozen=True)
class WeightMatrix:
    """One matrix of the model, however stored: an nn.Linear, a Conv1D (transposed), some rows of a fused one."""

    module: Any
    rows: slice | None = None

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The matrix, as a view of the module's."""
        stored = self.module.weight
        matrix = stored.t() if isinstance(self.module, Conv1D) else stored
        return matrix if self.rows is None else matrix[self.rows]

    @property
    def bias(self) -> Float[Tensor, " out"] | None:
        """The bias, as a view of the module's, or None."""
        bias = getattr(self.module, "bias", None)
        return bias if bias is None or self.rows is None else bias[self.rows]

    @property
    def in_features(self) -> int:
        return int(self.module.nx if isinstance(self.module, Conv1D) else self.module.in_features)

    @property
    def out_features(self) -> int:
        if self.rows is not None:
            return cast(int, self.rows.stop - self.rows.start)
        return int(self.module.nf if isinstance(self.module, Conv1D) else self.module.out_features)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y if self.rows is None else y[..., self.rows]

    def register_forward_pre_hook(self, hook: Callable[..., Any], **options: Any) -> RemovableHandle:
        """Register a hook on the module that holds the matrix."""
        return self.module.register_forward_pre_hook(hook, **options)

    def register_forward_hook(self, hook: Callable[..., Any], **options: Any) -> RemovableHandle:
        """Register a hook on the module that holds the matrix; not for a part of a fused one."""
        assert self.rows is None
        return self.module.register_forward_hook(hook, **options)


@dataclass(frozen=True)
class Mlp:
    """The MLP of one decoder layer that ToMoE converts."""

    number: int  # of its decoder layer, among all of them
    layer: nn.Module  # its decoder layer
    name: str  # the name in the model of what the experts replace, such as `model.layers.0.mlp`
    module: nn.Module
    """The module of that name, which gets the input x: the MLP, or its up projection if it has no module of its own."""
    names: MlpNames
    gate: WeightMatrix | None
    up: WeightMatrix
    down: WeightMatrix
    activation: Any  # a module, or a function of tensors
    activation_name: str | None
    """The attribute of the MLP that holds it; None: silu, which the family's code names itself."""

    def formula(self, x: Float[Tensor, "*T D"]) -> Float[Tensor, "*T D"]:
        """Compute the MLP: down(act(gate x) * up x), or down(act(up x)) without a gate."""
        up = self.up(x)
        return self.down(self.activation(up) if self.gate is None else self.activation(self.gate(x)) * up)


class Refused(UserError):
    """A model has an unsupported structure; why: as half a sentence."""

    def __init__(self, sentence: str, why: str):
        super().__init__(sentence)
        self.why = why


def refuse(model: nn.Module, why: str, task: str = "convert", advice: str = "") -> Refused:
    """Make the error that says why tomoe cannot do its `task` with a model."""
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return Refused(f"tomoe cannot {task} this {name!r} model: {why}{advice}", why)


class NotFinite(Exception):
    """A part of a model returns NaN or inf."""


def check_formula(model: nn.Module, what: str, theirs: Tensor, ours: Tensor, task: str = "convert") -> None:
    """Raise UserError if a part of the model does not compute the formula that replaces it, NotFinite for NaN or inf."""
    if not bool(theirs.isfinite().all()):
        raise NotFinite(what)
    difference = float((theirs.float() - ours.float()).norm() / theirs.float().norm().clamp_min(1e-9))
    if not difference <= (1e-3 if theirs.dtype == torch.float32 else 2e-2):
        raise refuse(model, f"{what} is not the usual formula (relative difference {difference:.2g})", task)


def children(module: nn.Module) -> str:
    """List the names of a module's parts, for a sentence."""
    return ", ".join(name for name, _ in module.named_children()) or "no parts at all"


def named_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the decoder layers and their name in the model, such as `model.layers`: the module list with most parameters, in no
    other list and outside of other towers. Raises UserError if the model is not a causal language model or has no such list."""
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise refuse(model, "it is not a causal language model: it has no output matrix")
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        other = any(tower in part for part in name.split(".") for tower in OTHER_TOWERS)
        if isinstance(module, nn.ModuleList) and len(module) and not inside and not other:
            found[name] = module
    if not found:
        raise refuse(model, "it has no list of decoder layers outside of an encoder")
    return max(found.items(), key=lambda entry: sum(p.numel() for p in entry[1].parameters()))


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return all decoder layers, converted or not. Raises UserError as `named_layers`."""
    return named_layers(model)[1]


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the module that runs the decoder layers and returns the final hidden states. Raises UserError as `named_layers`."""
    return model.get_submodule(named_layers(model)[0].rpartition(".")[0])


def converted_mlps(model: nn.Module) -> list[Mlp]:
    """Return the MLPs that tomoe converts, in the order of their layers; of several widths, those of the most common one. Raises
    UserError with the reason if there is none, or if most layers are Mixtures of Experts already."""
    prefix, layers = named_layers(model)
    found = [parts for i, layer in enumerate(layers) if (parts := mlp_of(layer, i, f"{prefix}.{i}"))]
    owners = Counter(id(parts.down.module) for parts in found)
    if any(count > 1 for count in owners.values()):
        raise refuse(model, "its layers share one MLP, and each layer needs experts of its own")
    if not found or 2 * sum(map(_holds_experts, layers)) > len(layers):
        raise refuse(model, _why_no_mlp(layers))
    widths = Counter(_width(parts) for parts in found)
    common = max(widths, key=lambda width: (widths[width], width))
    return [parts for parts in found if _width(parts) == common]


def _width(parts: Mlp) -> tuple[int, bool]:
    return parts.down.in_features, parts.gate is None


def _holds_experts(module: nn.Module) -> bool:
    return any(
        name.rpartition(".")[2] in ("experts", "router", "block_sparse_moe") for name, _ in module.named_modules()
    )


def _why_no_mlp(layers: nn.ModuleList) -> str:
    if any(_holds_experts(layer) for layer in layers):
        return "its MLPs are Mixtures of Experts already; tomoe converts dense models"
    for layer in layers:
        for name, child in layer.named_children():
            if "norm" not in name and any(word in name for word in ("mlp", "feed_forward", "ffn", "mixer")):
                return f"its MLP has no up and down projections that are known, but {children(child)}"
    return f"its decoder layer has no MLP of its own, but {children(layers[0])}"


def mlp_of(layer: nn.Module, number: int, name: str) -> Mlp | None:
    """Return the MLP among the parts of a decoder layer; None if there is none, or if it has experts already."""
    if _holds_experts(layer):
        return None
    for child_name, child in layer.named_children():
        for names in MLP_NAMES:
            if not names.flat and _has(child, names):
                return _parts(layer, child, names, number, f"{name}.{child_name}")
    flat = next((names for names in MLP_NAMES if names.flat and _has(layer, names)), None)
    return None if flat is None else _parts(layer, layer, flat, number, f"{name}.{flat.up}")


def _has(module: nn.Module, names: MlpNames) -> bool:
    parts = [getattr(module, part, None) for part in (names.gate, names.up, names.down) if part]
    if not all(isinstance(part, Conv1D) or isinstance(getattr(part, "in_features", None), int) for part in parts):
        return False
    up, down = WeightMatrix(getattr(module, names.up)), WeightMatrix(getattr(module, names.down))
    return up.out_features == down.in_features * (2 if names.fused else 1)


def _parts(layer: nn.Module, mlp: nn.Module, names: MlpNames, number: int, name: str) -> Mlp:
    up = WeightMatrix(getattr(mlp, names.up))
    gate = None if names.gate is None else WeightMatrix(getattr(mlp, names.gate))
    if names.fused:
        half = up.out_features // 2
        gate, up = WeightMatrix(up.module, slice(0, half)), WeightMatrix(up.module, slice(half, 2 * half))
    found = next((n for n in ACTIVATION_NAMES if callable(getattr(mlp, n, None))), None)
    return Mlp(
        number=number,
        layer=layer,
        name=name,
        module=up.module if names.flat else mlp,
        names=names,
        gate=gate,
        up=up,
        down=WeightMatrix(getattr(mlp, names.down)),
        activation=F.silu if found is None else getattr(mlp, found),
        activation_name=found,
    )
