"""Runs the hooks of parameters on the gradient of a whole batch.

NOTE [When hooks run]
torch runs a parameter's hooks (`register_hook`, `register_post_accumulate_grad_hook`) where backward adds to its
gradient. On one device this happens once a step. A trainer adds the gradients of microbatches, and then sums them over
replicas and stages. So a hook that clamps its gradient, or steps an optimizer, would see a part. A step therefore
empties torch's tables of hooks, which the handles of the hooks know, while it adds; then torch itself adds the sum to
`.grad`, with the hooks. An optimizer that steps in backward (`StepsOnArrival`) is there to free gradients early. Its
parameters have their hooks run as soon as nothing is added to their gradient any more: under the last backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autotp.errors import Error

TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes in which torch keeps the hooks of a tensor."""


class StepsOnArrival:
    """A hook that steps its parameter, and frees the gradient."""

    def __call__(self, parameter: Tensor) -> None:
        raise NotImplementedError


class HooksOfStep:
    """The hooks of parameters in one step: put off, until a gradient is complete.

    Args:
        before: parameter -> the gradient that it had before the step.
        names: parameter -> its name, for errors.

    Attributes:
        stepped: the parameters that were stepped while backward ran.
    """

    def __init__(self, before: Mapping[nn.Parameter, Tensor | None], names: Mapping[nn.Parameter, str]) -> None:
        self._before, self._names = dict(before), names
        self._saved = dict[nn.Parameter, dict[str, dict[Any, Any]]]()
        self.stepped = set[nn.Parameter]()
        for p in before:
            if tables := {name: dict(table) for name in TABLES if (table := getattr(p, name))}:
                self._saved[p] = tables

    @property
    def steps(self) -> bool:
        """Whether some hook steps its parameter."""
        return any(map(self._is_stepped, self._saved))

    def _is_stepped(self, parameter: nn.Parameter) -> bool:
        return any(isinstance(hook, StepsOnArrival) for hook in self._saved[parameter].get(TABLES[1], {}).values())

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """A region in which the hooks do not run by themselves."""
        for p, tables in self._saved.items():
            for name in tables:
                getattr(p, name).clear()
        try:
            yield
        finally:
            for p, tables in self._saved.items():
                for name, hooks in tables.items():
                    getattr(p, name).update(hooks)

    def complete(self, parameter: Any) -> None:
        """Runs the hooks of a parameter whose gradient is complete, if one steps it; others wait for the step's end."""
        if parameter.grad is None or parameter not in self._saved or not self._is_stepped(parameter):
            return
        grad, before = parameter.grad, self._before.pop(parameter)
        with self._named(parameter):
            tables = self._saved[parameter]
            for hook in tables.get(TABLES[0], {}).values():
                changed = hook(grad)
                grad = grad if changed is None else changed
            parameter.grad = grad if before is None else before.add_(grad)
            self.stepped.add(parameter)
            for hook in tables[TABLES[1]].values():
                hook(parameter)

    @contextmanager
    def as_gradients_arrive(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """A region around the last backward of a step: what it adds to a gradient completes it."""
        handles = [p.register_post_accumulate_grad_hook(self.complete) for p in parameters if p in self._saved]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def run(self) -> None:
        """Adds the other gradients to those before, as torch's backward does: with their hooks.

        Raises:
            Error: a hook raised an exception; it names the parameter.
        """
        for parameter, grad in self._before.items():
            gradient, parameter.grad = parameter.grad, grad
            if gradient is None:
                continue
            if parameter in self._saved:
                # Backward from the parameter itself runs one node: the one that adds the gradient and runs the hooks.
                with self._named(parameter):
                    torch.autograd.backward([parameter], [gradient])
            else:
                parameter.grad = gradient if grad is None else grad.add_(gradient)

    @contextmanager
    def _named(self, parameter: nn.Parameter) -> Iterator[None]:
        try:
            yield
        except Error:
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            named = Error(
                f"a hook of `{self._names[parameter]}` raised {message}",
                fix="a hook that raises nothing, and a new start from a checkpoint: other ranks have gone on",
            )
            named.alone = True
            raise named from error


def move_hooks(parameter: nn.Parameter, successor: nn.Parameter) -> None:
    """Lets the hooks of a parameter run for the parameter that takes its place; their handles remove them there."""
    for name in TABLES:
        if parameter is not successor and getattr(parameter, name):
            setattr(successor, name, getattr(parameter, name))
