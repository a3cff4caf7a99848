"""Derives a rank's part of a call of the model's graph, for `check`, from axes and the cut leaf alone.

Before: view(x, [b, s, 12, 64]), cut along 12 heads
After:  view(x, [b, s, 3, 64]), on each of 4 ranks
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from autotp.ops.dropout import exact_dropout
from autotp.ops.placement_moves import nearby
from autotp.passes.check.erase import FORMS, SDPA, SLICE, SPLIT, family
from autotp.passes.check.types import OperatorCut
from autotp.passes.lower.local_sizes import Target
from autotp.passes.plan.infer_axes import Axes, Dims
from autotp.rules.call import arguments_of, outputs_of, parameters
from autotp.rules.traits import size_argument
from autotp.sharding.axis import Axis, Size, find, is_major, open_product, touches
from autotp.sharding.grid import positions_of_part
from autotp.sharding.layout import Range, ranges
from autotp.sharding.partition import chunk_size, chunk_start, chunk_stop
from autotp.sharding.strides import order_at_capture


def local_length(to: Target, axis: Axis, leaf: Axis | None) -> Size:
    """Returns the length of an axis on this rank if `leaf` is cut."""
    size = find(axis).size
    if leaf is None or not touches(axis, leaf):
        return size
    if find(leaf).kind == "grid" and not size.symbols:
        return Size(sum(b - a for a, b in ranges(axis, leaf, to.tp, to.rank)))
    whole, number = positions_of_part(axis, leaf, to.tp, to.rank)
    length = _known(to, chunk_size, leaf) if find(leaf).size.symbols else Size(number)
    rest = size.divided(whole)
    if rest is None:
        raise ValueError(f"{axis} is not a multiple of {leaf}")
    return length * rest


def _known(to: Target, measure: Callable[..., int], leaf: Axis) -> Size:
    """Returns start, stop or length of this rank's part of a leaf; a symbolic one must be computed in the graph."""
    size = find(leaf).size
    if not size.symbols:
        return Size(measure(size.number, to.tp, to.rank))
    if (measure, size) not in to.parts:
        raise ValueError(f"nothing computes this rank's part of {size}")
    return to.parts[measure, size]


def pieces_by_rank(to: Target, axis: Axis, leaf: Axis) -> tuple[tuple[Range, ...], ...] | None:
    """Returns the positions of an axis that each rank holds; None if they depend on the inputs' sizes."""
    if find(axis).size.symbols:
        return None
    return tuple(tuple(ranges(axis, leaf, to.tp, rank)) for rank in range(to.tp))


def local_call(
    to: Target, axes: Axes, node: fx.Node, model: fx.Node, cut: OperatorCut | None
) -> tuple[Any, dict[str, Any]]:
    """Returns target and arguments of the call that computes this rank's part."""
    arguments, target = arguments_of(model), model.target
    if cut is None:
        return target, arguments
    ins, outs, leaf = axes.bound[model].dims[0], axes.dims[model], cut.leaf
    if cut.factor.mark == "!":
        return _form(to, node.target, model.target, arguments, ins, cut)
    if family(model) is SPLIT:
        dim = arguments["dim"] % len(ins[0])
        sizes = [local_length(to, out[dim], leaf) for out in outs]
        return SPLIT, {"self": arguments["self"], "split_sizes": sizes, "dim": dim}
    if family(model) is SLICE and touches(ins[0][arguments["dim"]], leaf):
        return SLICE, _local_slice(to, model, arguments, ins[0], leaf)
    if name := size_argument(target):
        out = outs[0]
        inside = str(target).startswith("aten.unflatten")
        first = arguments["dim"] % len(ins[0]) if inside else len(out) - len(arguments[name])
        arguments[name] = [local_length(to, axis, leaf) for axis in out[first : first + len(arguments[name])]]
    return target, arguments


def _local_slice(to: Target, model: fx.Node, arguments: dict[str, Any], dims: Dims, leaf: Axis) -> dict[str, Any]:
    """Returns the arguments of a slice of a cut dimension: the rank's positions between its bounds; all with a step."""
    dim, start = arguments["dim"] % len(dims), arguments["start"] or 0
    if Size.of(outputs_of(model)[0].shape[dim]) == find(dims[dim]).size:  # All positions.
        return {"self": arguments["self"], "dim": dim, "start": 0, "end": sys.maxsize, "step": 1}
    if arguments.get("step", 1) != 1:
        return arguments | {"dim": dim, "start": start, "end": sys.maxsize}
    pieces = pieces_by_rank(to, dims[dim], leaf) or ()
    first = max(start + find(dims[dim]).size.number, 0) if start < 0 else start
    bounds = first, first + outputs_of(model)[0].shape[dim]
    # The number of the rank's positions before a bound is that bound among them.
    local_bounds = [sum(max(min(b, bound) - a, 0) for a, b in pieces[to.rank]) for bound in bounds]
    return {"self": arguments["self"], "dim": dim, "start": local_bounds[0], "end": local_bounds[1], "step": 1}


