"""Finds the parameter or gradient that made a loss infinite or undefined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from autotp.distributed.consistency import agree
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.sharding.boxes import local_of


def raise_nonfinite(loss: float, step: int, model: nn.Module, everyone: Mesh) -> NoReturn:
    """Raises Error on every rank; it names the first parameter that is not finite on any rank, else the first gradient.

    Args:
        model: this rank's part of the model.
    """

    def expect_finite(tensors: Mapping[str, Tensor | None], prefix: str) -> None:
        for name, tensor in tensors.items():
            if tensor is not None and not torch.isfinite(local_of(tensor)).all():
                raise Error(
                    f"the loss of step {step} is {loss}: {prefix}`{name}` is infinite or undefined",
                    fix="autotp.load_checkpoint(...), and a smaller learning rate from there",
                )

    parameters = dict(model.named_parameters())
    agree(everyone, lambda: expect_finite(parameters, ""))
    agree(everyone, lambda: expect_finite({name: p.grad for name, p in parameters.items()}, "the gradient of "))
    raise Error(f"the loss of step {step} is {loss}, and every parameter and gradient is finite")
