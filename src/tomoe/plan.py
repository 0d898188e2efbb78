"""The plan: everything ToMoE learned, as data. (dense weights, plan) -> MoE is a pure function of these.

A plan is a folder with `plan.json` (sizes, recipe, source, checksum) and `plan.safetensors` (neuron sets, routers, kept
dims). It holds no base weight and travels by itself.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import Bool, Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tomoe.budget import active_params, block_total
from tomoe.dense import ModelShape
from tomoe.errors import UserError
from tomoe.files import write_whole

FORMAT = "tomoe-plan-1"
ATTENTION_MODES = ("dynamic", "static", "none")


@dataclass(frozen=True)
class LayerPlan:
    """What one decoder layer keeps. Widths of all experts of a layer are equal."""

    expert_neurons: Bool[Tensor, "N F"]  # neuron f belongs to expert n; experts may share neurons
    router_weight: Float[Tensor, "N D"]
    qk_kept: Bool[Tensor, " Q"]  # rotary pairs, then unpaired dims, kept in Q and K for every token
    value_kept: Bool[Tensor, " C"]  # dims of V and O that exist at all
    value_top_k: int  # K, the value dims of one token; fewer than exist only where a value router chooses
    value_router: dict[str, Tensor] = field(default_factory=dict)  # state of routing.ValueRouter, or empty

    @property
    def width(self) -> int:
        return int(self.expert_neurons[0].sum())

    @property
    def union(self) -> int:
        """Neurons that some expert uses."""
        return int(self.expert_neurons.any(0).sum())


@dataclass(frozen=True)
class Plan:
    """A validated plan. Raises UserError at construction where the parts contradict each other."""

    shape: ModelShape
    layers: tuple[LayerPlan, ...]
    source: str = ""  # fingerprint of the dense weights
    dense_config: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)  # how it was made: steps, tokens, versions

    def __post_init__(self) -> None:
        if len(self.layers) != self.shape.num_layers:
            raise UserError(f"the plan has {len(self.layers)} layers, but its model has {self.shape.num_layers}")
        for i, layer in enumerate(self.layers):
            problem = _problem(layer, self.shape)
            if problem:
                raise UserError(f"layer {i} of the plan is broken: {problem}; make the plan again with `tomoe plan`")
        experts = sorted({len(layer.router_weight) for layer in self.layers})
        embeddings = sorted({len(layer.value_router["norm.bias"]) for layer in self.layers if layer.value_router})
        if len(experts) > 1 or len(embeddings) > 1:
            sizes = f"{experts} experts" if len(experts) > 1 else f"embeddings of {embeddings}"
            raise UserError(f"the layers of the plan differ: {sizes}; make the plan again with `tomoe plan`")

    def qk_dims(self, i: int) -> int:
        return int(self.shape.qk_dims(self.layers[i].qk_kept).numel())

    def widths(self) -> list[tuple[int, int, int]]:
        """(MLP width, Q/K dims, V/O dims of a token) of every layer."""
        return [(layer.width, self.qk_dims(i), layer.value_top_k) for i, layer in enumerate(self.layers)]

    @property
    def num_experts(self) -> int:
        return int(self.layers[0].expert_neurons.shape[0])

    @property
    def dynamic_values(self) -> bool:
        return any(layer.value_router for layer in self.layers)

    def active_fraction(self) -> float:
        """Active share of the block parameters, the paper's p; the same for every token."""
        return float(active_params(self.shape, self.widths())) / block_total(self.shape)

    def save(self, folder: Path) -> None:
        """Write both files under temporary names, then rename; the same plan gives the same bytes."""
        tensors: dict[str, Tensor] = {}
        for i, layer in enumerate(self.layers):
            parts = {
                name: getattr(layer, name) for name in ("expert_neurons", "router_weight", "qk_kept", "value_kept")
            }
            parts |= {f"value_router.{k}": v for k, v in layer.value_router.items()}
            tensors |= {f"layers.{i}.{name}": t.contiguous().cpu() for name, t in parts.items()}
        data = save(tensors, metadata={"format": FORMAT})
        head = {
            "format": FORMAT,
            "shape": self.shape.to_dict(),
            "value_top_k": [layer.value_top_k for layer in self.layers],
            "active_fraction": self.active_fraction(),
            "source": self.source,
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
            "dense_config": self.dense_config,
            "recipe": self.recipe,
            "notes": self.notes,
        }
        write_whole(folder / "plan.safetensors", data)
        write_whole(folder / "plan.json", json.dumps(head, indent=2, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Raises UserError where the folder holds no plan, a damaged one, or one of a format we do not know."""
        head_path, tensor_path = folder / "plan.json", folder / "plan.safetensors"
        if not head_path.is_file() or not tensor_path.is_file():
            raise UserError(f"{folder} holds no plan (plan.json and plan.safetensors); make one with `tomoe plan`")
        head = _read_head(head_path)
        if hashlib.sha256(tensor_path.read_bytes()).hexdigest() != head.get("tensors_sha256"):
            raise UserError(
                f"{tensor_path} is not the file that {head_path.name} speaks of (checksums differ); copy both again"
            )
        try:
            shape = ModelShape(**head["shape"])
            top_k = [int(k) for k in head["value_top_k"]]
            layers = _read_layers(tensor_path, shape, top_k)
            return cls(shape, layers, head["source"], head["dense_config"], head["recipe"], head["notes"])
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{folder} holds a damaged plan ({error}); make it again with `tomoe plan`") from error

    def describe(self) -> list[dict[str, Any]]:
        """One row per layer, for a table."""
        s = self.shape
        whole = block_total(s) / s.num_layers
        return [
            {
                "layer": i,
                "width": width,
                "width_share": width / s.mlp_size,
                "union_share": self.layers[i].union / s.mlp_size,
                "qk_dims": qk,
                "value_dims": v,
                "active": float(active_params(s, [(width, qk, v)])) / whole,
            }
            for i, (width, qk, v) in enumerate(self.widths())
        ]


def _problem(layer: LayerPlan, s: ModelShape) -> str | None:
    n = layer.expert_neurons.shape[0]
    expected = {"expert_neurons": (n, s.mlp_size), "router_weight": (n, s.hidden_size),
                "qk_kept": (s.num_qk_choices,), "value_kept": (s.head_dim,)}  # fmt: skip
    for name, shape in expected.items():
        if tuple(getattr(layer, name).shape) != shape:
            return f"{name} has shape {tuple(getattr(layer, name).shape)}, the model asks for {shape}"
    widths = layer.expert_neurons.sum(1)
    if n < 1 or int(widths.min()) < 1:
        return "an expert has no neuron"
    if int(widths.min()) != int(widths.max()):
        return f"its experts have unequal widths ({int(widths.min())} to {int(widths.max())})"
    if not bool(layer.qk_kept.any()) or not 1 <= layer.value_top_k <= int(layer.value_kept.sum()):
        return f"it keeps no Q/K dim, or K = {layer.value_top_k} of {int(layer.value_kept.sum())} V/O dims"
    if not layer.value_router and layer.value_top_k != int(layer.value_kept.sum()):
        return "it asks for a choice of value dims per token, but has no value router"
    if layer.value_router:
        e = len(layer.value_router.get("norm.bias", ()))
        parts = {"project_in.weight": (e, s.hidden_size), "project_in.bias": (e,), "norm.weight": (e,), "norm.bias": (e,),
                 "project_out.weight": (s.head_dim, e), "project_out.bias": (s.head_dim,)}  # fmt: skip
        found = {name: tuple(t.shape) for name, t in layer.value_router.items()}
        if found != parts:
            return f"its value router holds {found}, the model asks for {parts}"
        if not bool(layer.value_kept.all()) or layer.value_top_k == s.head_dim:
            return "it has a value router, but no choice among all V/O dims"
    tensors = [layer.router_weight, *layer.value_router.values()]
    if not all(bool(t.isfinite().all()) for t in tensors):
        return "a router holds a number that is not finite"
    return None


def _read_head(path: Path) -> dict[str, Any]:
    try:
        head = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON ({error}); it is damaged or no plan") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        found = head.get("format") if isinstance(head, dict) else type(head).__name__
        raise UserError(
            f"{path} has format {found!r}, this version reads {FORMAT!r}; make the plan again or update tomoe"
        )
    return head


def _read_layers(path: Path, shape: ModelShape, top_k: list[int]) -> tuple[LayerPlan, ...]:
    layers = []
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        for i, k in enumerate(top_k):
            prefix = f"layers.{i}."
            own = {n.removeprefix(prefix): file.get_tensor(n) for n in sorted(names) if n.startswith(prefix)}
            routers = {n.removeprefix("value_router."): t for n, t in own.items() if n.startswith("value_router.")}
            masks = [own[n].bool() for n in ("expert_neurons", "qk_kept", "value_kept")]
            layers.append(LayerPlan(masks[0], own["router_weight"].float(), masks[1], masks[2], k, routers))
    if len(layers) != shape.num_layers:
        raise UserError(f"{path} holds {len(layers)} layers, its model has {shape.num_layers}")
    return tuple(layers)
