"""Installs the hooks in torch, and removes them when no parallel model is left."""

from __future__ import annotations

from autotp.distributed.cut_tensors import cut_parameter as cut_parameter
from autotp.distributed.live_models import Model, watch_model
from autotp.groups import point_to_point
from autotp.runtime import func_gradients
from autotp.runtime.torch_hooks import clip_and_scale as torch_calls
from autotp.runtime.torch_hooks import interrupted, optimizer_guard, wrappers

INSTALLED = (
    optimizer_guard.install, cut_parameter.install, torch_calls.install, wrappers.install, interrupted.install,
    point_to_point.install, func_gradients.install,
)  # fmt: skip


def watched(model: Model) -> Model:
    """Notes a parallel model and installs the hooks; returns the model."""
    return watch_model(model, INSTALLED)
