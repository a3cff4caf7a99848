"""Makes torch's gradient clipping and GradScaler count over all ranks of a parallel model.

NOTE [Two functions of torch's]
`torch.nn.utils.clip_grad_norm_` (which Lightning, accelerate and transformers call) and `torch.amp.GradScaler` compute
one number from all gradients of a rank, and then change each gradient by it. With a different number on each rank, the
ranks would compute different models. Both get the number from one function, which they look up when they are called:
`_get_total_norm`, in the closure of the function of this name, so that earlier imports of it or of `clip_grad_norm_`
use the replacement, too; and `_unscale_grads_`, on the class. Both are replaced while a parallel model exists. Without
gradients of a parallel model they do what torch does. (`ShardedGradScaler` has its own `_unscale_grads_`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autotp import torch_internals as internals
from autotp.distributed.cut_tensors.cut_parameter import whole_operand
from autotp.distributed.live_models import Undo, sorted_by_model
from autotp.errors import within
from autotp.ops.collectives import reduce
from autotp.runtime.grad_norm import total_norm
from autotp.runtime.holdings import Holdings, holdings_of
from autotp.runtime.torch_hooks.optimizer_state import expect_norm


def install() -> Undo:
    """Replaces both functions of torch; returns the undo."""
    cell = _cell(internals.TOTAL_NORM.original())
    norm, cell.cell_contents = cell.cell_contents, _instead(cell.cell_contents, _norm_of_all)
    unpatch_scaler = internals.UNSCALES.put(_instead(internals.UNSCALES.original(), _unscaled_on_all))

    def undo() -> None:
        cell.cell_contents = norm
        unpatch_scaler()

    return undo


def _cell(function: Callable[..., Any]) -> Any:
    """Returns the closure cell with the inner function of a `torch.no_grad()` wrapper."""
    assert function.__closure__ is not None
    return function.__closure__[function.__code__.co_freevars.index("func")]


def _instead(old: Callable[..., Any], replacement: Callable[..., Any]) -> Any:
    """Returns `replacement` with `old` as first argument. It is never compiled: it depends on the models that exist."""

    @wraps(old)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(old, *args, **kwargs)

    return torch.compiler.disable(call)


def _of_parallel(tensors: Iterable[Tensor]) -> tuple[list[tuple[Holdings, dict[str, Tensor]]], list[Tensor]]:
    """Splits tensors into those of parallel models with several ranks, by model, and the others."""
    by_model, plain = sorted_by_model(tensors)
    parallel = []
    for model, some in by_model.items():
        parts = holdings_of(model, "clip_grad_norm_")
        if parts.everyone.size > 1:
            parallel.append((parts, some))
        else:
            plain += some.values()
    return parallel, plain


def _norm_of_all(
    old: Callable[..., Tensor],
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Computes the norm as torch does, but over all ranks of each model; other tensors are the same on all ranks."""
    all_tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    within("clip_grad_norm_", lambda: expect_norm(all_tensors))
    models, plain = _of_parallel(all_tensors)
    plain = [whole_operand(x) for x in plain]  # Copies of parts, and values computed from them.
    if not models:
        return old(plain, norm_type, error_if_nonfinite, foreach)
    norms = [total_norm(parts, some, norm_type) for parts, some in models]
    if plain:
        # No error here: the last line raises it, on all ranks alike.
        rest = old(plain, norm_type, False, foreach)
        norms.append((rest.full_tensor() if isinstance(rest, DTensor) else rest).to(norms[0]))
    # torch's function, on the norms: for its last step, its error and its dtype.
    return old([torch.stack(norms)], norm_type, error_if_nonfinite, foreach).to(all_tensors[0].dtype)


def _unscaled_on_all(
    old: Callable[..., dict[torch.device, Tensor]],
    scaler: Any,
    optimizer: torch.optim.Optimizer,
    *rest: Any,
    **named: Any,
) -> dict[torch.device, Tensor]:
    """Returns by device whether a gradient overflowed, as torch does; 1 on all ranks if it did on any rank."""
    overflows = old(scaler, optimizer, *rest, **named)
    models, _ = _of_parallel(p for group in optimizer.param_groups for p in group["params"])
    for parts, _ in models:
        place = parts.everyone
        local = sum((x.to(place.device) for x in overflows.values()), torch.zeros((), device=place.device))
        # Any rank's overflow makes all ranks leave out the step.
        anywhere = reduce(local, place.group, "max")
        for flag in overflows.values():
            flag.copy_(anywhere)
    return overflows
