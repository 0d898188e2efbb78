"""The tensors of plan.safetensors: their names, shapes and dtypes.

Shapes: N experts, F neurons, D hidden size, Q choices of Q and K, C dims of a head, G key/value heads, E the embedding of a
value router.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tomoe.model.shape import ModelShape, ceil_div

Shape = tuple[int, ...]
StoredTensor = tuple[Shape, str]  # shape and dtype, as a safetensors file names it

# field of LayerPlan -> name of its tensor in plan.safetensors
TENSORS = {
    "expert_masks": "expert_neurons",
    "router_weight": "router_weight",
    "qk_kept": "qk_kept",
    "value_kept": "value_kept",
}
# the same, for tensors that only layers with fine-grained experts have, or with rotated values
FINE = {"shared_mask": "shared_neurons", "router_bias": "router_bias"}
ROTATION = {"value_rotation": "value_rotation"}
FIELDS = {name: field for field, name in (TENSORS | FINE).items()}
PACKED = ("expert_neurons", "shared_neurons")  # masks that are stored as bits
MASKS = ("qk_kept", "value_kept")
ROUTER = "value_router."
REFIT = "refit."
FLOATS: tuple[str, ...] = ("F32", "BF16", "F16")

ALWAYS = 1024.0
"""Router bias of a fine-grained expert that every token uses: so the shared part can be larger in some layers."""


def always_used(router_bias: Any) -> Any:
    """Mask [N] of the experts that every token uses, from router biases: those near ALWAYS, which training may have moved."""
    return router_bias >= ALWAYS / 2


def layer_shapes(s: ModelShape, n: int, shared: bool) -> dict[str, Shape]:
    """Shapes of the tensors in every layer with n experts, with a shared part or without."""
    shapes: dict[str, Shape] = {
        "expert_neurons": (n, s.mlp_size),
        "router_weight": (n, s.hidden_size),
        "qk_kept": (s.num_qk_choices,),
        "value_kept": (s.head_dim,),
    }
    return shapes | ({"shared_neurons": (s.mlp_size,), "router_bias": (n,)} if shared else {})


def router_shapes(s: ModelShape, e: int) -> dict[str, Shape]:
    """Shapes of a value router with an embedding of size e."""
    return {
        "project_in.weight": (e, s.hidden_size),
        "project_in.bias": (e,),
        "norm.weight": (e,),
        "norm.bias": (e,),
        "project_out.weight": (s.head_dim, e),
        "project_out.bias": (s.head_dim,),
    }


def refit_shapes(s: ModelShape, stored: dict[str, Shape]) -> dict[str, Shape]:
    """Return the shapes that the refitted projections named in `stored` must have."""
    expected: dict[str, Shape] = {}
    for part, size in (("down", s.mlp_size), ("output", s.num_heads * s.head_dim)):
        if f"{part}.weight" in stored:
            expected[f"{part}.weight"] = (s.hidden_size, size)
        elif any(name.startswith(f"{part}.") for name in stored):
            rank = stored.get(f"{part}.left", (0, 1))[-1]
            expected |= {f"{part}.left": (s.hidden_size, rank), f"{part}.right": (rank, size)}
    return expected


def checked_layers(stored: dict[str, StoredTensor], s: ModelShape) -> Iterator[list[str]]:
    """Return the names of each layer's tensors, within the layer. Raises ValueError or KeyError for a wrong tensor before any is
    read: it may have any size."""
    unread = dict(stored)
    for i in range(s.num_layers):
        prefix = f"layers.{i}."
        expected = _expected(unread, prefix, s)
        for part, (needed, dtypes) in expected.items():
            size, dtype = unread.pop(prefix + part)
            if size != needed or dtype not in dtypes:
                raise ValueError(f"{part} has shape {size} of {dtype}, the model needs {needed} of {dtypes[0]}")
        yield list(expected)
    if unread:
        raise ValueError(f"it holds {min(unread)[:40]!r}, which no plan has")


def _expected(stored: dict[str, StoredTensor], prefix: str, s: ModelShape) -> dict[str, tuple[Shape, tuple[str, ...]]]:
    """Shape and allowed dtypes of a layer's tensors, by its number of experts and the embedding size of its value router."""
    (experts, *_), _ = stored[f"{prefix}router_weight"]
    shapes = layer_shapes(s, experts, any(f"{prefix}{name}" in stored for name in FINE.values()))
    if any(name.startswith(prefix + ROUTER) for name in stored):
        (embedding, *_), _ = stored[f"{prefix}{ROUTER}norm.bias"]
        shapes |= {ROUTER + name: size for name, size in router_shapes(s, embedding).items()}
    shapes |= {name: s.rotation_shape for name in ROTATION.values() if prefix + name in stored}
    refit = prefix + REFIT
    stored_refit = {name.removeprefix(refit): size for name, (size, _) in stored.items() if name.startswith(refit)}
    shapes |= {REFIT + name: size for name, size in refit_shapes(s, stored_refit).items()}
    dtypes = dict.fromkeys(shapes, FLOATS) | dict.fromkeys(MASKS, ("BOOL",)) | dict.fromkeys(PACKED, ("U8",))
    # bytes of eight neurons, the first of them in the lowest bit
    shapes |= {name: (*shapes[name][:-1], ceil_div(shapes[name][-1], 8)) for name in PACKED if name in shapes}
    return {name: (size, dtypes[name]) for name, size in shapes.items()}
