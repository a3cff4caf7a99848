"""Sharded: a tensor of which each rank holds a part: logits that stay cut, or a cache that a parallel model returns.

Its shape is that of the whole, on every rank, also on one with an empty part. It is a type of torch's own dispatcher,
as DTensor is: every operator sees it, whoever calls it, and autograd goes through it. It behaves as the whole tensor:
`sharded_operators.py` and `whole_operators.py` say what an operator computes on parts, and what is gathered for it.

NOTE [A part with derivatives of its own]
Inside a transform of torch.func, or of forward-mode derivatives, an output of the model is a tensor of the transform,
and a `Sharded` made of it is only a box: `to_local` and `autotp.gather` give what is in it, and each operator is an
Error. Parameters that a transform is given are tensors of the transform around a `Sharded`: they behave as wholes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from types import FrameType
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from autotp.distributed.cut_tensors.sharded_operators import on_parts, operator_error, shape_text
from autotp.distributed.cut_tensors.whole_operators import WholeView, conversions
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.groups.process_group import process_group
from autotp.ops import collectives, placement_moves
from autotp.ops.eager_mode import apply_plain, has_tangent, is_mapped, is_transformed
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_sizes
from autotp.source_location import calling_frame


class Sharded(Tensor):
    """A tensor with the shape of the whole that holds one rank's part.

    Attributes:
        part: this rank's part, without a gradient; `to_local` gives it with one.
        memory: the part of which this one is a view, or itself; torch counts there how often it was written.
        held: the layout, without a shape.
        mesh: the ranks.
        of_leaf: whether it stands for a parameter while gradients are recorded, so that writing into it is an error.
        is_box: whether the part may have derivatives of its own.
    """

    part: Tensor
    memory: Tensor
    held: Layout
    mesh: Mesh
    of_leaf: bool = False
    is_box: bool = False

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, part: Tensor, layout: Layout, mesh: Mesh, strides: Sequence[int] | None = None) -> Sharded:
        shape = [layout.size if d == layout.dim else n for d, n in enumerate(part.shape)]
        wrapper: Sharded = Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=strides or whole_strides(part, layout),
            dtype=part.dtype,
            device=part.device,
        )
        wrapper.part, wrapper.held, wrapper.mesh = part, replace(layout, shape=()) if layout.shape else layout, mesh
        wrapper.memory = part
        return wrapper

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return on_parts(func, args, kwargs or {}, cls)

    @property
    def cut(self) -> tuple[int, Any]:
        """The dimension that is cut, and each rank's ranges of it; graphs are made for these."""
        assert self.held.dim is not None
        return self.held.dim, self.held.pieces

    def like(self, part: Tensor, dim: int, strides: Sequence[int] | None = None) -> Sharded:
        """Returns another tensor that is cut in the same way, along its dimension `dim`."""
        cut_tensor = Sharded(part, replace(self.held, dim=dim), self.mesh, strides)
        # A view of the part: what is written into it counts where the part counts.
        if part.untyped_storage()._cdata == self.memory.untyped_storage()._cdata:
            cut_tensor.memory = self.memory
        return cut_tensor

    def to_local(self) -> Tensor:
        """Returns this rank's part; gradients flow through it."""
        if self.is_box:
            return torch._C._functorch.unwrap_if_dead(self.part)
        return taken_part(self, self.held, self.mesh)

    def full_tensor(self) -> Tensor:
        """Returns the whole tensor: all ranks call this. Gradients flow through it."""
        return full(self.to_local(), self.held, self.mesh)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Sharded({shape_text(self)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        copied: Any = self.detach().clone().requires_grad_(self.requires_grad) if self.is_leaf else self.clone()
        memo[id(self)] = copied
        return copied

    def gathered(self) -> Tensor:
        """Returns the whole tensor without its derivatives: all ranks call this."""
        return join_parts(self.part.detach(), self.held, self.mesh)

    def expect_writable(self) -> None:
        """Raises RuntimeError, as torch does for a parameter, if gradients of what is written would be lost."""
        if self.of_leaf and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")

    def is_cut_as(self, layout: Layout) -> bool:
        """True if another tensor with this layout has the same shape and the same parts."""
        return self.shape == layout.shape and self.cut == (layout.dim, layout.pieces)

    def data_ptr(self) -> int:
        """Returns the address of the part, by which some code tells tensors apart; for other code raises Error."""
        if reads_memory(calling_frame()):
            raise memory_refused(f"a tensor {shape_text(self)}")
        return self.part.data_ptr()

    def write(self, whole: Tensor) -> None:
        """Writes this rank's part of a whole tensor into the part."""
        self.part.copy_(self.held.take(whole, self.mesh.rank))

    def was_written(self) -> None:
        """Tells autograd, and views of the whole, that the part was written: torch does not, below autograd."""
        if not self.memory.is_inference():
            torch.autograd.graph.increment_version(self.memory)

    def version(self) -> int:
        """Returns how often the part was written, also through other views of its memory."""
        return 0 if self.memory.is_inference() else self.memory._version

    def to_dtensor(self) -> DTensor:
        """Returns the same tensor as a DTensor, without its derivatives.

        Raises:
            Error: a DTensor cannot be cut so: in parts that are not those of `torch.chunk`.
        """
        return as_dtensor(self.part.detach(), self.held, self.mesh, tuple(self.shape), tuple(self.stride()))

    tolist, numpy, __array__, __dlpack__ = conversions(lambda self: self.gathered())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the whole, a plain tensor: all ranks call this."""
        return self.gathered().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def _without_operator(name: str) -> Any:  # type: ignore[misc]
        """Returns a method that raises Error: it would read or set memory that this object does not have."""

        def method(self: Sharded, *_: Any, **__: Any) -> NoReturn:
            raise operator_error(name, self)

        return method

    set_, storage = map(_without_operator, ("set_", "storage"))
    data = property(Tensor.detach, _without_operator("data ="))

    def untyped_storage(self) -> Any:
        """Returns memory without data, by which torch.compile tells tensors apart; for others raises Error."""
        if not str(calling_frame().f_globals.get("__name__")).startswith(COMPILING):
            raise operator_error("untyped_storage", self)
        return super().untyped_storage()

    # torch.compile takes a tensor apart, and puts it together again.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["part"], (self.held, self.mesh)

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], facts: tuple[Layout, Mesh], size: Any, stride: Any) -> Sharded:
        return Sharded(tensors["part"], facts[0], facts[1], stride)


BY_ADDRESS = ("torch", "autotp", "transformers", "accelerate", "heavyball", "pytorch_optimizer")
"""Packages that ask for addresses only to tell tensors apart."""


def reads_memory(frame: FrameType) -> bool:
    """True for code that asks for a tensor's address and may read what is there, with the sizes of the whole."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in BY_ADDRESS


def memory_refused(tensor: str) -> Error:
    """Returns the Error of code that asks for the address of a tensor: a kernel, or one that writes a file."""
    return Error(
        f"`data_ptr` of {tensor}, of which each rank holds a part: a kernel would take it for the whole",
        fix="autotp.gather(tensor), the whole; or tensor.to_local(), this rank's part",
        alternative="id(tensor), to tell tensors apart; autotp.full_state_dict(model), for a file",
    )


COMPILING = ("torch._functorch", "torch._inductor", "torch._dynamo", "torch._subclasses", "torch.utils.")
"""Packages of torch.compile."""


def whole_strides(part: Tensor, layout: Layout) -> list[int] | None:
    """Returns the strides of a whole tensor that lies in memory as its part does; None for a contiguous one."""
    dim, strides = layout.dim or 0, part.stride()
    if part.is_contiguous():
        return None
    stride, length = strides[dim], max(part.shape[dim], 1)
    # A stride that spans the cut dimension grows with its length.
    outer = [n > stride or (n == stride and d < dim) for d, n in enumerate(strides)]
    return [n // length * layout.size if is_outer else n for n, is_outer in zip(strides, outer, strict=True)]


def sharded(part: Tensor, layout: Layout, mesh: Mesh) -> Sharded:
    """Returns the tensor of which `part` is this rank's part; gradients flow to `part`."""
    if is_mapped(part) or has_tangent(part):  # NOTE [A part with derivatives of its own]
        box = Sharded(part, layout, mesh)
        box.is_box = True
        return box
    if part.requires_grad and torch.is_grad_enabled():
        whole: Sharded = apply_plain(_Joined, part, layout, mesh, True)
        return whole
    return Sharded(part.detach(), layout, mesh)


def part_of(x: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Returns this rank's part, in a layout, of a tensor: whole, cut in this way, or cut in another one."""
    if isinstance(x, Sharded) and x.cut == (layout.dim, layout.pieces):
        return x.to_local()
    if isinstance(x, WholeView):
        x = x.current()
    return layout.take(x.full_tensor() if isinstance(x, Sharded) else x, mesh.rank)


def taken_part(x: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Returns the same as `part_of`; derivatives go through it, on every rank, also in a transform of torch.func."""
    if (x.requires_grad and torch.is_grad_enabled()) or is_transformed(x):
        part: Tensor = apply_plain(_Taken, x, layout, mesh)
        return part
    return _raw_part(x, layout, mesh)


def full(part: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Returns the whole tensor of which each rank gives its part. Each rank gets the gradient of all that it holds."""
    if (part.requires_grad and torch.is_grad_enabled()) or is_transformed(part):
        whole: Tensor = apply_plain(_Joined, part, layout, mesh, False)
        return whole
    return join_parts(part, layout, mesh)


def _raw_part(x: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Returns the same as `part_of`, without derivatives."""
    if not isinstance(x, Sharded):
        return layout.take(x.current() if isinstance(x, WholeView) else x, mesh.rank)
    return x.part if x.cut == (layout.dim, layout.pieces) else layout.take(x.gathered(), mesh.rank)


class _Taken(torch.autograd.Function):
    """A whole tensor, cut or plain -> this rank's part. `_Joined` is its backward, and is differentiated in turn."""

    @staticmethod
    def forward(whole: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
        return _raw_part(whole, layout, mesh).detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Layout, Mesh], _: Tensor) -> None:
        ctx.set_materialize_grads(False)
        whole, *ctx.where = inputs
        while is_functorch_wrapped_tensor(whole):
            whole = torch._C._functorch.get_unwrapped(whole)
        ctx.is_cut = isinstance(whole, Sharded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        if gradient is None:
            return None, None, None
        return _Joined.apply(gradient, *ctx.where, ctx.is_cut), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        part: Tensor = _Taken.apply(tangent, *ctx.where)
        return part

    @staticmethod
    def vmap(_: Any, dims: tuple[int, ...], whole: Tensor, layout: Layout, mesh: Mesh) -> tuple[Tensor, int]:
        return _Taken.apply(whole.movedim(dims[0], 0), _behind_batch(layout), mesh), 0


class _Joined(torch.autograd.Function):
    """This rank's part -> the whole tensor, cut or plain. `_Taken` is its backward, and is differentiated in turn."""

    @staticmethod
    def forward(part: Tensor, layout: Layout, mesh: Mesh, as_cut: bool) -> Tensor:
        return Sharded(part.detach(), layout, mesh) if as_cut else join_parts(part, layout, mesh)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Layout, Mesh, bool], _: Tensor) -> None:
        ctx.set_materialize_grads(False)  # DDP runs it for an output that nobody reads, with no gradient.
        ctx.layout, ctx.mesh, ctx.as_cut = inputs[1:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        return taken_part(gradient, ctx.layout, ctx.mesh), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        whole: Tensor = _Joined.apply(tangent, ctx.layout, ctx.mesh, ctx.as_cut)
        return whole

    @staticmethod
    def vmap(
        _: Any, dims: tuple[int, ...], part: Tensor, layout: Layout, mesh: Mesh, as_cut: bool
    ) -> tuple[Tensor, int]:
        return _Joined.apply(part.movedim(dims[0], 0), _behind_batch(layout), mesh, as_cut), 0


def _behind_batch(layout: Layout) -> Layout:
    """Returns the layout of tensors that have one dimension more in front."""
    assert layout.dim is not None
    return replace(layout, shape=(), dim=layout.dim + 1)


def as_dtensor(part: Tensor, layout: Layout, mesh: Mesh, shape: tuple[int, ...], strides: tuple[int, ...]) -> DTensor:
    """Returns a DTensor of which `part` is this rank's part: see `Sharded.to_dtensor`."""
    assert layout.dim is not None
    if (
        mesh.group is None
        or any(
            [(stop - start) for start, stop in piece] != [n] * (n > 0)
            for piece, n in zip(layout.pieces, chunk_sizes(layout.size, mesh.size), strict=True)
        )
        or layout.repeated
    ):
        raise Error(
            f"a tensor {list(shape)} whose parts are {[list(piece) for piece in layout.pieces]} of dimension "
            f"{layout.dim}: a DTensor has one part a rank, as torch.chunk makes them",
            fix="autotp.gather(tensor), which is whole; tensor.to_local(), this rank's part",
        )
    ranks = DeviceMesh.from_group(process_group(mesh.group), part.device.type)
    return DTensor.from_local(part, ranks, [Shard(layout.dim)], shape=torch.Size(shape), stride=strides)


def join_parts(local: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Returns the whole tensor of which each rank gives its part.

    Parts of equal blocks are gathered. Others are summed, each in its place: positions that several ranks have, and
    heads that do not divide among the ranks of their key/value head (6 heads, 2 of keys, 4 ranks: 2, 1, 2, 1 heads).
    """
    assert layout.dim is not None
    lengths = layout.lengths()
    size, block = sum(lengths), gcd(*lengths)
    if layout.repeated or lengths != [n * block for n in chunk_sizes(size // block, mesh.size)]:
        first_ranges = layout.first(mesh.rank)
        places = tuple(layout.places(mesh.rank, first_ranges))
        summed = local.int() if local.dtype is torch.int16 else local  # gloo and NCCL have no sum of short integers.
        placed = placement_moves.place(summed, mesh.axis, layout.dim, tuple(first_ranges), places, layout.size)
        return collectives.reduce(placed, mesh.group).to(local.dtype)
    whole = collectives.gather(local, mesh.group, layout.dim, size, block)
    # Parts come in the order of ranks, in which a rank with several pieces (`q | k | v`) is not in place.
    received = [part for piece in layout.pieces for part in piece]
    if received == sorted(received):
        return whole
    parts = dict(zip(received, whole.split([stop - start for start, stop in received], layout.dim), strict=True))
    return torch.cat([parts[part] for part in sorted(received)], layout.dim)


# ---- in code that torch.compile makes


class CompiledOutput(Tensor):
    """A part that compiled code returns: every operator makes the cut tensor of it first.

    NOTE [What compiled code returns]
    Autograd gives compiled code plain zeros as the gradient of an output that nobody reads, and torch refuses these
    where the output is of a type such as `Sharded`. So compiled code returns parts, and Dynamo changes their class when
    its graph has run. In the same code, an operator makes a `Sharded`, by a call in Dynamo's graph; a cast makes such a
    part again, since a wrapper around the model (accelerate's for mixed precision) may be the last thing compiled.

    Attributes:
        whole_of: makes the cut tensor of a part.
    """

    whole_of: ClassVar[Callable[[Tensor], Tensor]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        traced = torch.compiler.is_dynamo_compiling()
        if not traced and str(calling_frame().f_globals.get("__name__")).startswith(COMPILING):
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})  # For its guards.
        args, kwargs = pytree.tree_map(as_sharded, (args, kwargs or {}))
        if traced:
            result = func(*args, **kwargs)
            return _local_in_graphs(result).as_subclass(cls) if func in CASTS else result
        if func is Tensor.data_ptr and reads_memory(calling_frame()):
            raise memory_refused(f"a tensor {shape_text(args[0])}")
        method = vars(Sharded).get(getattr(func, "__name__", ""), func)
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            method = Sharded.data.fset
        return method(*args, **kwargs)


CASTS = (Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.detach)
"""Operators whose result is cut as the operand is."""


def plain_view(x: WholeView) -> Tensor:
    """Returns a view of a gathered tensor as a plain tensor. Gradients flow through it."""
    plain: Tensor = _Plain.apply(x) if x.requires_grad and torch.is_grad_enabled() else x.current()
    return plain


class _Plain(torch.autograd.Function):
    """A view of a gathered tensor -> a plain copy."""

    @staticmethod
    def forward(ctx: Any, x: WholeView) -> Tensor:
        return x.current().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def as_sharded(x: Any) -> Any:
    """Returns a cut tensor that compiled code returned as `Sharded`, and a view of a gathered one as a plain tensor.

    Other values come back as they are.
    """
    if isinstance(x, WholeView):
        return plain_view(x)
    if not isinstance(x, CompiledOutput):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        if torch.compiler.is_dynamo_compiling():
            return type(x).whole_of(x)
        if "made" not in vars(x):
            vars(x)["made"] = type(x).whole_of(x)  # Once: it may be written into, or get a gradient.
        return vars(x)["made"]


@dataclass(frozen=True)
class CutOutput:
    """How an output of a graph becomes a cut tensor.

    Attributes:
        layout: the layout.
        held: the layout, without a shape.
        mesh: the ranks.
        compiled: the class of the output of compiled code.
    """

    layout: Layout
    held: Layout
    mesh: Mesh
    compiled: type[CompiledOutput]

    def of(self, part: Tensor) -> Tensor:
        """Returns the tensor of which `part` is this rank's part."""
        if torch.compiler.is_dynamo_compiling():
            return part.as_subclass(self.compiled)
        return sharded(part, self.held, self.mesh)


@cache
def cut_output(layout: Layout, mesh: Mesh) -> CutOutput:
    """Returns how an output with this layout becomes a cut tensor.

    NOTE [A call in Dynamo's graph]
    Dynamo does not trace how a tensor of another type is made. It puts the call of a function that it is told of into
    its graph; the arguments of this function must be tensors or numbers. So there is a function for each layout.
    """

    local_layout = replace(layout, shape=())

    def whole_of(part: Tensor) -> Tensor:
        plain = part.as_subclass(Tensor) if isinstance(part, CompiledOutput) else part
        return sharded(plain, local_layout, mesh)

    torch._dynamo.allow_in_graph([_local_in_graphs, _full_in_graphs])
    allowed = staticmethod(torch._dynamo.allow_in_graph(whole_of))
    return CutOutput(layout, local_layout, mesh, type("CompiledOutput", (CompiledOutput,), {"whole_of": allowed}))


def local_part(x: Any) -> Any:
    """Returns this rank's part of a cut tensor; gradients flow through it. Other values come back as they are."""
    if not isinstance(x, Sharded):
        return x
    return _local_in_graphs(x) if torch.compiler.is_dynamo_compiling() else x.to_local()


def whole(x: Any) -> Tensor:
    """Returns the whole of a cut tensor, as `full_tensor` does."""
    full: Tensor = _full_in_graphs(x) if torch.compiler.is_dynamo_compiling() else x.full_tensor()
    return full


def _local_in_graphs(x: Any) -> Any:
    return x.to_local()


def _full_in_graphs(x: Any) -> Any:
    return x.full_tensor()
