"""Runs an operator that needs more of a cut tensor than this rank's part: reduces over ranks, or gathers the whole.

Before: y = sum(x, dim=1)                x: [b, v@tp]
After:  y = all_reduce(sum(part of x, dim=1))

Before: x[3] = 0                         x: [v@tp, d]
After:  whole = gather(x); whole[3] = 0; part of x = this rank's part of whole

All ranks that hold the tensor run the same operator: it is a collective.

NOTE [Views of a gathered tensor]
On one device `row = p[3]` is a view: it shows what is later written into `p`, and what is written into it is in `p`. A
view of a tensor that had to be gathered keeps the gathered tensor, gathers again if the part was written since, and
writes this rank's part of what is written into it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from autotp.attached import first_time
from autotp.distributed.mesh import broadcast_from_first
from autotp.errors import Error
from autotp.ops import collectives
from autotp.ops.placement_moves import chosen
from autotp.source_location import calling_frame, is_users

aten = torch.ops.aten
FILLS = {
    aten.bernoulli_, aten.cauchy_, aten.exponential_, aten.geometric_, aten.log_normal_, aten.normal_, aten.random_,
    aten.uniform_,
}  # fmt: skip
"""Operators that overwrite a tensor with random numbers and do not read it, as `rrelu_with_noise_` does."""
LARGE = 2**28
"""The bytes of a gathered tensor above which the line that needs it is warned of, once."""


def overload_name(func: Any) -> str:
    """Returns the name of an operator."""
    return str(func._schema.name).partition("::")[2] if isinstance(func, OpOverload) else str(func)


# ---- the whole


class Whole:
    """The gathered whole of a cut tensor.

    Attributes:
        cut: the cut tensor, a `Sharded` or a `PartInRows`.
        tensor: the whole, plain.
        version: that of the part when it was gathered.
    """

    def __init__(self, cut: Any, read: bool = True) -> None:
        self.cut = cut
        _expect_small(cut)
        self.tensor = cut.gathered() if read else torch.empty(cut.shape, dtype=cut.dtype, device=cut.part.device)
        self.version = cut.version()

    def refresh(self) -> None:
        """Gathers again if the part was written since. Ranks write together."""
        if self.version != self.cut.version():
            self.tensor.copy_(self.cut.gathered())
            self.version = self.cut.version()

    def write(self) -> None:
        """Writes this rank's part of the whole into the part."""
        self.cut.expect_writable()
        self.cut.write(self.tensor)
        self.cut.was_written()
        self.version = self.cut.version()


def conversions(plain: Callable[[Any], Tensor]) -> Iterator[Any]:
    """Yields `tolist`, `numpy`, `__array__` and `__dlpack__` for a class of tensors.

    Args:
        plain: returns the plain tensor that is converted.
    """

    def conversion(name: str) -> Any:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.requires_grad and name != "tolist":
                raise RuntimeError(f"Can't call {name}() on Tensor that requires grad. Use tensor.detach() first.")
            return getattr(plain(self), name)(*args, **kwargs)

        return method

    return map(conversion, ("tolist", "numpy", "__array__", "__dlpack__"))


class WholeView(Tensor):
    """A view of a gathered whole: see NOTE [Views of a gathered tensor].

    Attributes:
        value: the view of `whole.tensor`, plain.
        whole: the gathered whole.
    """

    value: Tensor
    whole: Whole

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, view: Tensor, whole: Whole) -> WholeView:
        wrapper: WholeView = Tensor._make_wrapper_subclass(
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=view.device,
        )
        wrapper.value, wrapper.whole = view, whole
        return wrapper

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return on_wholes(func, args, kwargs or {})

    def current(self) -> Tensor:
        """Returns the view, with what was written into the part since."""
        self.whole.refresh()
        return self.value

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.current())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    tolist, numpy, __array__, __dlpack__ = conversions(lambda self: self.current())
    data = property(Tensor.detach)

    def data_ptr(self) -> int:
        """Returns the address in the gathered tensor."""
        return self.value.data_ptr()

    def untyped_storage(self) -> Any:
        """Returns the memory of the gathered tensor."""
        return self.value.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.current().detach().clone().__reduce_ex__(protocol)


