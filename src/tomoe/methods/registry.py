"""Finds methods by name: those of this package, those that other packages register, and classes in a file."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from tomoe.errors import UserError
from tomoe.methods.base import Method
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.target_rules import TARGET_RULES, Form

DEFAULT = "carve"
GROUP = "tomoe.methods"
"""The group of entry points by which an installed package adds methods: NAME = MODULE:CLASS."""
_CORE = ("base", "registry")  # modules of this package that are no methods
_FOUND: dict[str, type[Method]] = {}
AnyMethod = TypeVar("AnyMethod", bound=type[Method])


def method(name: str, paper: str = "") -> Callable[[AnyMethod], AnyMethod]:
    """Register a class of `Method` under a name; `paper` is the address of its publication."""

    def register(found: AnyMethod) -> AnyMethod:
        found.name, found.paper = name, paper
        _FOUND[name] = found
        return found

    return register


def names() -> list[str]:
    """Return the names of all methods that need no file."""
    package = importlib.import_module("tomoe.methods")
    own = [module.name for module in pkgutil.iter_modules(package.__path__) if module.name not in _CORE]
    return sorted({*own, *(point.name for point in entry_points(group=GROUP)), *_FOUND})


def find(name: str) -> type[Method]:
    """Return the class of a method: a registered name, or FILE.py:CLASS. Raises UserError if it is missing or not a method."""
    if name in _FOUND:
        return _FOUND[name]
    if (path := file_of(name)) is not None:
        return _in_file(path, name.rpartition(":")[2])
    for point in entry_points(group=GROUP, name=name):
        return _checked(point.load(), name)
    known = names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "a method of your own is named FILE.py:CLASS"
        raise UserError(f"there is no method {name!r} (methods are {', '.join(known)}); {hint}")
    # importing a module registers its class
    importlib.import_module(f"tomoe.methods.{name}")
    return _FOUND[name]


def file_of(name: str) -> Path | None:
    """Return the file of a method named FILE.py:CLASS; None for other names."""
    path, colon, _ = name.rpartition(":")
    return Path(path) if colon and path.endswith(".py") else None


def _in_file(path: Path, class_name: str) -> type[Method]:
    """Run the file as a module of its own; its classes need not register themselves."""
    if not path.is_file():
        raise UserError(f"there is no file {path} with a method; a method is a name or FILE.py:CLASS")
    spec = importlib.util.spec_from_file_location(f"tomoe_method_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file of a user raises
        raise UserError(f"the file {path} cannot be run: {type(error).__name__}: {error}") from error
    if not hasattr(module, class_name):
        raise UserError(f"the file {path} has no class {class_name}")
    return _checked(getattr(module, class_name), f"{path}:{class_name}")


def _checked(found: Any, name: str) -> type[Method]:
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"{name} is not a method: it should be a class of tomoe.Method")
    return found


def resolve_method(recipe: Recipe, method: Method | None = None) -> tuple[Method, Recipe]:
    """Return a recipe's method with its settings, or the given one, and the recipe with all that the method implies.

    Raises UserError for an unknown method or setting, and for recipe keys that are incompatible with the method.
    """
    if method is None:
        method = find(recipe.method.name or _implied(recipe))(**recipe.method.model_extra or {})
    found = type(method)
    if not _fits(found, recipe.target):
        *others, last = (name for name in names() if _fits(find(name), recipe.target))
        raise UserError(
            f"target {recipe.target} does not support what method {found.name} makes ({_KINDS[found.kind]}); set target to hf, "
            f"or method to {', '.join(others)} or {last}"
        )
    name = recipe.method.name or found.name
    resolved = recipe.with_defaults(found.defaults, {"name": name, **method.config.model_dump(mode="json")})
    keys = resolved.flatten()
    for key, value in found.requires.items():
        if keys[key] != value:
            raise UserError(
                f"method {found.name} needs {key} = {_shown(value)}, but it is {_shown(keys[key])}; leave it out, or choose "
                "another method"
            )
    return method, resolved


_KINDS: dict[Form, str] = {
    "fine": "experts without overlap",
    "overlapping": "overlapping experts",
    "inputs": "a choice of inputs",
}


def _fits(method: type[Method], target: str) -> bool:
    """Whether a target supports the plans of a method."""
    return bool({method.kind, *method.other_kinds} & {*TARGET_RULES[target].forms})


def _implied(recipe: Recipe) -> str:
    """Return the method that a recipe without one implies by its keys, or the default."""
    return next((name for name in names() if find(name).implied_by(recipe)), DEFAULT)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
