"""The plan: everything ToMoE learned, as data. (dense weights, plan) -> MoE is a pure function of these.

A plan is a folder with `plan.json` (sizes, recipe, source, checksum) and `plan.safetensors` (neuron sets, routers, kept
dims). It holds no dense weight, so it can be shared by itself. This module needs no torch unless tensors are asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError, safe_open

from tomoe.budget import active_params, decoder_params
from tomoe.errors import UserError, shortened
from tomoe.files import atomic_write, read_json, sha256
from tomoe.model.shape import ModelShape

# jaxtyping takes long to import; whoever checks shapes has imported it before
if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float

FORMAT = "tomoe-plan-1"
FINE_FORMAT = "tomoe-plan-2"
"""Plans of fine-grained experts: versions that know only the overlapping form must refuse them."""
ROTATED_FORMAT = "tomoe-plan-3"
"""Plans with rotated values, of any form: versions that do not rotate them must refuse them."""
# field of LayerPlan -> name of its tensor in plan.safetensors
_TENSORS = {
    "expert_masks": "expert_neurons", "router_weight": "router_weight", "qk_kept": "qk_kept", "value_kept": "value_kept",
}  # fmt: skip
# the same, for tensors that only fine-grained experts have, and those that only layers with rotated values have
_FINE = {"shared_mask": "shared_neurons", "router_bias": "router_bias"}
_ROTATION = {"value_rotation": "value_rotation"}
_MASKS = ("expert_neurons", "shared_neurons", "qk_kept", "value_kept")
_FIELDS = {name: field for field, name in (_TENSORS | _FINE).items()}
_ROUTER = "value_router."
# no model is larger: a plan with such sizes is an attack
MAX_SIZES = {
    "num_layers": 2**16, "hidden_size": 2**24, "mlp_size": 2**24, "num_heads": 2**16, "num_kv_heads": 2**16,
    "head_dim": 2**16, "rotary_size": 2**16,
}  # fmt: skip
_REFIT = "refit."
ALWAYS = 1024.0
"""Router bias of a fine-grained expert that every token uses: so the shared part can be larger in some layers."""


def always_used(router_bias: Any) -> Any:
    """The experts [N] that every token uses, from the biases of a router: those near ALWAYS, which training may have moved."""
    return router_bias >= ALWAYS / 2


REPAIRED = "repair"
"""The note of a plan whose projections were refitted: how, on what text, with what gain."""
FINETUNED = "finetuned"
"""The note of a plan whose weights were fine-tuned after folding: which weights, how, from which model."""


@dataclass(frozen=True)
class LayerPlan:
    """What one decoder layer keeps. All experts of a layer have the same width.

    There are two forms. `overlapping` (the paper's): a token uses one expert, and experts share neurons. `fine`: every
    neuron is in exactly one expert or in the shared part, and a token uses the shared part and `top_k` experts.
    """

    expert_masks: Bool[Any, "N F"]
    """Neuron f belongs to expert n. Stored as the tensor `expert_neurons`."""
    router_weight: Float[Any, "N D"]
    """One row per expert."""
    qk_kept: Bool[Any, " Q"]
    """Rotary pairs, then unpaired dims, that Q and K keep for every token."""
    value_kept: Bool[Any, " C"]
    """Dims of V and O that any token uses, in the basis of `value_rotation`."""
    value_top_k: int
    """K, the value dims of one token; fewer than are kept only if a value router chooses among them."""
    value_router: dict[str, Any] = field(default_factory=dict)
    """The state of `routing.ValueRouter`, or empty."""
    refit: dict[str, Any] = field(default_factory=dict)
    """Refitted projections by repair: `down.weight` [D F], or `down.left` [D r] and `down.right` [r F], whose product is
    added to the dense matrix; the same under `output` [D H*C], not rotated. Empty: the dense matrices stay."""
    shared_mask: Bool[Any, " F"] | None = None
    """Neurons that every token uses; None for overlapping experts."""
    router_bias: Float[Any, " N"] | None = None
    """Added to the router's logits; None for overlapping experts."""
    top_k: int = 1
    """Experts of a token."""
    value_rotation: Float[Any, "G C C"] | None = None
    """Orthogonal matrix of every key/value head, whose columns are the V/O dims; None: the model's own dims."""

    def refitted(self, part: Literal["down", "output"], weight: Any) -> Any:
        """Return the matrix that replaces the dense `weight` [D n] of a projection, in its dtype; `weight` if none does."""
        if f"{part}.weight" in self.refit:
            return self.refit[f"{part}.weight"].to(weight)
        if f"{part}.left" in self.refit:
            left, right = (self.refit[f"{part}.{side}"].to(weight.device).float() for side in ("left", "right"))
            return (weight.float() + left @ right).to(weight.dtype)
        return weight

    @property
    def fine(self) -> bool:
        """Whether the experts are fine-grained."""
        return self.shared_mask is not None

    @property
    def always_used(self) -> Bool[Any, " N"]:
        """The fine-grained experts that every token uses, because their bias is ALWAYS."""
        assert self.router_bias is not None
        return always_used(self.router_bias)

    @property
    def expert_size(self) -> int:
        """Neurons of one expert."""
        return int(self.expert_masks[0].sum())

    @property
    def shared_size(self) -> int:
        """Neurons of the shared part."""
        return 0 if self.shared_mask is None else int(self.shared_mask.sum())

    @property
    def width(self) -> int:
        """Neurons that a token uses."""
        return self.shared_size + self.top_k * self.expert_size

    @property
    def union(self) -> int:
        """Neurons that some token can use."""
        return int(self.expert_masks.any(0).sum()) + self.shared_size


@dataclass(frozen=True)
class Plan:
    """A validated plan. Raises UserError at construction if its parts contradict each other."""

    shape: ModelShape
    """Sizes of the dense model."""
    layers: tuple[LayerPlan, ...]
    """One per decoder layer."""
    source: str = ""
    """Fingerprint of the dense weights."""
    dense_config: dict[str, Any] = field(default_factory=dict)
    """Config of the dense model, as transformers writes it."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The recipe of the conversion; a plan of format 1 may have older keys, which `Recipe` understands."""
    notes: dict[str, Any] = field(default_factory=dict)
    """How the plan was made: steps, sequence length, versions."""

    def __post_init__(self) -> None:
        if len(self.layers) != self.shape.num_layers:
            raise UserError(f"the plan has {len(self.layers)} layers, but its model has {self.shape.num_layers}")
        for i, layer in enumerate(self.layers):
            error = _validation_error(layer, self.shape)
            if error:
                raise UserError(f"layer {i} of the plan is broken: {error}; make the plan again with `tomoe plan`")
        experts = sorted({len(layer.router_weight) for layer in self.layers})
        embeddings = sorted({len(layer.value_router["norm.bias"]) for layer in self.layers if layer.value_router})
        if len({layer.fine for layer in self.layers}) > 1:
            raise UserError(
                "the layers of the plan differ: some have fine-grained experts, others overlapping ones; make the plan "
                "again with `tomoe plan`"
            )
        if len(experts) > 1 or len(embeddings) > 1:
            sizes = f"{experts} experts" if len(experts) > 1 else f"embeddings of {embeddings}"
            raise UserError(f"the layers of the plan differ: {sizes}; make the plan again with `tomoe plan`")

    def qk_dims(self, i: int) -> int:
        """Return how many dims of a head Q and K keep in layer i."""
        kept, pairs = self.layers[i].qk_kept, self.shape.rotary_size // 2
        return self.shape.kept_qk_dims(int(kept[:pairs].sum()), int(kept[pairs:].sum()))

    def widths(self) -> list[tuple[int, int, int]]:
        """Return (MLP width, Q/K dims, V/O dims of a token) of every layer."""
        return [(layer.width, self.qk_dims(i), layer.value_top_k) for i, layer in enumerate(self.layers)]

    @property
    def num_experts(self) -> int:
        """Experts of a layer (N)."""
        return int(self.layers[0].expert_masks.shape[0])

    @property
    def form(self) -> Literal["overlapping", "fine"]:
        """The form of the experts."""
        return "fine" if self.layers[0].fine else "overlapping"

    @property
    def dynamic_values(self) -> bool:
        """Whether tokens choose their V/O dims in any layer."""
        return any(layer.value_router for layer in self.layers)

    def active_fraction(self) -> float:
        """Return the fraction of decoder parameters that are active for a token, the paper's p; the same for all tokens."""
        return float(active_params(self.shape, self.widths())) / decoder_params(self.shape)

    @property
    def rotated(self) -> bool:
        """Whether V/O dims are in a basis of their own in any layer."""
        return any(layer.value_rotation is not None for layer in self.layers)

    def totals(self) -> dict[str, Any]:
        """Return counts over all layers: layers, experts, and decoder parameters that exist, are active, are stored."""
        total = decoder_params(self.shape)
        stored = [(layer.union, self.qk_dims(i), int(layer.value_kept.sum())) for i, layer in enumerate(self.layers)]
        routers = [t for layer in self.layers for t in (layer.router_weight, *layer.value_router.values())]
        routers += [layer.router_bias for layer in self.layers if layer.router_bias is not None]
        return {
            "num_layers": self.shape.num_layers,
            "num_experts": self.num_experts,
            "active_fraction": self.active_fraction(),
            "decoder_params": total,
            "active_decoder_params": round(self.active_fraction() * total),
            "stored_decoder_params": int(active_params(self.shape, stored)),
            "router_params": sum(math.prod(t.shape) for t in routers),
        }

    def save(self, folder: Path) -> None:
        """Write both files atomically; the same plan gives the same bytes. Raises UserError if they cannot be written."""
        from safetensors.torch import save

        tensors: dict[str, Any] = {}
        for i, layer in enumerate(self.layers):
            names = _TENSORS | (_FINE if layer.fine else {}) | ({} if layer.value_rotation is None else _ROTATION)
            parts = {name: getattr(layer, field) for field, name in names.items()}
            parts |= {f"{_ROUTER}{k}": v for k, v in layer.value_router.items()}
            parts |= {f"{_REFIT}{k}": v for k, v in layer.refit.items()}
            tensors |= {f"layers.{i}.{name}": t.contiguous().cpu() for name, t in parts.items()}
        plan_format = ROTATED_FORMAT if self.rotated else FINE_FORMAT if self.form == "fine" else FORMAT
        data = save(tensors, metadata={"format": plan_format})
        head = {
            "format": plan_format,
            "shape": self.shape.to_dict(),
            "value_top_k": [layer.value_top_k for layer in self.layers],
            "active_fraction": self.active_fraction(),
            "source": self.source,
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
            "dense_config": self.dense_config,
            "recipe": self.recipe,
            "notes": self.notes,
        }
        if plan_format != FORMAT:
            head["experts_per_token"] = [layer.top_k for layer in self.layers]
        atomic_write(folder / "plan.safetensors", data)
        atomic_write(folder / "plan.json", json.dumps(head, indent=2, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: Path, arrays: Literal["torch", "numpy"] = "torch") -> Plan:
        """Read and check a plan. Its tensors are of torch, or of numpy for callers that only count (torch loads slowly).

        With numpy the checksum is not computed: a repaired plan can have gigabytes, of which counting reads little.
        Raises UserError if the folder holds no plan, a damaged one, or one of an unknown format.
        """
        head_path, tensor_path = folder / "plan.json", folder / "plan.safetensors"
        if not head_path.is_file() or not tensor_path.is_file():
            raise UserError(f"{folder} holds no plan (plan.json and plan.safetensors); make one with `tomoe plan`")
        head = read_json(head_path)
        if head.get("format") not in (FORMAT, FINE_FORMAT, ROTATED_FORMAT):
            raise UserError(
                f"{head_path} has format {str(head.get('format'))[:40]!r}, this version reads {FORMAT!r}, {FINE_FORMAT!r} "
                f"and {ROTATED_FORMAT!r}; make the plan again or update tomoe"
            )
        if arrays == "torch" and sha256(tensor_path) != head.get("tensors_sha256"):
            raise UserError(
                f"{tensor_path} does not belong to {head_path.name} (checksums differ); copy both files again"
            )
        try:
            shape, chosen, metadata = _read_header(head)
            return cls(shape, _read_layers(tensor_path, shape, chosen, arrays), **metadata)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else shortened(error)
            raise UserError(f"{folder} holds a damaged plan ({reason}); make it again with `tomoe plan`") from error

    def describe(self) -> list[dict[str, Any]]:
        """Return one row per layer, for a table; the keys are columns, `active` is the fraction of the layer's parameters."""
        s = self.shape
        layer_params = decoder_params(s) / s.num_layers
        return [
            {
                "layer": i,
                "shared": self.layers[i].shared_size,
                "expert_size": self.layers[i].expert_size,
                "top_k": self.layers[i].top_k,
                "width": width,
                "width_share": width / s.mlp_size,
                "union_share": self.layers[i].union / s.mlp_size,
                "qk_dims": qk,
                "value_dims": v,
                "active": float(active_params(s, [(width, qk, v)])) / layer_params,
            }
            for i, (width, qk, v) in enumerate(self.widths())
        ]


def _shapes(s: ModelShape, n: int, fine: bool) -> dict[str, tuple[int, ...]]:
    shapes = {"expert_neurons": (n, s.mlp_size), "router_weight": (n, s.hidden_size),
              "qk_kept": (s.num_qk_choices,), "value_kept": (s.head_dim,)}  # fmt: skip
    return shapes | {"shared_neurons": (s.mlp_size,), "router_bias": (n,)} if fine else shapes


def _router_shapes(s: ModelShape, e: int) -> dict[str, tuple[int, ...]]:
    return {"project_in.weight": (e, s.hidden_size), "project_in.bias": (e,), "norm.weight": (e,), "norm.bias": (e,),
            "project_out.weight": (s.head_dim, e), "project_out.bias": (s.head_dim,)}  # fmt: skip


def _validation_error(layer: LayerPlan, s: ModelShape) -> str | None:
    n = layer.expert_masks.shape[0]
    for name, shape in _shapes(s, n, layer.fine).items():
        t = getattr(layer, _FIELDS[name])
        if t is None or tuple(t.shape) != shape:
            return f"{name} has shape {None if t is None else tuple(t.shape)}, the model needs {shape}"
    widths = layer.expert_masks.sum(1)
    if n < 1 or int(widths.min()) < 1:
        return "an expert has no neuron"
    if int(widths.min()) != int(widths.max()):
        return f"its experts have unequal widths ({int(widths.min())} to {int(widths.max())})"
    if not 1 <= layer.top_k <= (n if layer.fine else 1):
        return f"a token uses {layer.top_k} of its {n} experts"
    if layer.fine and not bool((layer.expert_masks.sum(0) + layer.shared_mask == 1).all()):
        return "a neuron is in no expert, or in several"
    if not bool(layer.qk_kept.any()) or not 1 <= layer.value_top_k <= int(layer.value_kept.sum()):
        return f"it keeps no Q/K dim, or K = {layer.value_top_k} of {int(layer.value_kept.sum())} V/O dims"
    if not layer.value_router and layer.value_top_k != int(layer.value_kept.sum()):
        return "tokens are to choose value dims, but it has no value router"
    if layer.value_router:
        parts = _router_shapes(s, len(layer.value_router.get("norm.bias", ())))
        shapes = {name: tuple(t.shape) for name, t in layer.value_router.items()}
        if shapes != parts:
            return f"its value router holds {shapes}, the model needs {parts}"
        if not bool(layer.value_kept.all()) or layer.value_top_k == s.head_dim:
            return "it has a value router, but no choice among all V/O dims"
    if layer.value_rotation is not None and (error := s.rotation_error(layer.value_rotation)):
        return error
    refit_shapes = {name: tuple(t.shape) for name, t in layer.refit.items()}
    if refit_shapes != (needed := _refit_shapes(s, refit_shapes)):
        return f"its refitted projections are {refit_shapes}, the model needs {needed}"
    tensors = {
        "router": [layer.router_weight, *layer.value_router.values(), *([layer.router_bias] if layer.fine else [])],
        "refitted projection": layer.refit.values(),
    }
    for what, group in tensors.items():
        if not all(bool((abs(t) < math.inf).all()) for t in group):
            return f"a {what} holds a number that is not finite"
    return None


def _refit_shapes(s: ModelShape, stored: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the refitted projections named in `stored` must have."""
    expected: dict[str, tuple[int, ...]] = {}
    for part, size in (("down", s.mlp_size), ("output", s.num_heads * s.head_dim)):
        if f"{part}.weight" in stored:
            expected[f"{part}.weight"] = (s.hidden_size, size)
        elif any(name.startswith(f"{part}.") for name in stored):
            rank = stored.get(f"{part}.left", (0, 1))[-1]
            expected |= {f"{part}.left": (s.hidden_size, rank), f"{part}.right": (rank, size)}
    return expected


def _read_header(head: dict[str, Any]) -> tuple[ModelShape, list[tuple[int, int]], dict[str, Any]]:
    """Return the sizes, (V/O dims, experts) of a token in each layer, and the other fields of a Plan.

    Raises ValueError, KeyError or TypeError for values that no plan has.
    """
    shape = ModelShape(**head["shape"])
    if type(shape.gated) is not bool:
        raise ValueError(f"its model has {str(shape.gated)[:40]!r} as gated")
    for name, most in MAX_SIZES.items():
        value, least = getattr(shape, name), 0 if name == "rotary_size" else 1
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"its model has {str(value)[:40]!r} as {name}")
    if shape.num_heads % shape.num_kv_heads or shape.rotary_size % 2 or shape.rotary_size > shape.head_dim:
        raise ValueError("its heads, key/value heads and rotary dims do not fit each other")
    value_top_k, notes = head["value_top_k"], head["notes"]
    top_k = [1] * shape.num_layers if head["format"] == FORMAT else head["experts_per_token"]
    for name, numbers in (("value_top_k", value_top_k), ("experts_per_token", top_k)):
        if not isinstance(numbers, list) or any(type(k) is not int for k in numbers):
            raise TypeError(f"{name} is not a list of integers")
        if len(numbers) != shape.num_layers:
            raise ValueError(f"it holds {len(numbers)} layers, its model has {shape.num_layers}")
    metadata = {name: head[name] for name in ("source", "dense_config", "recipe", "notes")}
    for name, value in metadata.items():
        if not isinstance(value, str if name == "source" else dict):
            raise TypeError(f"{name} is a {type(value).__name__}")
    for name in (FINETUNED, REPAIRED):
        if not isinstance(notes.get(name, {}), dict):
            raise TypeError(f"its note {name} is a {type(notes[name]).__name__}")
    # plans of format 1 call it block_size
    if "block_size" in notes:
        seq_len = {"seq_len": notes["block_size"]}
        metadata["notes"] = notes = {name: note for name, note in notes.items() if name != "block_size"} | seq_len
    if any(type(notes.get(name, 0)) is not int for name in ("steps", "seq_len")):
        raise TypeError("steps or seq_len in its notes is not an integer")
    return shape, list(zip(value_top_k, top_k, strict=True)), metadata


def _read_layers(path: Path, shape: ModelShape, chosen: list[tuple[int, int]], arrays: str) -> tuple[LayerPlan, ...]:
    """Read the layers. Raises ValueError or KeyError for a wrong tensor before it is read: it may be of any size."""
    layers = []
    with safe_open(path, "pt" if arrays == "torch" else "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        unread = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        # numpy has no bfloat16
        # refitted projections are not read by who only counts
        if arrays == "numpy" and any(dtype == "BF16" and _REFIT not in name for name, (_, dtype) in unread.items()):
            return _read_layers(path, shape, chosen, "torch")
        for i, (value_top_k, top_k) in enumerate(chosen):
            tensors = {}
            for part, expected in _expected_shapes(unread, f"layers.{i}.", shape).items():
                size, dtype = unread.pop(f"layers.{i}.{part}")
                dtypes = ("BOOL",) if part in _MASKS else ("F32", "BF16", "F16")
                if size != expected or dtype not in dtypes:
                    raise ValueError(f"{part} has shape {size} of {dtype}, the model needs {expected} of {dtypes[0]}")
                if part.startswith(_REFIT):
                    # numpy has no bfloat16, and who only counts does not look at them
                    if arrays == "torch":
                        tensors[part] = file.get_tensor(f"layers.{i}.{part}")
                else:
                    tensors[part] = _float32(file.get_tensor(f"layers.{i}.{part}"), dtype)
            router = {part.removeprefix(_ROUTER): t for part, t in tensors.items() if part.startswith(_ROUTER)}
            fields = {field: tensors[name] for field, name in (_TENSORS | _FINE | _ROTATION).items() if name in tensors}
            refit = {part.removeprefix(_REFIT): t for part, t in tensors.items() if part.startswith(_REFIT)}
            layers.append(LayerPlan(**fields, value_top_k=value_top_k, value_router=router, refit=refit, top_k=top_k))
        if unread:
            raise ValueError(f"it holds {min(unread)[:40]!r}, which no plan has")
    return tuple(layers)


def _float32(t: Any, dtype: str) -> Any:
    """Convert routers to float32 from whatever they are stored in; masks stay as they are."""
    if dtype == "BOOL":
        return t
    return t.float() if hasattr(t, "float") else t.astype("float32")


def _expected_shapes(stored: dict[str, Any], prefix: str, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors, by its number of experts and the embedding size of its value router."""
    (experts, *_), _ = stored[f"{prefix}router_weight"]
    parts = _shapes(shape, experts, any(f"{prefix}{name}" in stored for name in _FINE.values()))
    if any(name.startswith(prefix + _ROUTER) for name in stored):
        (embedding, *_), _ = stored[f"{prefix}{_ROUTER}norm.bias"]
        parts |= {_ROUTER + name: size for name, size in _router_shapes(shape, embedding).items()}
    parts |= {name: shape.rotation_shape for name in _ROTATION.values() if prefix + name in stored}
    refit = prefix + _REFIT
    stored_refit = {name.removeprefix(refit): size for name, (size, _) in stored.items() if name.startswith(refit)}
    return parts | {_REFIT + name: size for name, size in _refit_shapes(shape, stored_refit).items()}