def _form(
    to: Target, form: Any, target: Any, arguments: dict[str, Any], ins: Sequence[Dims], cut: OperatorCut
) -> tuple[Any, dict[str, Any]]:
    """Returns the call of a parallel form; a call that matches no node if `form` is the wrong form."""
    of, names, only = FORMS.get(form, (None, (), ""))
    if form is target and only:
        return form, _again(to, form, arguments, ins, cut.leaf)
    if of is not target or only not in ("", to.randomness) or not arguments.get("train", True):
        return f"a parallel form of {target}", {}
    axis, leaf = ins[0][cut.factor.ins[0]] if cut.factor.ins else cut.factor.axis, cut.leaf
    arguments |= {"parts": to.tp, "rank": to.rank, "near": arguments.get("near")}
    if any(isinstance(value, fx.Node) and value.target is nearby for value in arguments.values()):
        arguments["near"] = find(axis).size if find(axis).size.symbols else find(axis).size.number
    if find(axis).size.symbols:
        started = any(name.startswith("start") for name in names)
        arguments |= {"start": _known_start(to, axis, leaf), "size": find(axis).size} if started else {}
    else:
        start = _start(to, axis, leaf)
        length = local_length(to, axis, leaf) if start is not None else Size(0)
        arguments |= {"start": start, "stop": Size((start or 0) + length.number), "size": find(axis).size.number}
    if (name := f"start_{cut.factor.ins.get(0)}") in names:  # A form that may be cut along several dimensions.
        arguments[name] = arguments["start"]
    values = [arguments[name] for name in names if name in arguments]  # A call may leave out the last ones.
    if only:
        drawn = _drawn(of, ins)
        values += [to.rank] if only == "fast" else [[find(axis).size for axis in drawn], (_mask(to, drawn, leaf),)]
        values += [order_at_capture(outputs_of(arguments["input"])[0])] if form is exact_dropout else []
    return form, dict(zip(parameters(form), values, strict=False))  # `fresh` comes later


def _again(to: Target, form: Any, arguments: dict[str, Any], ins: Sequence[Dims], leaf: Axis) -> dict[str, Any]:
    """Returns the arguments of a random form that another mesh axis cuts already, on this rank's part of that part."""
    of, _, only = FORMS[form]
    if only == "fast":
        return arguments | {"rank": arguments["rank"] * to.tp + to.rank}
    return arguments | {"cuts": (*arguments["cuts"], _mask(to, _drawn(of, ins), leaf))}


def _drawn(of: Any, ins: Sequence[Dims]) -> Dims:
    """Returns the axes of the numbers that a random form draws: of its operand, or of an attention's weights."""
    return ins[0] if of is not SDPA else (*ins[0][:-1], ins[1][-2])


def _start(to: Target, axis: Axis, leaf: Axis) -> int | None:
    """Returns the start of this rank's rows if they are contiguous; else None."""
    pieces = pieces_by_rank(to, axis, leaf)
    if pieces is None or len(pieces[to.rank]) > 1:
        return None
    # A rank without rows begins at the end, as `chunk_bounds` says.
    return pieces[to.rank][0][0] if pieces[to.rank] else find(axis).size.number


def _known_start(to: Target, axis: Axis, leaf: Axis) -> Size | None:
    """Returns the same for positions that depend on the inputs' sizes."""
    opened = open_product(axis, leaf)
    return _known(to, chunk_start, leaf) * opened[1] if opened is not None and is_major(axis, leaf) else None


def _mask(to: Target, dims: Dims, leaf: Axis) -> tuple[Any, ...]:
    """Returns the cut dimension, its sizes (major, cut, minor), and this rank's ranges of the middle one."""
    (dim,) = (d for d, axis in enumerate(dims) if touches(axis, leaf))
    opened = open_product(dims[dim], leaf)
    if opened is None:
        return dim, (1, find(dims[dim]).size, 1), (pieces_by_rank(to, dims[dim], leaf) or ())[to.rank]
    local_range = _known(to, chunk_start, leaf), _known(to, chunk_stop, leaf)
    return dim, (opened[0], find(leaf).size, opened[1]), (local_range,)
