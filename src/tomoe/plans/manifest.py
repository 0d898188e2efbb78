"""plan.json: sizes, recipe, source, notes, and the checksum of the tensors beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tomoe.errors import Advice, UserError, shortened
from tomoe.files import atomic_write, read_json
from tomoe.model.shape import ModelShape

FORMAT = "tomoe-plan-1"
REPAIRED = "repair"  # the note of a plan whose projections were refitted: how, on what text, with what gain
FINETUNED = "finetuned"
"""The note of a plan whose weights were fine-tuned after folding: which weights, how, from which model."""
METADATA = ("source", "dense_config", "recipe", "notes")
# no model is larger: a plan with such sizes is an attack
MAX_SIZES = {
    "num_layers": 2**16,
    "hidden_size": 2**24,
    "mlp_size": 2**24,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "rotary_size": 2**16,
    "other_params": 2**48,
}


def write_head(folder: Path, plan: Any, own: dict[str, Any]) -> None:
    """Write plan.json atomically, with what all plans have beside its own values; the same plan gives the same bytes."""
    head = own | {name: getattr(plan, name) for name in METADATA}
    head |= {"format": FORMAT, "shape": asdict(plan.shape), "active_fraction": plan.active_fraction()}
    atomic_write(folder / "plan.json", json.dumps(head, indent=2, sort_keys=True) + "\n")


def read_head(folder: Path) -> dict[str, Any]:
    """plan.json of any plan. Raises UserError if the folder holds none, or one of an unknown format."""
    path = folder / "plan.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no plan (no plan.json); make one with `tomoe convert` or `tomoe plan`")
    head = read_json(path)
    if head.get("format") != FORMAT:
        raise UserError(
            f"{path} has format {str(head.get('format'))[:40]!r}, this version reads {FORMAT!r}; make the plan again or "
            "update tomoe"
        )
    return head


def is_of_inputs(head: dict[str, Any]) -> bool:
    """Whether plan.json is that of a plan whose tokens choose inputs (`plans.inputs`)."""
    return "projections" in head


@contextmanager
def damage_in_a_sentence(folder: Path, again: str | Advice = "make it again with `tomoe plan`") -> Iterator[None]:
    """What reading a damaged plan raises becomes a UserError; `again` says how to make such a plan."""
    try:
        yield
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        found = error.wrong if isinstance(error, UserError) else error
        reason = f"it lacks {error}" if isinstance(error, KeyError) else shortened(found)
        raise UserError(f"{folder} holds a damaged plan ({reason})", again) from error
    except OSError as error:
        raise UserError(f"cannot read the plan in {folder}: {error.strerror or error}") from error


def parsed_choices(head: dict[str, Any], shape: ModelShape) -> list[tuple[int, int]]:
    """(V/O dims, experts) of a token in each layer. Raises ValueError, KeyError or TypeError for values that no plan has."""
    columns = {name: head[name] for name in ("value_top_k", "experts_per_token")}
    for name, numbers in columns.items():
        if not isinstance(numbers, list) or any(type(k) is not int for k in numbers):
            raise TypeError(f"{name} is not a list of integers")
        if len(numbers) != shape.num_layers:
            raise ValueError(f"it holds {len(numbers)} layers, its model has {shape.num_layers}")
    return list(zip(*columns.values(), strict=True))


def parsed_shape(values: dict[str, Any]) -> ModelShape:
    """The sizes of the dense model of a plan. Raises ValueError or TypeError for sizes that no model has."""
    shape = ModelShape(**values)
    if type(shape.gated) is not bool:
        raise ValueError(f"its model has {str(shape.gated)[:40]!r} as gated")
    for name, most in MAX_SIZES.items():
        value, least = getattr(shape, name), 1 if name in ("num_layers", "hidden_size", "mlp_size") else 0
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"its model has {str(value)[:40]!r} as {name}")
    if len({bool(shape.num_heads), bool(shape.num_kv_heads), bool(shape.head_dim)}) > 1:
        raise ValueError("some sizes of its attention are 0 and others are not")
    if shape.num_heads % max(1, shape.num_kv_heads) or shape.rotary_size % 2 or shape.rotary_size > shape.head_dim:
        raise ValueError("its heads, key/value heads and rotary dims do not fit each other")
    return shape


def parsed_metadata(head: dict[str, Any]) -> dict[str, Any]:
    """source, dense_config, recipe and notes of a plan. Raises KeyError or TypeError for values that no plan has."""
    metadata, notes = {name: head[name] for name in METADATA}, head["notes"]
    for name, value in metadata.items():
        if not isinstance(value, str if name == "source" else dict):
            raise TypeError(f"{name} is a {type(value).__name__}")
    for name in (FINETUNED, REPAIRED):
        if not isinstance(notes.get(name, {}), dict):
            raise TypeError(f"its note {name} is a {type(notes[name]).__name__}")
    if any(type(notes.get(name, 0)) is not int for name in ("steps", "seq_len")):
        raise TypeError("steps or seq_len in its notes is not an integer")
    return metadata
