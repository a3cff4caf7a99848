"""The whole model's state from and to its shards, and the norm of its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotp.collectives import reduce
from autotp.errors import Error
from autotp.layout import Layout
from autotp.mesh import Mesh, broadcast_from_first, gather_ints
from autotp.run import ParallelModule


def full_state_dict(model: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """The state dict of the original model, on the CPU of the first rank; an empty one on the others.

    One tensor at a time is gathered, so no device holds more than its shards and the largest single tensor. A
    bit-exact inverse of `load_full_state_dict`. Call it on every rank of the axis.

    Args:
        wanted: of a name, whether it is gathered; alike on all ranks. Of a LoRA model, `lambda name: "lora_" in name`.
    """
    parallel = parallel_of(model, "full_state_dict")
    found: dict[str, Tensor] = {}
    whole: dict[Tensor, Tensor | None] = {}
    for name, local in parallel.state_dict(keep_vars=True).items():
        if not wanted(name):
            continue
        if local not in whole:
            whole[local] = _gathered(local.detach(), _layout(parallel, name, local), parallel.mesh)
        if parallel.mesh.rank == 0:
            found[name] = whole[local]  # type: ignore[assignment]
    return found


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fills the shards of `model` from the original model's state dict, which only the first rank needs to hold.

    Raises:
        Error: names are missing or unexpected, or shapes differ; on every rank, before anything is changed.
    """
    parallel = parallel_of(model, "load_full_state_dict")
    mesh, own = parallel.mesh, parallel.state_dict(keep_vars=True)
    problem = _mismatch(parallel, own, state) if mesh.rank == 0 else ""
    _raise_together(problem, mesh)
    done: set[Tensor] = set()
    for name, local in own.items():
        if local in done:
            continue
        done.add(local)
        layout = _layout(parallel, name, local)
        whole = torch.empty(layout.shape, dtype=local.dtype, device=local.device)
        if mesh.rank == 0:
            whole.copy_(state[name])
        with torch.no_grad():
            local.copy_(layout.take(broadcast_from_first(whole, mesh), mesh.rank))


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """The norm of the whole model's gradient, after scaling it in place to at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_` on one device: parts of cut parameters are summed over the axis, replicated
    parameters are counted once.

    Args:
        norm_type: the order of the norm, above 0; `float("inf")` is the largest element.

    Raises:
        Error: no such norm, or with `error_if_nonfinite` a norm that is infinite or undefined; on every rank.
    """
    parallel = parallel_of(model, "clip_grad_norm_")
    order, infinite = float(norm_type), float(norm_type) == float("inf")
    if not order > 0:
        raise Error(f"clip_grad_norm_: norm_type={norm_type}", expected="a number above 0, or inf")
    dtype = torch.float64 if parallel.mesh.device.type != "mps" else torch.float32
    norms = [torch.linalg.vector_norm(g, order, dtype=_wide(g)).to(dtype) for g in _counted(parallel) if g.numel()]
    mine = torch.stack([*norms, torch.zeros((), dtype=dtype, device=parallel.mesh.device)])
    if infinite:
        total = reduce(mine.max(), parallel.mesh.group, "max")
    else:
        total = reduce((mine**order).sum(), parallel.mesh.group) ** (1 / order)
    if error_if_nonfinite and not torch.isfinite(total):
        raise Error(
            f"clip_grad_norm_: the norm of the gradient is {total.item()}", **{"try": "error_if_nonfinite=False"}
        )
    total = total.to(next(parallel.parameters()).dtype)
    torch.nn.utils.clip_grads_with_norm_([p for p in parallel.parameters() if p.grad is not None], max_norm, total)
    return total


def _counted(model: ParallelModule) -> Iterator[Tensor]:
    """The parts of the gradient that this rank counts: of what several ranks hold, the first does."""
    for name, parameter in model.named_parameters():
        layout, rank = model.layouts[name], model.mesh.rank
        if parameter.grad is None or (layout.dim is None and rank):
            continue
        yield parameter.grad if layout.dim is None else _first_held(parameter.grad, layout, rank)


def _first_held(local: Tensor, layout: Layout, rank: int) -> Tensor:
    """The part of a cut tensor that no rank before this one holds too, as the shared keys of `q | k | v`."""
    assert layout.dim is not None
    if sum(layout.lengths()) == layout.shape[layout.dim]:
        return local
    mine = [i for a, b in layout.first(rank) for i in range(a, b)]
    return local.index_select(layout.dim, torch.tensor(mine, dtype=torch.int64, device=local.device))


def _wide(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype not in (torch.float16, torch.bfloat16) else torch.float32


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
        lines = [
            f"{kind}: {', '.join(names)}" for kind, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        return "the state dict is another model's; " + "; ".join(lines)
    for name, local in own.items():
        shape, given = _layout(model, name, local).shape, state[name]
        if not isinstance(given, Tensor):
            return f"`{name}` is a {type(given).__name__} in the state dict, and no tensor"
        if tuple(given.shape) != shape:
            return f"`{name}` is {list(given.shape)} in the state dict and {list(shape)} in the model"
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


def parallel_of(model: Any, call: str) -> ParallelModule:
    """The parallel model, out of what DistributedDataParallel or torch.compile wrapped around it."""
    inner = model
    while isinstance(inner, nn.Module) and not isinstance(inner, ParallelModule):
        inner = getattr(inner, "_orig_mod", getattr(inner, "module", None))
    if not isinstance(inner, ParallelModule):
        raise Error(
            f"{call}: a {type(model).__name__} is no parallel model",
            **{"try": f"{call}(model, ...), with what autotp.parallelize returned"},
        )
    return inner
