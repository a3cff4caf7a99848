"""The questions that autotp asks a library of models; `autotp.integrations.transformers` answers for transformers.

The core knows no library by name. It asks `library()`. `ModelLibrary` has the answers for models without a library; the
class of a registered library derives from it, and asks `super()` about what is not its own. So each question passes
from library to library, and has no code here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class ModelLibrary:
    """The answers for models without a library."""

    def has_models_in(self, package: str) -> bool:
        """True for a package of models: in its code only classes of modules are followed (`code_names.py`)."""
        return False

    def add_operators(self) -> None:
        """Adds the operators that the library registers to the table of rules, those that are loaded."""

    def cut_along(self, style: str) -> str | int | None:
        """Returns what a style of the library's plans cuts, as `Options.cut` says it; "" if it is about communication.

        None for an unknown style.
        """
        return None

    def draws_from_numpy(self, operator: str) -> bool:
        """True for an operator that the library registers, and that draws from `numpy.random`."""
        return False

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

    def folder_opener(self, path: str, dtype: Any) -> Callable[[Any], tuple[Any, Callable[..., Any]]]:
        """Returns a function of all ranks' mesh that returns the model of a folder on meta, and how to read its parts.

        Raises:
            Error: no registered library reads folders.
        """
        from autotp.errors import Error  # Here: `import autotp` loads this file, and nothing that it can do without.

        raise Error(f"{path!r} is no model, and no library that reads folders is registered", fix="a torch.nn.Module")

    def is_own_hook(self, hook: Any) -> bool:
        """True for a forward hook that a model of the library registers for itself, and that may run in each call."""
        return False

    def quantized_weight(self, model: Any) -> str:
        """Returns which weight of a model is quantized, and by whom, as text; "" if there is none."""
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

    def with_documents(self, model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments of a step with those that say where packed documents end.

        A model of the library would find that in forward, by values that are others in each part of a batch.
        """
        return kwargs

    def during_capture(self, exactly: bool, looks: bool) -> AbstractContextManager[None]:
        """Returns a region in which models of the library compute in a capture what they compute on one device.

        Args:
            exactly: whether each of the model's questions is answered by a look at the values. Without it those are
                left out whose answer makes no difference; raises `NeedsExactCapture` where this is not known.
            looks: whether attention gets a mask is answered by a look all the same: NOTE [Looks at masks]
        """
        return nullcontext()

    def without_kernels(self) -> AbstractContextManager[None]:
        """Returns a region in which a model runs on a CPU and in float64 what has kernels on GPUs only."""
        return nullcontext()

    def formula_of(self, function: type) -> Callable[..., Any] | None:
        """Returns a function that computes what a torch.autograd.Function does, by operators; None if there is none."""
        return None


class BeginAgain(Exception):
    """Ends a capture that has to begin again in another way. It says nothing about the model, and reaches no user."""


class NeedsExactCapture(BeginAgain):
    """The model has to be captured with `exactly`: see `ModelLibrary.during_capture`."""


_REGISTERED: list[Callable[[], type[ModelLibrary]]] = []
_MADE: list[ModelLibrary] = []
"""What `library` returns, once it was asked."""


def register(load: Callable[[], type[ModelLibrary]]) -> None:
    """Registers a library: autotp asks it from here on. `load` runs at the first question, not at import."""
    _REGISTERED.append(load)
    # The class of the answers is made anew, with this library among its bases.
    _MADE.clear()


def library() -> ModelLibrary:
    """Returns the answers of all registered libraries; the first one that was registered answers first."""
    if not _MADE:
        _MADE.append(type("Libraries", (*(load() for load in _REGISTERED), ModelLibrary), {})())
    return _MADE[0]
