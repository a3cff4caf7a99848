"""shard_parameters: broadcasts a model's parameters and buffers, and keeps this rank's parts.

All ranks get the first rank's values. Only one full parameter at a time is on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from autotp.deferred_init.initialize import initialize
from autotp.distributed.agreement import compare
from autotp.distributed.mesh import Mesh, broadcast_from_first, gather_ints
from autotp.passes.capture.skeleton import empty_on
from autotp.runtime.calls.graph_digest import same_draws
from autotp.sharding.layout import Layout

_left_behind = WeakTensorKeyDictionary()
"""Parameters that nothing computes with: those on meta that replace what a parallel model took from the original model,
and those that `fully_shard` has replaced."""


def was_taken(model: nn.Module) -> bool:
    """True for a model whose parameters were taken by a parallel model."""
    return any(is_left_behind(tensor) for tensor in model.parameters())


def is_left_behind(tensor: Tensor) -> bool:
    """True for a parameter in whose place a parallel model has another."""
    return tensor in _left_behind


def leave_behind(tensors: Iterable[Tensor]) -> None:
    """Notes parameters in whose place a parallel model has others."""
    for tensor in tensors:
        _left_behind[tensor] = True


def shard_parameters(
    model: nn.Module,
    layouts: Mapping[str, Layout],
    rank: int,
    everyone: Mesh,
    read: Mapping[str, Tensor] | None = None,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Returns this rank's parts of the model's tensors by first name, and leaves the model on meta.

    Args:
        rank: the rank on the tensor-parallel axis.
        everyone: all ranks that make the call.
        read: parts that exist already.
        names: names that this rank keeps; None means all.
    """
    read = read or {}
    on_meta = any(p.is_meta for name, p in model.named_parameters() if name not in read)
    if gather_ints([on_meta], everyone)[0][0]:  # The first rank decides: others may be on meta to save memory.
        # Each rank draws the initial values of the whole model: they agree only if the random states do.
        compare(everyone, [same_draws(everyone)])
        parts = initialize(model, layouts, rank, everyone.device)
    else:
        parts = _moved(model, layouts, rank, everyone, read, names)
    leave_behind(model.parameters())
    return parts if names is None else {name: parts[name] for name in names}


def _moved(
    model: nn.Module,
    layouts: Mapping[str, Layout],
    rank: int,
    everyone: Mesh,
    read: Mapping[str, Tensor],
    names: Collection[str] | None,
) -> dict[str, Tensor]:
    parts: dict[str, Tensor] = {}
    by_name = _held(model)
    learning = gather_ints([table[key].grad is not None for ((table, key), *_) in by_name.values()], everyone)[0]
    for (name, holders), learns in zip(by_name.items(), learning, strict=True):
        table, key = holders[0]
        tensor = table[key]
        local = read[name] if name in read else _part(tensor, layouts.get(name), rank, everyone)
        full = tensor if tensor.grad is None else tensor.grad  # Kept only if the first rank has a gradient.
        gradient = _part(full, layouts.get(name), rank, everyone) if learns else None
        empty = empty_on(tensor, "meta")
        empty = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        empty.__dict__.update(tensor.__dict__)
        # The model keeps no whole: at most one is on the device at a time.
        for table, key in holders:
            table[key] = empty
        if names is None or name in names:
            parts[name] = _now(tensor, local, gradient)
    return parts


def _part(tensor: Tensor, layout: Layout | None, rank: int, everyone: Mesh) -> Tensor:
    """Returns a rank's part of the first rank's tensor."""
    full = broadcast_from_first(_on(tensor, everyone.device), everyone)
    return layout.take(full, rank) if layout is not None and (layout.dim is not None or layout.rows) else full


def _now(tensor: Tensor, local: Tensor, gradient: Tensor | None) -> Tensor:
    """Puts the part into the same parameter object, as `.to()` does, so that an existing optimizer stays right."""
    # `tensor.data = local` works between such types only; `nn.Module._apply` asks the same.
    if not isinstance(tensor, nn.Parameter) or not torch._has_compatible_shallow_copy_type(tensor, local):
        return local
    tensor.grad = None
    if local.shape != tensor.shape:
        _forget_graphs(tensor)
    tensor.data = local
    tensor.grad = gradient
    return tensor


def _forget_graphs(parameter: nn.Parameter) -> None:
    """Detaches a parameter from autograd graphs that were made with it and may still be alive.

    Such a graph (of a kept output, or of torch's old `weight_norm`) keeps the node that accumulates the parameter's
    gradient, with its old shape. torch makes a new node when the data changes its dtype.
    """
    dtype = torch.float32 if parameter.dtype == torch.bfloat16 else torch.bfloat16
    parameter.data = parameter.data.new_empty(0, dtype=dtype)


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on `device`; a tensor on meta has no values there."""
    if tensor.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    copied = tensor.detach().to(device, copy=True)
    return copied.contiguous() if copied.layout is torch.strided else copied


def _held(model: nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """First name -> all (table, key) of a parameter or buffer, without references to the tensors themselves."""
    names: dict[int, str] = {}
    holders: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    name = names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                    holders.setdefault(name, []).append((table, key))
    return holders
