"""torch's gradient clipping and GradScaler, which count over all ranks of a parallel model.

NOTE [Two functions of torch's]
`torch.nn.utils.clip_grad_norm_` (which Lightning, accelerate and transformers call) and `torch.amp.GradScaler` look at
all gradients that a rank has, and then do something to each of them: with each rank's own number, the ranks would
drift apart. Both ask one function for that number, and find it when they are called: `_get_total_norm` in the closure
of the function of this name, so that whoever imported it or `clip_grad_norm_` before has it, too; `_unscale_grads_` on
the class. These two are replaced as long as there is a parallel model. Where no gradient of one is among those given
they are torch's own. (`ShardedGradScaler` has an `_unscale_grads_` of its own.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from autotp.distributed.cut_parameter import CutTensor, warn_of
from autotp.distributed.live_models import Undo, sorted_by_model
from autotp.ops.collectives import reduce
from autotp.runtime.grad_norm import total_norm
from autotp.runtime.holdings import Holdings, holdings_of


def install() -> Undo:
    """Replaces both of torch's functions; what it returns puts them back."""
    cell, scaler = _cell(clip_grad._get_total_norm), torch.amp.GradScaler
    norm, unscale = cell.cell_contents, scaler._unscale_grads_
    cell.cell_contents = _instead(norm, _norm_of_all)
    scaler._unscale_grads_ = _instead(unscale, _unscaled_on_all)  # type: ignore[method-assign]

    def undo() -> None:
        cell.cell_contents, scaler._unscale_grads_ = norm, unscale  # type: ignore[method-assign]

    return undo


def _cell(function: Callable[..., Any]) -> Any:
    """Where a function that torch runs without gradients has the function that it runs."""
    assert function.__closure__ is not None
    return function.__closure__[function.__code__.co_freevars.index("func")]


def _instead(old: Callable[..., Any], new: Callable[..., Any]) -> Any:
    """`new`, given `old` first; never compiled: it depends on which models there are."""

    @wraps(old)
    def call(*args: Any, **kwargs: Any) -> Any:
        return new(old, *args, **kwargs)

    return torch.compiler.disable(call)


def _of_parallel(tensors: Iterable[Tensor]) -> tuple[list[tuple[Holdings, dict[str, Tensor]]], list[Tensor]]:
    """What belongs to models that several ranks hold together, each with its parts; and the other tensors."""
    held, others = sorted_by_model(tensors)
    found = []
    for model, some in held.items():
        parts = holdings_of(model, "clip_grad_norm_")
        if parts.everyone.size > 1:
            found.append((parts, some))
        else:
            others += some.values()
    return found, others


def _norm_of_all(
    old: Callable[..., Tensor],
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """As torch's, each model's gradients counted over all its ranks; what is in no model is the same on all."""
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    models, others = _of_parallel(given)
    if parts := [x for x in others if isinstance(x, CutTensor)]:  # Computed from parameters, or copies of them.
        warn_of(parts[0], "get_total_norm")
    if not models:
        return old(given, norm_type, error_if_nonfinite, foreach)
    norms = [total_norm(parts, some, norm_type) for parts, some in models]
    if others:
        rest = old(others, norm_type, False, foreach)
        norms.append((rest.full_tensor() if isinstance(rest, DTensor) else rest).to(norms[0]))
    # torch's own once more, of the norms: its last step, its error and its dtype.
    return old([torch.stack(norms)], norm_type, error_if_nonfinite, foreach).to(given[0].dtype)


def _unscaled_on_all(
    old: Callable[..., dict[torch.device, Tensor]],
    scaler: Any,
    optimizer: torch.optim.Optimizer,
    *rest: Any,
    **named: Any,
) -> dict[torch.device, Tensor]:
    """As torch's: whether a gradient overflowed, by device; 1 on all ranks where it did on any."""
    found = old(scaler, optimizer, *rest, **named)
    models, _ = _of_parallel(p for group in optimizer.param_groups for p in group["params"])
    for parts, _ in models:
        place = parts.everyone
        mine = sum((x.to(place.device) for x in found.values()), torch.zeros((), device=place.device))
        anywhere = reduce(mine, place.group, "max")
        for flag in found.values():
            flag.copy_(anywhere)
    return found
