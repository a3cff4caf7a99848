"""Runs the hooks of parameters on the gradient of a whole batch.

NOTE [When hooks run]
torch runs a parameter's hooks (`register_hook`, `register_post_accumulate_grad_hook`) where backward adds to its
gradient. On one device this happens once a step. A trainer adds the gradients of microbatches, and then sums them over
replicas and stages. So a hook that clamps its gradient, or steps an optimizer, would see a part. A step therefore
empties torch's tables of hooks, which the handles of the hooks know, while it adds; then torch itself adds the sum to
`.grad`, with the hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes in which torch keeps the hooks of a tensor."""


@contextmanager
def without_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A region in which the hooks of parameters do not run."""
    tables = [table for parameter in parameters for name in TABLES if (table := getattr(parameter, name))]
    saved = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)


def add_gradients(before: Mapping[nn.Parameter, Tensor | None]) -> None:
    """Adds each parameter's `.grad` to the gradient that it had before, as torch's backward does: with its hooks."""
    for parameter, grad in before.items():
        gradient, parameter.grad = parameter.grad, grad
        if gradient is None:
            continue
        if any(getattr(parameter, name) for name in TABLES):
            # Backward from the parameter itself runs one node: the one that adds the gradient and runs the hooks.
            torch.autograd.backward([parameter], [gradient])
        else:
            parameter.grad = gradient if grad is None else grad.add_(gradient)


def move_hooks(parameter: nn.Parameter, successor: nn.Parameter) -> None:
    """Lets the hooks of a parameter run for the parameter that takes its place; their handles remove them there."""
    for name in TABLES:
        if parameter is not successor and getattr(parameter, name):
            setattr(successor, name, getattr(parameter, name))
