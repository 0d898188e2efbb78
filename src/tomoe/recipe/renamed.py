"""Keys of recipe format 1 and the names that they have now: older recipes, plans and runs still load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tomoe.errors import UserError


@dataclass(frozen=True)
class Renamed:
    """What became of a key: its new dotted name ("" if the key is gone) and the new names of single values.

    A value mapped to None is gone, too; `advice` says what to do about it.
    """

    key: str
    values: Mapping[str, str | None] = field(default_factory=dict)
    advice: str = ""


RUN = {
    "track": Renamed("report_to"),
    "train.gradient_accumulation": Renamed("train.gradient_accumulation_steps"),
    "train.max_bad_steps": Renamed("train.max_nonfinite_steps"),
    "data.block_size": Renamed("data.seq_len"),
}
CONVERSION = RUN | {
    "stream": Renamed("offload"),
    "experts.attention": Renamed("attention.pruning", {"none": "off", "dynamic": "per_token"}),
    "experts.attention_embedding": Renamed("attention.embedding"),
    "experts.attention_share": Renamed("attention.share"),
    "train.base": Renamed(
        "train.quantization",
        {"dense": "none", "bnb8": "int8", "bnb4": "nf4", "torchao8": None},
        "use train.quantization = int8",
    ),
}

FINETUNING = RUN | {"form": Renamed("", {"pseudo": None}, "remove the key: the converted model itself learns the same")}


def upgrade(values: dict[str, Any], renamed: Mapping[str, Renamed]) -> tuple[dict[str, Any], list[str]]:
    """The values under today's keys, and one sentence for each key that had another name.

    If a value stands under both names, the new name counts. Raises UserError for a value that is gone.
    """
    upgraded: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    notes = []
    for old in renamed:
        section, _, leaf = old.rpartition(".")
        place = upgraded.get(section) if section else upgraded
        if not isinstance(place, dict) or leaf not in place:
            continue
        key, value, note = upgrade_key(old, place.pop(leaf), renamed)
        notes.append(note)
        target, _, name = key.rpartition(".")
        home = upgraded.setdefault(target, {}) if target else upgraded
        if name and isinstance(home, dict):
            home.setdefault(name, value)
    return upgraded, notes


def upgrade_key(old: str, value: Any, renamed: Mapping[str, Renamed]) -> tuple[str, Any, str]:
    """Today's key ("" if there is none) and value of an old one, and the sentence that says so.

    Raises UserError for a value that is gone.
    """
    entry = renamed[old]
    today = entry.values.get(value, value) if isinstance(value, str) else value
    if today is None and value is not None:
        raise UserError(f"{old} = {value} is no longer supported; {entry.advice}")
    if not entry.key:
        return "", None, f"the recipe key {old} no longer exists and is ignored"
    changed = f" = {today}" if today != value else ""
    return entry.key, today, f"the recipe key {old} is now called {entry.key}{changed}"
