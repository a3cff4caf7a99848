"""The questions that autotp asks a library of models; `autotp.hf` answers for transformers.

The core knows no library by name. `ModelLibrary` has the answers for models without a library; a registered library
answers for its own models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any


class ModelLibrary:
    """The answers for models without a library.

    Attributes:
        packages: its names in Python. In its code only classes of modules are followed (`code_names.py`).
        rules: name of an operator, such as `library::name` -> rule function, for operators that the library registers.
        numpy_random: names of those that draw from `numpy.random`.
    """

    packages: tuple[str, ...] = ()
    rules: Mapping[str, Callable[..., Any]] = {}
    numpy_random: frozenset[str] = frozenset()

    def classes_before(self, original: type) -> tuple[type, ...]:
        """Returns the classes that come before `original` in the class of a parallel model."""
        return ()

    def is_state(self, x: Any) -> bool:
        """True for an argument that holds tensors and that a call changes, such as a key-value cache."""
        return False

    def shown_attribute(self, name: str, value: Any) -> Any:
        """Returns an attribute of such an object in a form that can be flattened. Raises Error if there is none."""
        return value

    def rewrites(self, name: str) -> bool:
        """False for the name of an attribute that `read_attribute` returns as it is."""
        return False

    def read_attribute(self, name: str, value: Any, among: Sequence[Any]) -> Any:
        """Returns the attribute for the form that `shown_attribute` returned.

        Args:
            among: the forms of all attributes of the object.
        """
        return value

    def recomputes(self, model: Any) -> bool:
        """True for a model whose gradient checkpointing is on."""
        return False

    def is_own_hook(self, hook: Any) -> bool:
        """True for a forward hook that a model of the library registers for itself, and that may run in each call."""
        return False

    def quantized_weight(self, model: Any) -> str:
        """Returns which weight of a model is quantized, and by whom, as text; "" if there is none."""
        return ""

    def parameter_adapter(self, model: Any) -> str:
        """Returns the name of a module whose adapter writes parameters in each call; "" if there is none."""
        return ""

    def watch_calls(self) -> None:
        """Has calls of the library that take the ranks of one parallel model for replicas raise Error from here on."""

    def keep_activations(self, model: Any) -> None:
        """Switches a model's gradient checkpointing off."""

    def instead_of_expert_loop(self, model: Any) -> str:
        """Returns what to write so that a model does not loop over its experts; "" for other models."""
        return ""

    def instead_of_python_random(self, model: Any) -> str:
        """Returns what to write so that a model does not draw from `random` or `numpy.random`; "" for other models."""
        return ""

    def during_capture(self, exactly: bool, looks: bool) -> AbstractContextManager[None]:
        """Returns a region in which models of the library compute in a capture what they compute on one device.

        Args:
            exactly: whether each of the model's questions is answered by a look at the values. Without it those are
                left out whose answer makes no difference; raises `NeedsExactCapture` where this is not known.
            looks: whether attention gets a mask is answered by a look all the same: NOTE [Looks at masks]
        """
        return nullcontext()

    def formula_of(self, function: type) -> Callable[..., Any] | None:
        """Returns a function that computes what a torch.autograd.Function does, by operators; None if there is none."""
        return None


class BeginAgain(Exception):
    """Ends a capture that has to begin again in another way. It says nothing about the model, and reaches no user."""


class NeedsExactCapture(BeginAgain):
    """The model has to be captured with `exactly`: see `ModelLibrary.during_capture`."""


_MAKERS: list[Callable[[], ModelLibrary]] = []
_MADE: list[ModelLibrary] = []


def register(make: Callable[[], ModelLibrary]) -> None:
    """Registers a library: autotp asks it from here on. `make` runs at the first question, not at import."""
    _MAKERS.append(make)
    remembered_rewrites.cache_clear()


