"""functionalize: replaces operators that write into an input by operators that return a new value.

    Before: v = select(x, 1, 0); fill_(v, 3.0); read(x)
    After:  v = select(x, 1, 0); v1 = fill(v, 3.0); x1 = select_scatter(x, v1, 1, 0); read(x1)

The last value of a buffer that the model updates becomes an extra output, which the runtime writes back.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

from autotp.errors import Error
from autotp.ops.channels import batch_norm_moving
from autotp.passes.builder import Builder, evaluated, fake_mode_of
from autotp.rules.call import arguments_of, operator_name, writes
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.source_location import line_of

aten = torch.ops.aten

SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
"""A view of a part of a tensor -> the operator that replaces this part."""


def functionalize(graph: fx.Graph, buffers: Collection[str], owned: Collection[str] = ()) -> tuple[fx.Graph, list[str]]:
    """Returns the graph without in-place operators, and the names of updated buffers; their new values come last.

    Args:
        buffers: placeholder names of the buffers.
        owned: placeholder names of inputs that may be written to, because their new values are outputs.

    Raises:
        Error: an in-place operator writes into another input, a parameter, or through a view that cannot be inverted.
    """
    state = _Versions(Builder(fake_mode_of(graph)))
    for node in graph.nodes:
        if node.op == "output":
            updated = [n for n in graph.nodes if n.op == "placeholder" and n.name in buffers and state.changed(n)]
            found = tuple(state.read(n) for n in node.args[0])
            state.builder.graph.output((*found, *(state.read(n) for n in updated)))
        elif writes(node):
            state.mutate(node, {*buffers, *owned})
        elif updates_statistics(node):
            state.move(node, {*buffers, *owned})
        else:
            state.visit(node)
    return state.builder.graph, [n.name for n in updated]


class _Versions:
    """The current value of every old node. A view is computed again if its base has changed since.

    Attributes:
        current: old node -> new node with its current value.
        base: view -> the node that it is a view of.
        seen: view -> version of its base at the time of its value.
        version: root of views -> number of writes.
    """

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.current: dict[fx.Node, fx.Node] = {}
        self.base: dict[fx.Node, fx.Node] = {}
        self.seen: dict[fx.Node, int] = {}
        self.version: dict[fx.Node, int] = {}

    def visit(self, node: fx.Node) -> None:
        source = _viewed(node, self.builder.mode)
        if source is not None:
            self.base[node] = source
        self._replay(node)

    def read(self, node: fx.Node) -> Any:
        """Returns the current value of an old node."""
        if node in self.base and self.seen[node] != self._version(node):
            self._replay(node)
        return self.current[node]

    def changed(self, node: fx.Node) -> bool:
        return self.version.get(node, 0) > 0

    def mutate(self, node: fx.Node, writable: Collection[str]) -> None:
        """Replaces an in-place operator by its functional form, and updates the tensors that share the memory."""
        self.builder.origin = node
        written: Any = _written(node)
        root = self._root(written)
        if root.op == "placeholder" and root.name not in writable:
            raise _refused(node, "writes into an input or a parameter of the model")
        args = fx.map_arg((node.args, node.kwargs), lambda n: self.read(n))
        new = self._functional(node, *args)
        self._write(written, new)
        self.version[root] = self.version.get(root, 0) + 1
        self.current[node], self.base[node], self.seen[node] = self.current[written], written, self._version(written)

    def move(self, node: fx.Node, writable: Collection[str]) -> None:
        """Replaces a batch norm in training: it updates running statistics, although its schema does not say so."""
        self.builder.origin = node
        given = arguments_of(node)
        names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
        args = [self.read(x) if isinstance(x := given[name], fx.Node) else x for name in names]
        new = self.builder.call(batch_norm_moving, *args)
        made, *moved = (self.builder.call(operator.getitem, new, i) for i in range(3))
        for name, value in zip(names[3:5], moved, strict=True):
            root = self._root(given[name])
            if root.op == "placeholder" and root.name not in writable:
                raise _refused(node, "updates running statistics that are not buffers of the model")
            self._write(given[name], value)
            self.version[root] = self.version.get(root, 0) + 1
        self.current[node] = made

    def _functional(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        name, op = operator_name(node), node.target
        assert isinstance(op, OpOverload)  # It writes.
        if name == "aten::zero_":
            return self.builder.call(aten.zeros_like.default, args[0])
        if name == "aten::copy_":
            like = args[0].meta["val"]
            cast = self.builder.call(aten.to.dtype, args[1], like.dtype)
            return self.builder.call(aten.expand.default, cast, _sizes(self.builder, args[0]))
        if name == "aten::fill_":
            ones = self.builder.call(aten.ones_like.default, args[0])
            return self.builder.call(getattr(aten.mul, op._overloadname), ones, args[1])
        form = _form(op)
        if form is None:
            raise _refused(node, f"{op} has no form that returns a new tensor")
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        new = self.builder.call(form, *args, *_defaults(op, form)[len(args) :], **kwargs)
        dtype = _written(node).meta["val"].dtype
        return new if new.meta["val"].dtype == dtype else self.builder.call(aten.to.dtype, new, dtype)

    def _write(self, node: fx.Node, new: fx.Node) -> None:
        """Sets the value of `node` to `new`, and updates the tensor that `node` is a view of."""
        source = self.base.get(node)
        if source is not None:
            rest = fx.map_arg(node.args[1:], lambda n: self.read(n))
            self._write(source, _scattered(self.builder, node, rest, self.read(source), new))
        self.current[node] = new
        if source is not None:
            self.seen[node] = self._version(node) + 1

    def _replay(self, node: fx.Node) -> None:
        self.builder.origin = node
        self.builder.env = {n: self.read(n) for n in node.all_input_nodes}
        # The result of an in-place operator is the tensor that it wrote to: it must not write again.
        self.current[node] = self.read(self.base[node]) if writes(node) else self.builder.copy(node)
        if node in self.base:
            self.seen[node] = self._version(node)

    def _root(self, node: Any) -> fx.Node:
        while node in self.base:
            node = self.base[node]
        return node

    def _version(self, node: fx.Node) -> int:
        return self.version.get(self._root(node), 0)


@cache
def _form(op: OpOverload) -> OpOverload | None:
    """Returns the functional form of an in-place operator, or None: same name, arguments of the same types.

    The overload's name does not tell: `pow_.Scalar` raises a tensor to a number, `pow.Scalar` a number to a tensor.
    """
    namespace, _, name = op._schema.name.removesuffix("_").partition("::")
    library, wanted = getattr(torch.ops, namespace), _types(op)
    packets = [getattr(library, n) for n in (name, f"{name}_functional") if hasattr(library, n)]
    found = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    fitting = [one for one in found if not one._schema.is_mutable and _types(one) == wanted]
    return min(fitting, key=lambda one: one._overloadname != op._overloadname, default=None)


def updates_statistics(node: fx.Node) -> bool:
    """True for a batch norm that updates its running mean and variance."""
    if node.target is not aten.batch_norm.default:
        return False
    given = arguments_of(node)
    return bool(given["training"]) and given["running_mean"] is not None


def _types(op: OpOverload) -> list[tuple[str, bool]]:
    return [(str(arg.type), arg.kwarg_only) for arg in op._schema.arguments if not arg.is_out]


def _defaults(op: OpOverload, form: OpOverload) -> list[Any]:
    """Returns the default values of the positional arguments that the functional form requires."""
    needed = sum(not arg.has_default_value() and not arg.kwarg_only for arg in form._schema.arguments)
    return [arg.default_value for arg in op._schema.arguments[:needed]]


def _written(node: fx.Node) -> Any:
    """Returns the tensor that an in-place operator writes into: its first operand, or its argument `out`."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    places = [i for i, arg in enumerate(schema) if arg.alias_info is not None and arg.alias_info.is_write]
    found = node.kwargs.get("out") if len(places) == 1 and schema[places[0]].is_out else None
    found = node.args[0] if places == [0] else found
    if not isinstance(found, fx.Node):
        raise _refused(node, f"{node.target} writes into `{schema[places[-1]].name}`")
    return found


