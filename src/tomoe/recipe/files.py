"""The recipes that come with the package, and raw values from a recipe file."""

from __future__ import annotations

import difflib
import tomllib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from tomoe.errors import UserError, shortened
from tomoe.files import parse_json, read_text


def presets() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def _folder() -> Traversable:
    return resources.files("tomoe.recipe").joinpath("presets")


def read_recipe(path_or_preset: str | Path) -> tuple[dict[str, Any], str]:
    """The raw values of a recipe file or preset, and how errors name it. Raises UserError: no such preset or file, not a
    recipe."""
    if str(path_or_preset) in presets():
        name = str(path_or_preset)
        return tomllib.loads(_folder().joinpath(f"{name}.toml").read_text(encoding="utf-8")), f"preset {name}"
    path = Path(path_or_preset)
    if path.suffix not in (".toml", ".json"):
        near = difflib.get_close_matches(str(path_or_preset), presets(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"there is no preset {str(path_or_preset)!r} (presets are {', '.join(presets())}), "
            f"and a recipe file ends in .toml or .json{hint}"
        )
    text = read_text(path)
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the recipe {path} is not valid {path.suffix[1:].upper()}: {shortened(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"the recipe {path} holds a {type(values).__name__}, but it should hold sections of keys")
    return values, f"recipe {path}"
