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
from tomoe.errors import UserError
from tomoe.files import read_json, sha256, write_whole
from tomoe.model.structure import ModelShape

FORMAT = "tomoe-plan-1"
_MASKS = ("expert_neurons", "qk_kept", "value_kept")
_ROUTER = "value_router."
# No model is larger; a plan that says so is a trap.
_MOST = {
    "num_layers": 2**16, "hidden_size": 2**24, "mlp_size": 2**24, "num_heads": 2**16, "num_kv_heads": 2**16,
    "head_dim": 2**16, "rotary_size": 2**16,
}  # fmt: skip
FINETUNED = "finetuned"  # the note of a plan whose weights learned on after folding: which, how, from what


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
        head = read_json(head_path)
        if head.get("format") != FORMAT:
            raise UserError(
                f"{head_path} has format {str(head.get('format'))[:40]!r}, this version reads {FORMAT!r}; "
                "make the plan again or update tomoe"
            )
        if sha256(tensor_path) != head.get("tensors_sha256"):
            raise UserError(
                f"{tensor_path} is not the file that {head_path.name} speaks of (checksums differ); copy both again"
            )
        try:
            shape, top_k, papers = _read_papers(head)
            return cls(shape, _read_layers(tensor_path, shape, top_k), **papers)
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            if isinstance(error, UserError):
                raise
            why = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise UserError(f"{folder} holds a damaged plan ({why}); make it again with `tomoe plan`") from error

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


def _shapes(s: ModelShape, n: int) -> dict[str, tuple[int, ...]]:
    return {"expert_neurons": (n, s.mlp_size), "router_weight": (n, s.hidden_size),
            "qk_kept": (s.num_qk_choices,), "value_kept": (s.head_dim,)}  # fmt: skip


def _router_shapes(s: ModelShape, e: int) -> dict[str, tuple[int, ...]]:
    return {"project_in.weight": (e, s.hidden_size), "project_in.bias": (e,), "norm.weight": (e,), "norm.bias": (e,),
            "project_out.weight": (s.head_dim, e), "project_out.bias": (s.head_dim,)}  # fmt: skip


def _problem(layer: LayerPlan, s: ModelShape) -> str | None:
    n = layer.expert_neurons.shape[0]
    for name, shape in _shapes(s, n).items():
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
        parts = _router_shapes(s, len(layer.value_router.get("norm.bias", ())))
        found = {name: tuple(t.shape) for name, t in layer.value_router.items()}
        if found != parts:
            return f"its value router holds {found}, the model asks for {parts}"
        if not bool(layer.value_kept.all()) or layer.value_top_k == s.head_dim:
            return "it has a value router, but no choice among all V/O dims"
    tensors = [layer.router_weight, *layer.value_router.values()]
    if not all(bool(t.isfinite().all()) for t in tensors):
        return "a router holds a number that is not finite"
    return None


def _read_papers(head: dict[str, Any]) -> tuple[ModelShape, list[int], dict[str, Any]]:
    """Sizes, K of each layer, and the rest of plan.json. Raises ValueError, KeyError or TypeError for what cannot be."""
    shape = ModelShape(**head["shape"])
    for name, value in shape.to_dict().items():
        wanted, most = (bool, True) if name == "gated" else (int, _MOST[name])
        if type(value) is not wanted or (not name == "gated" and not (name != "rotary_size") <= value <= most):
            raise ValueError(f"its model has {str(value)[:40]!r} as {name}")
    if shape.num_heads % shape.num_kv_heads or shape.rotary_size % 2 or shape.rotary_size > shape.head_dim:
        raise ValueError("its heads, key/value heads and rotary dims do not fit each other")
    top_k, notes = head["value_top_k"], head["notes"]
    if not isinstance(top_k, list) or any(type(k) is not int for k in top_k):
        raise TypeError("value_top_k is no list of numbers")
    if len(top_k) != shape.num_layers:
        raise ValueError(f"it holds {len(top_k)} layers, its model has {shape.num_layers}")
    papers = {name: head[name] for name in ("source", "dense_config", "recipe", "notes")}
    for name, value in papers.items():
        if not isinstance(value, str if name == "source" else dict):
            raise TypeError(f"{name} is a {type(value).__name__}")
    if not isinstance(notes.get(FINETUNED, {}), dict):
        raise TypeError(f"its note {FINETUNED} is a {type(notes[FINETUNED]).__name__}")
    if any(type(notes.get(name, 0)) is not int for name in ("steps", "block_size")):
        raise TypeError("its notes count in words")
    return shape, top_k, papers


def _read_layers(path: Path, shape: ModelShape, top_k: list[int]) -> tuple[LayerPlan, ...]:
    """Raises ValueError or KeyError for a tensor that is no plan's before it is read: a file may be of any size."""
    layers = []
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        for i, k in enumerate(top_k):
            own = {}
            for part, wanted in _wanted(found, f"layers.{i}.", shape).items():
                size, kind = found.pop(f"layers.{i}.{part}")
                kinds = ("BOOL",) if part in _MASKS else ("F32", "BF16", "F16")
                if size != wanted or kind not in kinds:
                    raise ValueError(f"{part} has shape {size} of {kind}, the model asks for {wanted} of {kinds[0]}")
                own[part] = file.get_tensor(f"layers.{i}.{part}")
            routers = {part.removeprefix(_ROUTER): t.float() for part, t in own.items() if part.startswith(_ROUTER)}
            masks = [own[name] for name in _MASKS]
            layers.append(LayerPlan(masks[0], own["router_weight"].float(), masks[1], masks[2], k, routers))
        if found:
            raise ValueError(f"it holds {min(found)[:40]!r}, which no plan has")
    return tuple(layers)


def _wanted(found: dict[str, Any], prefix: str, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """What a layer should hold, by its number of experts and, where it has a value router, its embedding size."""
    (experts, *_), _ = found[f"{prefix}router_weight"]
    parts = _shapes(shape, experts)
    if any(name.startswith(prefix + _ROUTER) for name in found):
        (embedding, *_), _ = found[f"{prefix}{_ROUTER}norm.bias"]
        parts |= {_ROUTER + name: size for name, size in _router_shapes(shape, embedding).items()}
    return parts