def libraries() -> list[ModelLibrary]:
    """Returns the registered libraries."""
    while len(_MADE) < len(_MAKERS):
        _MADE.append(_MAKERS[len(_MADE)]())
    return _MADE


def is_of_models(package: str) -> bool:
    """True for a package of a registered library."""
    return any(package in it.packages for it in libraries())


def rule_function_of(operator: str) -> Callable[..., Any] | None:
    """Returns the rule function of a library's operator, by its name; None if there is none."""
    return next((it.rules[operator] for it in libraries() if operator in it.rules), None)


def draws_from_numpy(operator: str) -> bool:
    """True for a library's operator, by its name, that draws from `numpy.random`."""
    return any(operator in it.numpy_random for it in libraries())


def classes_before(original: type) -> tuple[type, ...]:
    """Returns the classes that come before `original` in the class of a parallel model."""
    return tuple(kind for it in libraries() for kind in it.classes_before(original))


def is_state(x: Any) -> bool:
    """True for an object of a registered library that a call changes."""
    return any(it.is_state(x) for it in libraries())


def instead_of_expert_loop(model: Any) -> str:
    """Returns what to write so that a model does not loop over its experts; "" if no library knows."""
    return next(filter(None, (it.instead_of_expert_loop(model) for it in libraries())), "")


def instead_of_python_random(model: Any) -> str:
    """Returns what to write so that a model does not draw Python's random numbers; "" if no library knows."""
    return next(filter(None, (it.instead_of_python_random(model) for it in libraries())), "")


@contextmanager
def during_capture(exactly: bool, looks: bool) -> Iterator[None]:
    """A region in which models of all libraries compute in a capture what they compute on one device.

    Args:
        exactly, looks: as for `ModelLibrary.during_capture`.
    """
    with ExitStack() as stack:
        for it in libraries():
            stack.enter_context(it.during_capture(exactly, looks))
        yield


def formula_of(function: type) -> Callable[..., Any] | None:
    """Returns what computes the same as a torch.autograd.Function by operators, if some library knows it."""
    return next((found for it in libraries() if (found := it.formula_of(function)) is not None), None)


def recomputes(model: Any) -> bool:
    """True for a model whose gradient checkpointing is on."""
    return any(it.recomputes(model) for it in libraries())


def is_own_hook(hook: Any) -> bool:
    """True for a hook that a model of some library registers for itself."""
    return any(it.is_own_hook(hook) for it in libraries())


def watch_calls() -> None:
    """Has calls of libraries that take the ranks of one parallel model for replicas raise Error from here on."""
    for it in libraries():
        it.watch_calls()


def quantized_weight(model: Any) -> str:
    """Returns which weight of a model is quantized, and by whom, as text; "" if no library knows of one."""
    return next(filter(None, (it.quantized_weight(model) for it in libraries())), "")


def parameter_adapter(model: Any) -> str:
    """Returns the name of a module whose adapter writes parameters in each call; "" if no library knows of one."""
    return next(filter(None, (it.parameter_adapter(model) for it in libraries())), "")


def keep_activations(model: Any) -> None:
    """Switches a model's gradient checkpointing off."""
    for it in libraries():
        it.keep_activations(model)


def shown_attribute(name: str, value: Any) -> Any:
    """Returns an attribute of such an object in a form that can be flattened."""
    for library in _MADE if len(_MADE) == len(_MAKERS) else libraries():  # Without a call: each token comes here.
        value = library.shown_attribute(name, value)
    return value


def rewrites(name: str) -> bool:
    """False for the name of an attribute that `read_attribute` returns as it is."""
    return any(it.rewrites(name) for it in libraries())


remembered_rewrites = cache(rewrites)
"""The same, for code that Dynamo does not trace."""


def read_attribute(name: str, value: Any, among: Sequence[Any]) -> Any:
    """Returns the attribute for the form that `shown_attribute` returned."""
    for it in libraries():
        value = it.read_attribute(name, value, among)
    return value