def _viewed(node: fx.Node, mode: FakeTensorMode) -> fx.Node | None:
    """Returns the node whose memory a node shares; None if it has its own."""
    if node.target is operator.getitem:  # An item of a split shares memory with its base, an item of a topk does not.
        several: Any = node.args[0]
        return several if _viewed(several, mode) is not None else None
    if not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema
    aliased = has(node.target, Trait.MAY_ALIAS) or any(r.alias_info is not None for r in schema.returns)
    source = node.args[0] if aliased and node.args else None
    return source if isinstance(source, fx.Node) and _shares(node, source, mode) else None


def _shares(node: fx.Node, source: fx.Node, mode: FakeTensorMode) -> bool:
    """True if a result shares memory with its base (`reshape` and `to` may copy); runs it on fake tensors."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    at = node.args.index(source)
    return evaluated(mode, _lies_in, node.target, at, args, kwargs)


def _lies_in(target: Any, at: int, args: Any, kwargs: Any) -> bool:
    """True if the result of a call shares memory with the argument at this place; a tuple of views always does."""
    found = target(*args, **kwargs)
    return not isinstance(found, torch.Tensor) or found.untyped_storage()._cdata == args[at].untyped_storage()._cdata


def _scattered(builder: Builder, view: fx.Node, rest: Any, base: Any, new: fx.Node) -> fx.Node:
    """Returns the base of `view` with the view's part replaced by `new`; `rest` are the view's other arguments."""
    target: Any = view.target
    if target in SCATTERS:
        return builder.call(SCATTERS[target], base, new, *rest)
    if has(target, Trait.RESHAPE):
        return builder.call(aten.reshape.default, new, _sizes(builder, base))
    if has(target, Trait.SAME | Trait.MAY_ALIAS) or writes(view):
        return new  # The result of an in-place operator is the tensor that it wrote to.
    if has(target, Trait.SWAP):
        return builder.call(target, new, *rest)
    if target is aten.permute.default:
        order = [d % len(rest[0]) for d in rest[0]]
        return builder.call(aten.permute.default, new, [order.index(d) for d in range(len(order))])
    raise _refused(
        view,
        f"an in-place operator writes through `{target if isinstance(target, OpOverload) else 'one of several views'}`",
    )


def _sizes(builder: Builder, node: fx.Node) -> list[Any]:
    """Returns the sizes of a value, with symbolic sizes as nodes."""
    shape = node.meta["val"].shape
    return [n if isinstance(n, int) else builder.call(aten.sym_size.int, node, d) for d, n in enumerate(shape)]


def _refused(node: fx.Node, why: str) -> Error:
    return Error(
        f"the model changes a tensor in place where autotp cannot follow: {why}",
        at=line_of(node),
        fix="write the new value to a new tensor",
    )
