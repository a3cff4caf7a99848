"""The whole model's state from and to its shards, and the norm of its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotp.collectives import reduce
from autotp.errors import Error
from autotp.layout import Layout
from autotp.mesh import Mesh, broadcast_from_first, gather_ints
from autotp.run import ParallelModule


def full_state_dict(model: ParallelModule) -> dict[str, Tensor]:
    """The state dict of the original model, on the CPU of the first rank; an empty one on the others.

    One tensor at a time is gathered, so no device holds more than its shards and the largest single tensor. A
    bit-exact inverse of `load_full_state_dict`. Call it on every rank of the axis.
    """
    _expect(model, "full_state_dict")
    found: dict[str, Tensor] = {}
    whole: dict[Tensor, Tensor | None] = {}
    for name, local in model.state_dict(keep_vars=True).items():
        if local not in whole:
            whole[local] = _gathered(local.detach(), _layout(model, name, local), model.mesh)
        if model.mesh.rank == 0:
            found[name] = whole[local]  # type: ignore[assignment]
    return found


def load_full_state_dict(model: ParallelModule, state: Mapping[str, Tensor]) -> None:
    """Fills the shards of `model` from the original model's state dict, which only the first rank needs to hold.

    Raises:
        Error: names are missing or unexpected, or shapes differ; on every rank, before anything is changed.
    """
    _expect(model, "load_full_state_dict")
    mesh, own = model.mesh, model.state_dict(keep_vars=True)
    problem = _mismatch(model, own, state) if mesh.rank == 0 else ""
    _raise_together(problem, mesh)
    done: set[Tensor] = set()
    for name, local in own.items():
        if local in done:
            continue
        done.add(local)
        layout = _layout(model, name, local)
        whole = state[name].to(local) if mesh.rank == 0 else torch.empty(layout.shape, dtype=local.dtype, device=local.device)
        with torch.no_grad():
            local.copy_(layout.take(broadcast_from_first(whole.contiguous(), mesh), mesh.rank))


def clip_grad_norm_(model: ParallelModule, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """The norm of the whole model's gradient, after scaling it in place to at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_` on one device: parts of cut parameters are summed over the axis, replicated
    parameters are counted once.

    Args:
        norm_type: the order of the norm; `float("inf")` is the largest element.
    """
    _expect(model, "clip_grad_norm_")
    mine = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    cut = [p.grad for name, p in mine if model.layouts[name].dim is not None]
    whole = [p.grad for name, p in mine if model.layouts[name].dim is None]
    infinite = norm_type == float("inf")
    parts = [_power(grads, norm_type, model) for grads in (cut, whole)]
    over_ranks = reduce(parts[0], model.mesh.group, "max" if infinite else "sum")
    total = torch.maximum(over_ranks, parts[1]) if infinite else (over_ranks + parts[1]) ** (1 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise Error(f"clip_grad_norm_: the gradient's norm is {total.item()}", **{"try": "error_if_nonfinite=False"})
    torch.nn.utils.clip_grads_with_norm_([p for _, p in mine], max_norm, total)
    return total


def _power(grads: Iterable[Any], norm_type: float, model: ParallelModule) -> Tensor:
    """The norm of some gradients to the power of its order: what can be summed over ranks."""
    norms = [torch.linalg.vector_norm(g, norm_type) for g in grads if g.numel()]
    if not norms:
        return torch.zeros((), device=model.mesh.device, dtype=next(model.parameters()).dtype)
    stacked = torch.stack(norms)
    return stacked.max() if norm_type == float("inf") else (stacked**norm_type).sum()


def _gathered(local: Tensor, layout: Layout, mesh: Mesh) -> Tensor | None:
    """The whole tensor on the first rank's CPU, None on the others."""
    if layout.dim is None or mesh.size == 1:
        return local.cpu().clone() if mesh.rank == 0 else None
    longest = max(layout.lengths())
    shape = [longest if d == layout.dim else n for d, n in enumerate(layout.shape)]
    sent = local.new_zeros(shape)
    sent.narrow(layout.dim, 0, local.shape[layout.dim]).copy_(local)
    group = dist.distributed_c10d._resolve_process_group(mesh.group)  # type: ignore[arg-type]
    parts = [torch.empty_like(sent) for _ in range(mesh.size)] if mesh.rank == 0 else None
    dist.gather(sent, parts, group=group, group_dst=0)
    if parts is None:
        return None
    whole = torch.empty(layout.shape, dtype=local.dtype)
    for rank, (part, n) in enumerate(zip(parts, layout.lengths(), strict=True)):
        layout.put(whole, part.narrow(layout.dim, 0, n).cpu(), rank)
    return whole


def _layout(model: ParallelModule, name: str, local: Tensor) -> Layout:
    """How a parameter is held, under any of its names; buffers are whole."""
    return model.layout_of(name) or Layout(tuple(local.shape))


def _mismatch(model: ParallelModule, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    missing, unexpected = [n for n in own if n not in state], [n for n in state if n not in own]
    if missing or unexpected:
        lines = [f"{kind}: {', '.join(names)}" for kind, names in (("missing", missing), ("unexpected", unexpected)) if names]
        return "the state dict is another model's; " + "; ".join(lines)
    for name, local in own.items():
        shape = _layout(model, name, local).shape
        if tuple(state[name].shape) != shape:
            return f"`{name}` is {list(state[name].shape)} in the state dict and {list(shape)} in the model"
    return ""


def _raise_together(problem: str, mesh: Mesh) -> None:
    """Raises the first rank's problem on every rank, so that none waits for the others."""
    text = problem.encode()
    length = gather_ints([len(text)], mesh)[0][0]
    if not length:
        return
    sent = torch.zeros(length, dtype=torch.uint8, device=mesh.device)
    if mesh.rank == 0:
        sent.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    told = bytes(broadcast_from_first(sent, mesh).cpu().tolist()).decode()
    raise Error(f"load_full_state_dict: {told}", **{"try": "the state dict of the model that was parallelized"})


def _expect(model: Any, call: str) -> None:
    if not isinstance(model, ParallelModule):
        raise Error(f"{call}: {type(model).__name__} is no parallel model", **{"try": "autotp.parallelize(model) first"})
