"""What autotp asks of a library of models; `autotp.hf` answers for transformers.

The core knows no library by name. Each question has an answer for models of no library; a library that is registered
answers for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class ModelLibrary:
    """The answers for models of no library.

    Attributes:
        package: its name in Python. Of its code only classes of modules are followed (`code_names.py`).
        rules: name of an operator, as `library::name` -> rule function, for operators that are there once the library
            is imported.
    """

    package: str = ""
    rules: Mapping[str, Callable[..., Any]] = {}

    def classes_before(self, original: type) -> tuple[type, ...]:
        """The classes that come before `original` in the class of a parallel model."""
        return ()

    def is_state(self, x: Any) -> bool:
        """True for an object among the arguments that holds tensors and that a call changes, as a key-value cache."""
        return False

    def shown_attribute(self, name: str, value: Any) -> Any:
        """An attribute of such an object as the leaves of a structure. Raises Error where it cannot be one."""
        return value

    def read_attribute(self, name: str, value: Any, among: Sequence[Any]) -> Any:
        """The attribute that such leaves stand for.

        Args:
            among: the leaves of all attributes of the object.
        """
        return value

    def recomputes(self, model: Any) -> bool:
        """True for a model that was told to compute activations again in backward."""
        return False

    def is_own_hook(self, hook: Any) -> bool:
        """True for a forward hook that a model of the library registers for itself, and that may run in each call."""
        return False

    def keep_activations(self, model: Any) -> None:
        """Tells a model to keep every activation for backward."""

    def instead_of_expert_loop(self, model: Any) -> str:
        """What to write so that a model which loops over its experts does not; "" for another model."""
        return ""


LIBRARIES: list[ModelLibrary] = []
"""Those that are registered."""


def register(library: ModelLibrary) -> None:
    """Has autotp ask a library, from here on."""
    LIBRARIES.append(library)


def is_of_models(package: str) -> bool:
    """True for the package of a library that is registered."""
    return any(package == it.package for it in LIBRARIES)


def rule_function_of(operator: str) -> Callable[..., Any] | None:
    """The rule function of a library's operator, by its name."""
    return next((it.rules[operator] for it in LIBRARIES if operator in it.rules), None)


def classes_before(original: type) -> tuple[type, ...]:
    """The classes that come before `original` in the class of a parallel model."""
    return tuple(kind for it in LIBRARIES for kind in it.classes_before(original))


def is_state(x: Any) -> bool:
    """True for an object of some library that a call changes."""
    return any(it.is_state(x) for it in LIBRARIES)


def instead_of_expert_loop(model: Any) -> str:
    """What to write so that a model which loops over its experts does not; "" where no library knows."""
    return next(filter(None, (it.instead_of_expert_loop(model) for it in LIBRARIES)), "")


def recomputes(model: Any) -> bool:
    """True for a model that was told to compute activations again in backward."""
    return any(it.recomputes(model) for it in LIBRARIES)


def is_own_hook(hook: Any) -> bool:
    """True for a hook that a model of some library registers for itself."""
    return any(it.is_own_hook(hook) for it in LIBRARIES)


def keep_activations(model: Any) -> None:
    """Tells a model to keep every activation for backward."""
    for it in LIBRARIES:
        it.keep_activations(model)


def shown_attribute(name: str, value: Any) -> Any:
    """An attribute of such an object as the leaves of a structure."""
    for it in LIBRARIES:
        value = it.shown_attribute(name, value)
    return value


def read_attribute(name: str, value: Any, among: Sequence[Any]) -> Any:
    """The attribute that such leaves stand for."""
    for it in LIBRARIES:
        value = it.read_attribute(name, value, among)
    return value
