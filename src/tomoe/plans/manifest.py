"""plan.json: sizes, recipe, source, notes, and the checksum of the tensors beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator
from safetensors import SafetensorError

from tomoe.errors import Advice, UserError, shortened
from tomoe.files import atomic_write, read_json
from tomoe.model.shape import ModelShape

FORMAT = "tomoe-plan-1"
REPAIRED = "repair"  # the note of a plan whose projections were refitted: how, on what text, with what gain
FINETUNED = "finetuned"
"""The note of a plan whose weights were fine-tuned after folding: which weights, how, from which model."""
METADATA = ("source", "dense_config", "recipe", "notes")


def _check_shape(shape: ModelShape) -> ModelShape:
    if len({bool(shape.num_heads), bool(shape.num_kv_heads), bool(shape.head_dim)}) > 1:
        raise ValueError("some sizes of its attention are 0 and others are not")
    if shape.num_heads % max(1, shape.num_kv_heads) or shape.rotary_size % 2 or shape.rotary_size > shape.head_dim:
        raise ValueError("its heads, key/value heads and rotary dims do not fit each other")
    return shape


def _check_notes(notes: dict[str, Any]) -> dict[str, Any]:
    for name, kind in {FINETUNED: dict, REPAIRED: dict, "steps": int, "seq_len": int}.items():
        if type(notes.get(name, kind())) is not kind:
            raise ValueError(f"its note {name} is a {type(notes[name]).__name__}")
    return notes


# What a file may hold, whoever wrote it.
Shape = Annotated[ModelShape, AfterValidator(_check_shape)]
Notes = Annotated[dict[str, Any], AfterValidator(_check_notes)]


def write_head(folder: Path, plan: Any, own: dict[str, Any]) -> None:
    """Write plan.json atomically: the keys of all plans, then its own values; the same plan gives the same bytes."""
    head = own | {name: getattr(plan, name) for name in METADATA}
    head |= {"format": FORMAT, "shape": asdict(plan.shape), "active_fraction": plan.active_fraction()}
    atomic_write(folder / "plan.json", json.dumps(head, indent=2, sort_keys=True) + "\n")


def read_head(folder: Path) -> dict[str, Any]:
    """Read plan.json of any plan. Raises UserError if the folder holds none, or one of an unknown format."""
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
    """Whether plan.json belongs to a plan of the form `inputs` (`plans.inputs`)."""
    return "path" in head


@contextmanager
def damage_in_a_sentence(folder: Path, again: str | Advice = "make it again with `tomoe plan`") -> Iterator[None]:
    """Turn errors of reading a damaged plan into a UserError; `again` says how to make such a plan."""
    try:
        yield
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        found = error.wrong if isinstance(error, UserError) else error
        reason = f"it lacks {error}" if isinstance(error, KeyError) else shortened(found)
        raise UserError(f"{folder} holds a damaged plan ({reason})", again) from error
    except OSError as error:
        raise UserError(f"cannot read the plan in {folder}: {error.strerror or error}") from error