def on_wholes(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns what an operator gives for the wholes of cut tensors, which all ranks gather; writes parts of them."""
    if torch.Tag.inplace_view in func.tags:
        raise shape_refused(overload_name(func))
    wholes: dict[int, Whole] = {}
    # What random numbers fill is overwritten, so it need not be gathered.
    fills = getattr(func, "overloadpacket", None) in FILLS
    written = [arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments]
    plain = [_mapped(partial(_plain, wholes, fills and written[i]), x) for i, x in enumerate(args)]
    named = {key: _mapped(partial(_plain, wholes, False), x) for key, x in kwargs.items()}
    result = func(*plain, **named)
    if not wholes:  # Nothing is cut here: an empty list.
        return result
    first = next(iter(wholes.values()))
    names = [arg.name for arg in func._schema.arguments]
    if torch.Tag.nondeterministic_seeded in func.tags:
        # Each rank has its own random numbers, and one tensor has those of one rank.
        operands = [*plain, *(named.get(name) for name in names[len(args) :])]
        drawn = [x for i, operand in enumerate(operands) if written[i] for x in _tensors(operand)] + _tensors(result)
        # An operator that writes in place returns what it has written.
        for x in {id(x): x for x in drawn}.values():
            broadcast_from_first(x, first.cut.mesh)
    for i, x in enumerate([*args, *(kwargs.get(name) for name in names[len(args) :])]):
        for y in _tensors(x) if written[i] else ():
            if id(y) in wholes:
                wholes[id(y)].write()
    # An operator that returns an operand returns the caller's object.
    pairs = zip(_tensors([*plain, *named.values()]), _tensors([*args, *kwargs.values()]), strict=True)
    operand_by_id = {id(p): x for p, x in pairs}
    return _mapped(lambda x: operand_by_id[id(x)] if id(x) in operand_by_id else _as_view(x, wholes, func), result)


def shape_refused(name: str) -> Error:
    """Returns the Error of an operator that would change the shape of a tensor in place."""
    return Error(
        f"`{name}` changes the shape of a tensor of which each rank holds a part, in place",
        fix=f"x = x.{name.rstrip('_')}(...), a new tensor",
    )


def _plain(wholes: dict[int, Whole], only_written: bool, x: Tensor) -> Tensor:
    """Returns the plain tensor that stands for an operand, and notes its whole."""
    if isinstance(x, WholeView):
        wholes[id(x)] = x.whole
        return x.current()
    if not hasattr(x, "gathered"):
        gradient_is_whole(x)
        return x
    if id(x) not in wholes:
        wholes[id(x)] = Whole(x, read=not only_written)
    return wholes[id(x)].tensor


def _as_view(x: Tensor, wholes: Mapping[int, Whole], func: OpOverload) -> Tensor:
    """Returns a result; one that shares memory with a whole, as a `WholeView` of it."""
    if not any(output.alias_info is not None for output in func._schema.returns):
        return x
    memory = x.untyped_storage()._cdata
    whole = next((w for w in wholes.values() if w.tensor.untyped_storage()._cdata == memory), None)
    return x if whole is None else WholeView(x, whole)


def gradient_is_whole(x: Tensor) -> None:
    """Has the gradient of a plain tensor be a plain one, where it is computed of a cut tensor beside it."""
    if torch.is_grad_enabled() and x.requires_grad and not hasattr(x, "autotp_gradient_is_whole"):
        x.register_hook(_gathered)
        x.autotp_gradient_is_whole = True  # type: ignore[attr-defined]


def _gathered(gradient: Tensor) -> Tensor:
    if isinstance(gradient, WholeView):
        return gradient.current()
    whole: Tensor = gradient.gathered() if hasattr(gradient, "gathered") else gradient
    return whole


def _expect_small(cut: Any) -> None:
    """Warns of a line that gathers a large tensor, once."""
    size = math.prod(cut.shape) * cut.part.element_size()
    frame: Any = calling_frame()
    if size <= LARGE:
        return
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    if frame is None or not first_time(frame.f_code, ("gathers", frame.f_lineno)):
        return
    warnings.warn_explicit(
        f"this line gathers a tensor {list(cut.shape)} of {size / 2**30:.1f} GiB, of which each rank holds a part, on "
        "every rank. Elementwise operators, sums and norms need no gather. This warning comes once for a line",
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=str(frame.f_globals.get("__name__")),
    )


# ---- reductions


def equal_or_close(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | None:
    """Returns whether two tensors are equal or close, on all ranks and in all copies; None for other operators."""
    if func not in (aten.equal.default, aten.allclose.default):
        return None
    if func is aten.allclose.default:
        return bool(torch.isclose(*args, **kwargs).all())
    return args[0].shape == args[1].shape and bool((args[0] == args[1]).all())


def reduced(func: OpOverload, bound: Mapping[str, Any], cut_type: Any) -> Any:
    """Returns what a reduction of the cut dimension gives, from each rank's part; None for other operators."""
    x = bound.get("self")
    if func not in REDUCTIONS or not isinstance(x, cut_type) or x.numel() == 0:
        return None
    dim = bound.get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim or [])
    # torch takes no dimensions for all of them.
    dims = sorted({d % x.dim() for d in dims}) or list(range(x.dim()))
    if x.cut[0] not in dims:
        return None
    count = math.prod(x.shape[d] for d in dims)
    result = REDUCTIONS[func](Reduction(x, dims, bool(bound.get("keepdim", False)), count), bound)
    return result.to(bound["dtype"]) if bound.get("dtype") is not None else result


