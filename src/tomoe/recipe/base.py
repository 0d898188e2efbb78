"""The base of every recipe: frozen keys in sections, loaded from a file, overridden, compared; errors are one sentence."""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from tomoe.errors import UserError, shortened
from tomoe.files import atomic_write, parse_json, read_text


class Section(BaseModel):
    """Frozen keys; an unknown key or an infinity is an error (pydantic's, or within a recipe a UserError)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, defer_build=True
    )


class BaseRecipe(Section):
    """Everything that determines one kind of run. Constructing or loading one raises UserError, in one sentence, for a key or
    value that is not allowed."""

    NOT_IN_DIGEST: ClassVar[frozenset[str]] = frozenset()
    """Keys that do not change what is learned; the digest and `differences` leave them out."""
    OPEN: ClassVar[frozenset[str]] = frozenset()
    """Sections that take any key: who reads them checks it."""
    CALLED: ClassVar[str] = "the recipe"
    """What errors call it."""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(_sentence(error, type(self))) from None

    @classmethod
    def load(cls, path_or_preset: str | Path | None, overrides: Sequence[str] = ()) -> Self:
        """Read a .toml or .json file or a preset (None: all defaults), then apply `section.key=value` overrides, whose values
        are JSON if they parse as such, else strings. Raises UserError: no such file or preset, a key or value that is not
        allowed."""
        values, origin = ({}, "") if path_or_preset is None else read_recipe(path_or_preset)
        try:
            recipe = cls(**values)
        except UserError as error:
            raise UserError(f"{origin}: {error.wrong}", *error.advice) from None
        return recipe.changed(overrides) if overrides else recipe

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> Self:
        """Make the recipe with these values at `section.key`. Raises UserError for a key or value that is not allowed."""
        return cls.load(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])

    def changed(self, overrides: Sequence[str]) -> Self:
        """Return a copy with `section.key=value` overrides. Raises UserError for a key or value that is not allowed."""
        # a default may depend on another key, so only what was set is kept
        values = self.model_dump(exclude_unset=True)
        for override in overrides:
            _apply(values, override, type(self))
        return type(self)(**values)

    def flatten(self) -> dict[str, Any]:
        """Return all keys as `section.key`, with plain JSON values."""
        values: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json").items():
            section = isinstance(value, Mapping)
            values |= {f"{name}.{key}": leaf for key, leaf in value.items()} if section else {name: value}
        return values

    def save(self, path: str | Path) -> None:
        """Write JSON that `load` reads back, atomically. Raises UserError if the file cannot be written."""
        atomic_write(Path(path), json.dumps(self.model_dump(mode="json"), indent=2) + "\n")

    def digest(self) -> str:
        """SHA-256 (hex) of every key that affects the outcome: not where it runs, or how often it writes."""
        deciding = {key: value for key, value in self.flatten().items() if key not in self.NOT_IN_DIGEST}
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()

    def differences(self, other: Self) -> list[str]:
        """List sentences such as "train.steps: 500 here, 150 there"; empty exactly when the digests agree."""
        here, there = self.flatten(), other.flatten()
        return [
            f"{key}: {json.dumps(here.get(key))} here, {json.dumps(there.get(key))} there"
            for key in {**here, **there}
            if here.get(key) != there.get(key) and key not in self.NOT_IN_DIGEST
        ]


def _apply(values: dict[str, Any], override: str, recipe: type[BaseRecipe]) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"the override {override!r} should read section.key=value, for example train.steps=200")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text.strip()
    section, _, leaf = key.rpartition(".")
    if key not in _known(recipe) and section not in recipe.OPEN:
        raise UserError(_unknown(key, recipe))
    (values.setdefault(section, {}) if section else values)[leaf] = value


def _known(recipe: type[BaseRecipe]) -> list[str]:
    return list(recipe().flatten())


def _unknown(key: str, recipe: type[BaseRecipe]) -> str:
    """Make the sentence for a key that does not exist: names its section and the nearest key that does."""
    section, _, leaf = key.rpartition(".")
    known = _known(recipe)
    sections = {name.split(".")[0] for name in known if "." in name}
    if key in sections:
        return f"{key} is a section of the recipe; set one of its keys, for example {_keys_of(key, recipe)[0]}"
    place = f"section {section} of {recipe.CALLED}" if section in sections else recipe.CALLED
    near = _nearest(key, known)
    hint = f"did you mean {near}?" if near else f"it has {', '.join(_keys_of(section, recipe)) or 'none'}"
    return f"{place} has no key {leaf if section in sections else key!r}; {hint}"


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """Return the key of the same name in another section, else the most similar one; None if none is near."""
    leaf = key.rpartition(".")[2]
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    alike = difflib.get_close_matches(leaf, leaves, n=1)
    return leaves.get(leaf) or next(iter(near), leaves[alike[0]] if alike else None)


def _keys_of(section: str, recipe: type[BaseRecipe]) -> list[str]:
    """Return the keys of a section; for anything else, the top-level keys and section names."""
    return [key for key in _known(recipe) if key.startswith(f"{section}.")] or list(recipe.model_fields)


def _sentence(error: ValidationError, recipe: type[BaseRecipe]) -> str:
    """Format the first error of pydantic as one sentence: the key, its value, the values allowed."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "extra_forbidden":
        return _unknown(key, recipe)
    found = shortened(repr(first["input"]))
    if first["type"] == "model_type":
        return f"{key} is {found}, but it should be a section with keys such as {_keys_of(key, recipe)[0]}"
    if first["type"] == "too_short":
        return f"{key} is empty, but it should hold at least {first['ctx']['min_length']}"
    if first["type"] == "less_than_equal":
        most, given = first["ctx"]["le"], first["input"]
        sentence = f"{key} is {found}, but it should be at most {most:g}"
        if most == 1 and isinstance(given, int | float) and 2 <= given <= 100:
            sentence += f"; {given:g} % is {given / 100:g}"
        return sentence
    allowed = first["msg"].replace("Input", "it", 1)
    return f"{key} is {found}, but {allowed}"


def presets() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def _folder() -> Traversable:
    return resources.files("tomoe.recipe").joinpath("presets")


def read_recipe(path_or_preset: str | Path) -> tuple[dict[str, Any], str]:
    """Read the raw values of a recipe file or preset, and its name in errors. Raises UserError if it is not a recipe."""
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
