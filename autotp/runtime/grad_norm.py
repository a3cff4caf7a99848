"""The norm of the whole model's gradient, of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autotp.arguments import expect_arguments
from autotp.errors import Error, calling, within
from autotp.ops.collectives import reduce
from autotp.runtime.holdings import Holdings, holdings_of
from autotp.runtime.torch_hooks.optimizer_state import expect_norm
from autotp.sharding.boxes import is_sharded, local_of


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales the model's gradient in place to a norm of at most `max_norm`, and returns the norm before (shape []).

    The norm is one device's, as of `torch.nn.utils.clip_grad_norm_`: parts are summed over the ranks that hold them,
    and a gradient that several ranks hold (of a replicated parameter, or of a head tied to an embedding on another
    stage) counts once. Call it on every rank.

    Args:
        model: what `parallelize` or `distribute` returned.
        max_norm: the largest norm that is left.
        norm_type: the order of the norm, above 0; `float("inf")` means the largest absolute element.
        error_if_nonfinite: True raises Error where the norm is infinite or undefined.

    Raises:
        Error: on every rank: `norm_type` is no order of a norm, `model` is not parallel, or the norm is not finite.

    Example:
        >>> model = autotp.parallelize(nn.Linear(4, 1, bias=False), tp=1, example_inputs=torch.ones(2, 4))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> autotp.clip_grad_norm_(model, max_norm=1.0)
        tensor(2.)
        >>> model.weight.grad
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    with calling("clip_grad_norm_"):
        return _clip(model, max_norm, norm_type, error_if_nonfinite)


def _clip(model: nn.Module, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    parts = holdings_of(model, "clip_grad_norm_")
    expect_arguments(clip_grad_norm_, max_norm=max_norm, error_if_nonfinite=error_if_nonfinite)
    parameters = {name: p for name, p in parts.held.items() if isinstance(p, nn.Parameter)}
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    within("clip_grad_norm_", lambda: expect_norm(gradients))
    total = total_norm(parts, gradients, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise Error(f"clip_grad_norm_: the norm of the gradient is {total.item()}", fix="error_if_nonfinite=False")
    # 1e-6 as in torch: the factor must be that of one device.
    _scale(list(parameters.values()), torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total.to(next((p.dtype for p in parameters.values() if p.is_floating_point()), total.dtype))


def total_norm(parts: Holdings, tensors: Mapping[str, Tensor], norm_type: float = 2.0) -> Tensor:
    """Returns the norm of a model's parameters or gradients, as on one device.

    All ranks that hold the model call this together.

    Args:
        tensors: first name of a parameter -> this rank's part of it, or of a tensor with the same layout.

    Raises:
        Error: `norm_type` is not the order of a norm.
    """
    try:
        order = float(norm_type)  # torch takes "inf", too.
    except (TypeError, ValueError):
        order = 0.0
    if not order > 0:
        raise Error(f"clip_grad_norm_: norm_type={norm_type!r}", expected="a number above 0, or inf")
    infinite = order == float("inf")
    place, op = parts.place, "max" if infinite else "sum"
    # MPS has no float64.
    dtype = torch.float64 if place.device.type != "mps" else torch.float32
    # All meshes of sharded parameters, so that all ranks reduce alike.
    meshes = dict.fromkeys([None, *map(_mesh_of, parts.held.values())])
    norms: dict[DeviceMesh | None, list[Tensor]] = {mesh: [] for mesh in meshes}
    for name, tensor in tensors.items():
        mesh_norms = norms[_mesh_of(tensor)]
        counted = parts.counts(name, tensor)
        mesh_norms += [torch.linalg.vector_norm(part, order, dtype=_wide(part)).to(dtype) for _, part in counted]
    total = torch.zeros((), dtype=dtype, device=place.device)
    for mesh, some in norms.items():
        # The zero stands for a rank without gradients, which must take part in the sum all the same.
        part = torch.stack([torch.zeros_like(total), *some])
        part = part.max() if infinite else (part**order).sum()
        for of_rows in () if mesh is None else mesh.get_all_groups():
            part = reduce(part, of_rows.group_name, op)
        total = torch.maximum(total, part) if infinite else total + part
    # Ranks along cp and replicas hold the same gradients, so there is no sum over them.
    for group in (place.group, parts.pipeline):
        total = reduce(total, group, op) if group is not None else total
    return total if infinite else total ** (1 / order)


def _mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Returns the mesh whose processes hold parts of a tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) and is_sharded(tensor) else None


def _scale(parameters: list[nn.Parameter], by: Tensor) -> None:
    """Scales gradients in place."""
    grads: list[Any] = [local_of(p.grad) for p in parameters if p.grad is not None]
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], by.to(dtype))


def _wide(tensor: Tensor) -> torch.dtype:
    # The square of a float16 above 256 is infinite.
    return tensor.dtype if tensor.dtype not in (torch.float16, torch.bfloat16) else torch.float32
