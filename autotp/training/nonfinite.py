"""Finds the parameters and gradients that made a loss infinite or undefined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from autotp.distributed.consistency import agree
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.sharding.boxes import local_of


def refuse(loss: float, step: int, model: nn.Module, everyone: Mesh) -> NoReturn:
    """Raises Error, on every rank: the first parameter that is not finite on any; else the first gradient.

    Args:
        model: what this rank holds.
    """

    def look(tensors: Mapping[str, Tensor | None], what: str) -> None:
        for name, tensor in tensors.items():
            if tensor is not None and not torch.isfinite(local_of(tensor)).all():
                raise Error(
                    f"the loss of step {step} is {loss}: {what}`{name}` is infinite or undefined",
                    fix="autotp.load_checkpoint(...), and a smaller learning rate from there",
                )

    parameters = dict(model.named_parameters())
    agree(everyone, lambda: look(parameters, ""))
    agree(everyone, lambda: look({name: p.grad for name, p in parameters.items()}, "the gradient of "))
    raise Error(f"the loss of step {step} is {loss}, and every parameter and gradient is finite")
