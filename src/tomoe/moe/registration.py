"""Register the converted models with transformers, without importing it.

An import hook waits for transformers' auto classes. It is written here because `wrapt`, the package for such hooks,
imports asyncio and more: a quarter of the time that `tomoe --help` takes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

AUTO_CLASSES = "transformers.models.auto.configuration_auto"
MODELING = "tomoe.moe.modeling_tomoe"


def register_when_imported() -> None:
    """Register the converted models as soon as transformers' auto classes are there: now, or once they are imported."""
    if AUTO_CLASSES in sys.modules:
        _register()
    elif not any(isinstance(finder, RegistrationFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, RegistrationFinder())


def _register() -> None:
    # the modelling file registers itself; the kernels register themselves as its backends
    from tomoe.moe import kernels  # noqa: F401


class RegistrationFinder:
    """Registers the models at the end of the outermost import that loaded the auto classes: modules of transformers import each
    other in circles, and the modeling file needs several of them complete."""

    def __init__(self) -> None:
        self.depth = 0
        self.found = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec that the other finders have for this module, with a loader that reports to this one."""
        if not name.startswith("transformers.") and name != MODELING:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec)
        return spec

    def _watch(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        assert loader is not None
        exec_module = loader.exec_module

        def counted(module: ModuleType) -> None:
            # from here on the class's own
            del loader.exec_module
            self.depth += 1
            try:
                exec_module(module)
            finally:
                self.depth -= 1
            self.found = self.found or spec.name in (AUTO_CLASSES, MODELING)
            if self.found and not self.depth and self in sys.meta_path:
                sys.meta_path.remove(self)
                _register()

        loader.exec_module = counted  # type: ignore[method-assign]
