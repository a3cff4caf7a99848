"""What is installed in torch as long as there is a parallel model: for optimizers, clipping and scaling, wrappers."""

from __future__ import annotations

from autotp import cut_parameter, optimizer_guard, torch_calls, wrappers
from autotp.alive import Model, watch

INSTALLED = (optimizer_guard.install, cut_parameter.install, torch_calls.install, wrappers.install)


def watched(model: Model) -> Model:
    """The model itself, a parallel one: from now on what would make its ranks drift apart is right, or an Error."""
    return watch(model, INSTALLED)
