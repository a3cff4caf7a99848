"""Calls a function once a module has been imported, without importing it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from autotp.attached import first_time


class _Finder(MetaPathFinder):
    """Finds the modules of others by the other finders, and calls back when one has run.

    Attributes:
        running: the number of these modules that run at present. One may import another; what it imports must not be
            called back about, as its own names are not there yet.
    """

    def __init__(self, names: Sequence[str], then: Callable[[], None]) -> None:
        self.names, self.then, self.running = frozenset(names), then, 0

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the module's spec, whose loader calls back; None for other modules."""
        if name not in self.names:
            return None
        # Without this finder, which would ask itself for ever.
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                self.running += 1
                try:
                    run(module)
                finally:
                    self.running -= 1
                if not self.running:
                    self.then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def change_all(changes: Sequence[Callable[[], None]]) -> None:
    """Calls functions that change modules of other libraries.

    If a library does not have a name or a module that a function changes, it is of a version that autotp was not tried
    with. The user's import goes on, and a warning says so, once for each function.
    """
    for change in changes:
        try:
            change()
        except (AttributeError, KeyError) as error:
            if first_time(change, "warned"):
                warnings.warn(_untried(error), stacklevel=2)


def _untried(error: AttributeError | KeyError) -> str:
    """Returns the warning about a name that a module or a class of another library does not have, or about a module."""
    if isinstance(error, KeyError):  # Of `sys.modules`.
        where = missing = str(error.args[0])
    else:
        where = str(getattr(error.obj, "__module__", getattr(error.obj, "__name__", "")))
        missing = f"{where}.{error.name}"
    library = where.partition(".")[0]
    version = getattr(sys.modules.get(library), "__version__", "")
    return (
        f"{library} {version} has no `{missing}`, which autotp changes for parallel models. autotp was "
        f"not tried with this version of {library} (docs/versions.md): compare losses and weights with one device's"
    )


def after_import(names: Sequence[str], then: Callable[[], None]) -> None:
    """Calls `then` now, and again after each import of one of these modules, with all that it imports."""
    if not any(isinstance(finder, _Finder) and finder.names == frozenset(names) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(names, then))
    then()
