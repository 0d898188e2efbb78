"""Recipes as version 1 of their format has them."""

from __future__ import annotations

import copy
from typing import Any

from tomoe.recipe.renamed import CONVERSION


def format_1(recipe: dict[str, Any]) -> dict[str, Any]:
    """The values of a conversion recipe under their older keys."""
    values = copy.deepcopy(recipe)
    # nothing was rotated then
    assert not values["attention"].pop("rotate_values") or values["attention"]["pruning"] == "off"
    for old, entry in CONVERSION.items():
        (section, _, leaf), (old_section, _, old_leaf) = entry.key.rpartition("."), old.rpartition(".")
        value = (values[section] if section else values).pop(leaf)
        older = {now: name for name, now in entry.values.items()}
        (values[old_section] if old_section else values)[old_leaf] = older.get(value, value)
    assert values.pop("attention") == {}
    # there was no repair
    assert values.pop("repair")["mode"] == "none"
    return values
