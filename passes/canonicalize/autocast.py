"""autocast: makes the casts of `torch.autocast` operators of the graph.

    Before: linear(x, w)  where autocast is bfloat16         After: linear(to(x, bfloat16), to(w, bfloat16))
    Before: enter_autocast("cpu", None, False); y; exit      After: y

Later passes see the true dtypes, and the graph computes the same with autocast off.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.errors import Error
from autotp.passes.builder import Builder, at_captured_sizes, fake_mode_of
from autotp.passes.capture.autocast_regions import Autocast, enter_autocast, exit_autocast
from autotp.rules.call import outputs_of
from autotp.source_location import line_of

aten = torch.ops.aten


def autocast(graph: fx.Graph, enclosing: Autocast) -> fx.Graph:
    """Returns the graph with every cast as an operator, and without the autocast regions of the captured device.

    Args:
        enclosing: the settings of autocast around the captured call.

    Raises:
        Error: autocast casts in the middle of an operator.
    """
    builder, states = Builder(fake_mode_of(graph)), [enclosing]
    # Sizes are numbers here, since some versions of torch ask for a number of elements. Only a size that depends on the
    # values of a tensor is a symbol.
    trial = FakeTensorMode(shape_env=ShapeEnv())
    for node in graph.nodes:
        builder.origin = node
        if node.target is enter_autocast and node.args[0] == enclosing.device:
            states.append(_entered(node))
        elif node.target is exit_autocast and node.args[0].args[0] == enclosing.device:
            states.pop()
        elif states[-1].dtype is not None and isinstance(node.target, OpOverload):
            _visit(builder, node, states[-1], trial)
        else:
            builder.copy(node)
    return builder.graph


def _entered(node: fx.Node) -> Autocast:
    device, dtype, enabled, _ = node.args
    return Autocast(device, (dtype or torch.get_autocast_dtype(device)) if enabled else None)  # type: ignore[arg-type]


def _visit(builder: Builder, node: fx.Node, state: Autocast, trial: FakeTensorMode) -> None:
    dtype = _target(node, state, trial)
    if dtype is None:
        builder.copy(node)
        return
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda old: _as(builder, old, dtype))
    result = builder.env[node] = builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    if [v.dtype for v in outputs_of(result)] != [v.dtype for v in outputs_of(node)]:
        raise Error(
            f"autocast casts in the middle of {node.target}", at=line_of(node),
            fix="torch.autocast(..., enabled=False) around it",
        )  # fmt: skip


def _as(builder: Builder, old: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Returns an operand in `dtype`, if autocast casts it: it does not cast float64 and non-floating tensors."""
    value, operand = old.meta.get("val"), builder.env[old]
    fixed = (
        not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype in (torch.float64, dtype)
    )
    return operand if fixed else builder.call(aten.to.dtype, operand, dtype)


def _target(node: fx.Node, state: Autocast, trial: FakeTensorMode) -> torch.dtype | None:
    """Returns the dtype to which autocast casts an operator's operands; None if it does not.

    The operator runs on fake tensors with autocast, and its casts are noted. Casts that it also makes without autocast
    are its own. (An operator may need autocast if its operands differ in dtype: then the operands are cast before the
    run without autocast.)
    """
    values = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    sized = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.SymInt | torch.Tensor)]
    if free_unbacked_symbols(sized) and not _has_own_kernel(node.target, state.device):
        return None  # Sizes that depend on values would be any numbers in the run, which need not fit together.
    args, kwargs = at_captured_sizes(values, trial)
    casts = _casts(node.target, args, kwargs, state, trial)
    if not casts:
        return None
    dtypes = {t.dtype for t in pytree.tree_leaves((args, kwargs)) if _castable(t)}
    if len(dtypes) > 1:
        with torch.no_grad(), trial:
            args, kwargs = pytree.tree_map(lambda t: t.to(casts[0]) if _castable(t) else t, (args, kwargs))
    try:
        own_casts = _casts(node.target, args, kwargs, Autocast(state.device), trial)
    except RuntimeError:  # It runs in this dtype only where autocast casts: a Fourier transform of bfloat16.
        own_casts = []
    return next(iter(Counter(casts) - Counter(own_casts)), None)


def _has_own_kernel(op: Any, device: str) -> bool:
    """True for an operator of which autocast has its own version, and for one that is made of other operators."""
    keys = f"Autocast{device.upper()}", "CompositeImplicitAutograd"
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


def _castable(value: Any) -> bool:
    """True for a tensor that autocast may cast: floating, and not float64."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _casts(op: Any, args: Any, kwargs: Any, state: Autocast, mode: Any) -> list[torch.dtype]:
    with torch.no_grad(), mode, _Casts() as casts, state.on():
        op(*args, **kwargs)
    return casts.to


class _Casts(TorchDispatchMode):
    """A mode that lists the target dtypes of all casts."""

    def __init__(self) -> None:
        super().__init__()
        self.to: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._to_copy.default and kwargs and kwargs.get("dtype") is not None:
            self.to.append(kwargs["dtype"])
        return func(*args, **(kwargs or {}))
