"""What every recipe can do: frozen keys in sections, read from a file, overridden, compared, refused in one sentence."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from tomoe.errors import UserError
from tomoe.files import write_whole
from tomoe.recipe.files import read_recipe


class Section(BaseModel):
    """Frozen keys; one that nobody knows is an error, and so are infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)
    section: ClassVar[str] = ""
    """Its name in the recipe file; empty for the recipe itself."""
    owner: ClassVar[type[BaseRecipe] | None] = None
    """The recipe that it is a section of, whose keys its errors can name."""

    def __init__(self, **values: Any) -> None:
        """Raises UserError, in one sentence, for a key or value that is not allowed."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(_sentence(error, type(self))) from None


class BaseRecipe(Section):
    """Everything that decides one kind of run, in keys and sections."""

    bystanders: ClassVar[frozenset[str]] = frozenset()
    """Keys that change nothing which is learned: neither digest nor differences see these."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.owner = cls
        for field in cls.model_fields.values():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section) and "owner" not in vars(kind):
                kind.owner = cls

    @classmethod
    def load(cls, path_or_preset: str | Path | None, overrides: Sequence[str] = ()) -> Self:
        """Read a .toml or .json file or a preset (None: all defaults), then apply `section.key=value` overrides.

        The value of an override is JSON where it parses as such, else a string.
        Raises UserError: no such file or preset, not a recipe, a key or value that is not allowed.
        """
        values, origin = ({}, "") if path_or_preset is None else read_recipe(path_or_preset)
        try:
            recipe = cls(**values)
        except UserError as error:
            raise UserError(f"{origin}: {error}") from None
        return recipe.changed(overrides) if overrides else recipe

    def changed(self, overrides: Sequence[str]) -> Self:
        """The same recipe with `section.key=value` overrides. Raises UserError for a key or value that is not allowed."""
        values = self.model_dump()
        for override in overrides:
            _apply(values, override, type(self))
        return type(self)(**values)

    def leaves(self) -> dict[str, Any]:
        """All keys as `section.key`, with plain JSON values."""
        return dict(_leaves(self))

    def save(self, path: str | Path) -> None:
        """Write JSON that `load` reads back; under a temporary name first, so that no half file is ever seen.

        Raises UserError when the place cannot be written.
        """
        write_whole(Path(path), json.dumps(self.model_dump(mode="json"), indent=2) + "\n")

    def digest(self) -> str:
        """Sha256 (hex) of what decides the outcome: not where it runs, nor how often it writes."""
        deciding = {key: value for key, value in _leaves(self) if key not in self.bystanders}
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()

    def differences(self, other: Self) -> list[str]:
        """Sentences such as "train.steps: 500 here, 150 there"; empty exactly when the digests agree."""
        there = dict(_leaves(other))
        return [
            f"{key}: {json.dumps(value)} here, {json.dumps(there[key])} there"
            for key, value in _leaves(self)
            if value != there[key] and key not in self.bystanders
        ]


def _leaves(recipe: BaseRecipe) -> Iterator[tuple[str, Any]]:
    for name, value in recipe.model_dump(mode="json").items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", leaf) for key, leaf in value.items())
        else:
            yield name, value


def _apply(values: dict[str, Any], override: str, recipe: type[BaseRecipe]) -> None:
    """Write one `section.key=value` into the values of a whole recipe."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"the override {override!r} should read section.key=value, for example train.steps=200")
    if key not in _known(recipe):
        raise UserError(_unknown(key, recipe))
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text.strip()
    section, _, leaf = key.rpartition(".")
    (values[section] if section else values)[leaf] = value


def _known(recipe: type[BaseRecipe]) -> list[str]:
    return [key for key, _ in _leaves(recipe())]


def _unknown(key: str, recipe: type[BaseRecipe]) -> str:
    """The sentence for a key that does not exist: names its section and the nearest key that does."""
    section, _, leaf = key.rpartition(".")
    known = _known(recipe)
    sections = {name.split(".")[0] for name in known if "." in name}
    if key in sections:
        return f"{key} is a section of the recipe; set one of its keys, for example {_keys_of(key, recipe)[0]}"
    place = f"section {section} of the recipe" if section in sections else "the recipe"
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    near = same_leaf or difflib.get_close_matches(key, known, n=1, cutoff=0.6) or _nearest_leaf(section, leaf, recipe)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(_keys_of(section, recipe))}"
    return f"{place} has no key {leaf if section in sections else key!r}; {hint}"


def _nearest_leaf(section: str, leaf: str, recipe: type[BaseRecipe]) -> list[str]:
    own = [name for name in _keys_of(section, recipe) if name.startswith(f"{section}.")] or _known(recipe)
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(own)}
    return [by_leaf[near] for near in difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.6)]


def _keys_of(section: str, recipe: type[BaseRecipe]) -> list[str]:
    """Keys of a section; for anything else, the top-level keys and section names."""
    inside = [key for key in _known(recipe) if key.startswith(f"{section}.")]
    return inside or list(recipe.model_fields)


def _sentence(error: ValidationError, section: type[Section]) -> str:
    """The first complaint of pydantic as one sentence: the key, what was found, what is allowed."""
    first, recipe = error.errors(include_url=False)[0], section.owner
    assert recipe is not None, f"{section.__name__} belongs to no recipe"
    key = ".".join(str(part) for part in (section.section, *first["loc"]) if part != "")
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "extra_forbidden":
        return _unknown(key, recipe)
    if first["type"] == "model_type":
        return f"{key} is {first['input']!r}, but it should be a section with keys such as {_keys_of(key, recipe)[0]}"
    if first["type"] == "too_short":
        return f"{key} is empty, but it should hold at least {first['ctx']['min_length']}"
    allowed = first["msg"].replace("Input", "it", 1)
    return f"{key} is {first['input']!r}, but {allowed}"