class Reduction:
    """A reduction of a cut tensor over dimensions of which one is cut.

    Attributes:
        part: this rank's part.
        dims, keepdim: as torch's reductions have them.
        count: the number of elements that one result is made of.
    """

    def __init__(self, cut: Any, dims: list[int], keepdim: bool, count: int) -> None:
        self.held, self.mesh, self.part = cut.held, cut.mesh, cut.part
        self.dims, self.keepdim, self.count = dims, keepdim, count

    def once(self) -> Tensor:
        """Returns the part, of positions that several ranks hold those that no earlier rank has."""
        if not self.held.repeated:
            return self.part
        return chosen(self.part, self.held.dim, tuple(self.held.first(self.mesh.rank)))

    def wide(self) -> Tensor:
        """Returns `once` in the dtype in which torch adds: float32 for half precision, integers for booleans."""
        part = self.once()
        if part.dtype in (torch.bfloat16, torch.float16):
            return part.float()
        return part if part.is_floating_point() or part.is_complex() else part.to(torch.int64)

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of values like the part over dimensions and ranks."""
        return collectives.reduce(values.sum(self.dims, self.keepdim), self.mesh.group)

    def extreme(self, values: Tensor, largest: bool) -> Tensor:
        """Returns the largest or smallest of values like the part, over dimensions and ranks; NaN if there is one."""
        if all(values.shape[d] for d in self.dims):
            local = (torch.amax if largest else torch.amin)(values, self.dims, self.keepdim)
        else:
            shape = [1 if d in self.dims else n for d, n in enumerate(values.shape)]
            limits: Any = torch.finfo(values.dtype) if values.is_floating_point() else torch.iinfo(values.dtype)
            ends = (-math.inf, math.inf) if values.is_floating_point() else (limits.min, limits.max)
            local = values.new_full(shape, ends[0] if largest else ends[1])
            local = local if self.keepdim else local.reshape([n for d, n in enumerate(shape) if d not in self.dims])
        # Gathered, as a library's maximum over ranks may lose a NaN.
        every = collectives.gather(local.unsqueeze(0), self.mesh.group, 0, self.mesh.size)
        return (torch.amax if largest else torch.amin)(every, 0)


def _sum(on: Reduction, bound: Mapping[str, Any]) -> Tensor:
    total = on.sum(on.wide())
    return total.to(on.part.dtype) if on.part.is_floating_point() or on.part.is_complex() else total


def _mean(on: Reduction, bound: Mapping[str, Any]) -> Tensor:
    return (on.sum(on.wide()) / on.count).to(on.part.dtype)


def _norm(on: Reduction, bound: Mapping[str, Any]) -> Tensor:
    order = 2.0 if (order := bound.get("ord", bound.get("p"))) is None else float(order)
    magnitudes = on.wide().abs()
    if math.isinf(order):
        norm = on.extreme(magnitudes, order > 0)
    elif order == 0:
        norm = on.sum((magnitudes != 0).to(magnitudes.dtype))
    else:
        norm = on.sum(magnitudes**order) ** (1 / order)
    return norm if on.part.is_complex() else norm.to(on.part.dtype)


def _variance(on: Reduction, bound: Mapping[str, Any]) -> Tensor:
    # The mean has to broadcast against the part.
    keepdim, on.keepdim = on.keepdim, True
    wide = on.wide()
    mean = on.sum(wide) / on.count
    on.keepdim = keepdim
    correction = 1 if bound.get("correction") is None else bound["correction"]
    # As in torch: with no degree of freedom left it divides by 0.
    return (on.sum((wide - mean).abs() ** 2) / max(on.count - correction, 0)).to(on.part.dtype)


def _extreme(largest: bool) -> Callable[[Reduction, Mapping[str, Any]], Tensor]:
    def extreme(on: Reduction, bound: Mapping[str, Any]) -> Tensor:
        values = on.part.to(torch.uint8) if on.part.dtype is torch.bool else on.part
        return on.extreme(values, largest).to(on.part.dtype)

    return extreme


def _some(on: Reduction, bound: Mapping[str, Any]) -> Tensor:
    return on.sum((on.part != 0).to(torch.int64)) > 0


def _every(on: Reduction, bound: Mapping[str, Any]) -> Tensor:
    return on.sum((on.part == 0).to(torch.int64)) == 0


def _nonzero(on: Reduction, bound: Mapping[str, Any]) -> Tensor:
    return on.sum((on.once() != 0).to(torch.int64))


REDUCTIONS: dict[OpOverload, Callable[[Reduction, Mapping[str, Any]], Tensor]] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.var.correction: _variance,
    aten.std.correction: lambda on, bound: _variance(on, bound).sqrt(),
    aten.amax.default: _extreme(True),
    aten.amin.default: _extreme(False),
    aten.max.default: _extreme(True),
    aten.min.default: _extreme(False),
    aten.any.default: _some,
    aten.any.dim: _some,
    aten.all.default: _every,
    aten.all.dim: _every,
    aten.count_nonzero.default: _nonzero,
    aten.count_nonzero.dim_IntList: _nonzero,
}
"""Reductions whose result over the whole is made of each rank's result, of a few numbers."""


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [y for x in value for y in _tensors(x)] if isinstance(value, list | tuple) else []


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return type(value)([_mapped(function, x) for x in value]) if isinstance(value, list | tuple) else value
