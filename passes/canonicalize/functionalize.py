"""functionalize: replaces operators that write into an input by operators that return a new value.

    Before: v = select(x, 1, 0); fill_(v, 3.0); read(x)
    After:  v = select(x, 1, 0); v1 = fill(v, 3.0); x1 = select_scatter(x, v1, 1, 0); read(x1)

The last value of a buffer that the model updates becomes an extra output, which the runtime writes back.

NOTE [What shares memory]
Schemas do not tell every view: `einsum` of one operand, `meshgrid` of one tensor and `reshape` return a view for some
operands, and a copy for others. So if a graph writes, autotp runs each operator that may return a view on fake tensors:
those whose schema or row says so, and those that torch composes of other operators. Their sizes are those at capture:
what a composed operator asks of a symbolic size would become an assumption of the graph.

NOTE [What is written without gradients]
Autograd does not see what is written through `detach()`, and a region under `torch.no_grad` reads its operands through
`detach()` (`passes/capture/inline.py`). The base then has new values and the gradient of its old values. A graph cannot
express that, so it is an error if a gradient flows through the base and it is read again, other than through
`detach()`. If no gradient flows through it, it gets the values without a gradient. The detached tensor itself has the
gradient of what is written to it (the straight-through `s = sample.detach(); s += p - p.detach()`). A
torch.autograd.Function reads its operands through `detach()`, too: what its backward returns for one that its forward
wrote to is the gradient of the value before.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from autotp.errors import Error
from autotp.ops.channels import batch_norm_moving
from autotp.ops.custom_vjp import RECORDED
from autotp.passes.builder import Builder, at_captured_sizes, evaluated, fake_mode_of
from autotp.passes.canonicalize.gradient_flow import carries_gradient
from autotp.passes.capture.unsupported.tensor_values import LAST_WAY_OUT
from autotp.rules.call import arguments_of, operator_name, updates_statistics, writes, written_operand
from autotp.rules.row import Trait
from autotp.rules.traits import functional_of, has
from autotp.source_location import line_of

aten = torch.ops.aten

SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
"""A view of a part of a tensor -> the operator that replaces this part."""
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
"""Operators whose results are slices that follow one another."""


def functionalize(
    graph: fx.Graph, buffers: Collection[str], owned: Collection[str] = (), constants: Collection[str] = ()
) -> tuple[fx.Graph, list[str]]:
    """Returns the graph without in-place operators, and the names of updated buffers; their new values come last.

    Args:
        buffers: placeholder names of the buffers.
        owned: placeholder names of inputs that may be written to, because their new values are outputs.
        constants: placeholder names of tensors that the model made while it was captured.

    Raises:
        Error: an in-place operator writes into another input, a parameter, through a view that cannot be inverted, or
            without gradients into a value that a gradient flows through.
    """
    written = any(writes(node) or updates_statistics(node) for node in graph.nodes)
    state = _Versions(Builder(fake_mode_of(graph)), {*buffers, *owned, *constants}, written)
    for node in graph.nodes:
        if node.op == "output":
            updated = [n for n in graph.nodes if n.op == "placeholder" and n.name in buffers and state.changed(n)]
            outputs = tuple(state.read(n) for n in node.args[0])
            state.builder.graph.output((*outputs, *(state.read(n) for n in updated)))
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
        plain: names of the placeholders that no gradient flows to.
        written: whether the graph writes into memory.
        fixed: a fake mode without symbols, in which operators are tried.
        current: old node -> new node with its current value.
        base: view -> the nodes whose memory it shares.
        seen: view -> version of its base at the time of its value.
        version: root of views -> number of writes.
        lost: a base of which the graph has the values, and not the gradient -> what wrote to it.
        before: such a base -> its last value that has its gradient.
        straight: a `detach()` that has the gradient of a value that was written to it -> what wrote to it.
        shared: calls of opaque code, with operands and results of each that lie in one memory.
        stale: a node of these -> what wrote through another one.
    """

    def __init__(self, builder: Builder, plain: Collection[str], written: bool) -> None:
        self.builder, self.plain, self.written = builder, plain, written
        self.fixed = FakeTensorMode(allow_non_fake_inputs=True)
        self.current: dict[fx.Node, fx.Node] = {}
        self.base: dict[fx.Node, Sequence[fx.Node]] = {}
        self.seen: dict[fx.Node, int] = {}
        self.version: dict[fx.Node, int] = {}
        self.lost: dict[fx.Node, fx.Node] = {}
        self.before: dict[fx.Node, fx.Node] = {}
        self.straight: dict[fx.Node, fx.Node] = {}
        self.shared: list[tuple[fx.Node, set[fx.Node]]] = []
        self.stale: dict[fx.Node, fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        if self.written and (sources := self._viewed(node)):
            self.base[node] = sources
        self._replay(node)
        for operands, results in getattr(node.target, "shared", ()):
            nodes = {self._root(node.args[0][i]) for i in operands}  # type: ignore[index]
            self.shared.append((node, nodes | {user for user in node.users if user.args[1] in results}))

    def read(self, node: fx.Node, detached: bool = False) -> Any:
        """Returns the current value of an old node; `detached` says that no gradient is read with it."""
        if not detached and self.lost:
            self._expect_gradient(node)
        if self.stale and (root := self._root(node)) in self.stale:
            raise _lies_in_one_memory(self.stale[root])
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
            raise _refused(
                node, "writes into an input or a parameter of the model", "write the new value to a new tensor"
            )
        args = fx.map_arg((node.args, node.kwargs), lambda n: self.read(n))
        sources = {call for n in node.all_input_nodes for call in self._root(n).all_input_nodes}
        for call, nodes in self.shared:
            # What writes the call's own result into a buffer is not the model.
            if root in nodes and not (root.op == "placeholder" and call in sources):
                self.stale.update(dict.fromkeys(nodes - {root}, node))
                if any(n.op == "placeholder" for n in nodes):
                    raise _lies_in_one_memory(node)
        result = self._functional(node, *args)
        self._write(written, result)
        self.version[root] = self.version.get(root, 0) + 1
        self.current[node], self.base[node], self.seen[node] = self.current[written], [written], self._version(written)

    def move(self, node: fx.Node, writable: Collection[str]) -> None:
        """Replaces a batch norm in training: it updates running statistics, although its schema does not say so."""
        self.builder.origin = node
        arguments = arguments_of(node)
        names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
        args = [self.read(x) if isinstance(x := arguments[name], fx.Node) else x for name in names]
        result = self.builder.call(batch_norm_moving, *args)
        made, *moved = (self.builder.call(operator.getitem, result, i) for i in range(3))
        for name, value in zip(names[3:5], moved, strict=True):
            root = self._root(arguments[name])
            if root.op == "placeholder" and root.name not in writable:
                raise _refused(
                    node,
                    "updates running statistics that are not buffers of the model",
                    'self.register_buffer("running_mean", ...)',
                )
            self._write(arguments[name], value)
            self.version[root] = self.version.get(root, 0) + 1
        self.current[node] = made

    def _functional(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        name, op = operator_name(node), node.target
        assert isinstance(op, OpOverload)  # It writes.
        if name == "aten::zero_":
            return self.builder.call(aten.zeros_like.default, args[0])
        if name == "aten::copy_":
            like = args[0].meta["val"]
            # `copy_` casts and broadcasts what it copies.
            cast = self.builder.call(aten.to.dtype, args[1], like.dtype)
            return self.builder.call(aten.expand.default, cast, _sizes(self.builder, args[0]))
        if name == "aten::fill_":
            # The value may be a tensor with a gradient. The overloads of `fill_` and `mul` have the same names.
            ones = self.builder.call(aten.ones_like.default, args[0])
            return self.builder.call(getattr(aten.mul, op._overloadname), ones, args[1])
        if name == "aten::fill_diagonal_":
            arguments = arguments_of(node)
            mask = _diagonal(self.builder, args[0], arguments["wrap"])
            return self.builder.call(aten.masked_fill.Scalar, args[0], mask, arguments["fill_value"])
        form = functional_of(op)
        if form is None:
            raise _refused(node, f"{op} has no form that returns a new tensor")
        # The functional form returns what this one writes into `out`.
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        result = self.builder.call(form, *args, *_defaults(op, form)[len(args) :], **kwargs)
        dtype = _written(node).meta["val"].dtype
        return result if result.meta["val"].dtype == dtype else self.builder.call(aten.to.dtype, result, dtype)

    def _write(self, node: fx.Node, value: fx.Node) -> None:
        """Sets the value of `node` to `value`, and updates the tensor that `node` is a view of."""
        source = self._source(node)
        if source is not None and node.target is operator.getitem:
            split_tensor = self._source(source)
            assert split_tensor is not None
            self._write(
                split_tensor, _scattered_item(self.builder, node, source, self.read(split_tensor, detached=True), value)
            )
        elif source is not None:
            rest = fx.map_arg(node.args[1:], lambda n: self.read(n))
            passed = self._without_gradient(source, node, value) if has(node.target, Trait.NO_GRADIENT) else value
            self._write(source, _scattered(self.builder, node, rest, self.read(source, detached=True), passed))
        self.current[node] = value
        if source is not None:
            # The callers count this write only after `_write`, and the view has its value already.
            self.seen[node] = self._version(node) + 1

    def _without_gradient(self, base: fx.Node, view: fx.Node, value: fx.Node) -> fx.Node:
        """Returns what a base gets of a value that is written through `view`, its `detach()`."""
        before, writer = self.read(base, detached=True), self.builder.origin
        assert writer is not None
        if carries_gradient(before, self.plain, self.fixed):
            self.lost.setdefault(self._tracked_root(base), writer)
            self.before.setdefault(base, before)
        if not carries_gradient(value, self.plain, self.fixed):
            return value
        self.straight.setdefault(view, writer)
        return self.builder.call(aten.detach.default, value)

    def _tracked_root(self, node: fx.Node) -> fx.Node:
        """Returns the last base of a node that autograd knows as one: `detach()` ends that."""
        while node in self.base and not has(node.target, Trait.NO_GRADIENT):
            node = self.base[node][0]
        return node

    def _expect_gradient(self, node: fx.Node) -> None:
        writer = self.lost.get(self._tracked_root(node))
        if writer is not None:
            raise _refused(
                writer,
                "autograd does not see what is written under torch.no_grad or through detach(), and a gradient flows "
                "through that tensor",
                "compute a new tensor: `y = x + (new - x).detach()` has the new values and the gradient of x",
            )

    def _replay(self, node: fx.Node) -> None:
        if node in self.straight:
            raise _refused(
                self.straight[node],
                "a value with a gradient is written to a tensor behind `detach()`, and its memory is written again",
            )
        self.builder.origin = node
        detached = has(node.target, Trait.NO_GRADIENT)
        before = self.before if node.target is RECORDED["sent"] else {}  # NOTE [What is written without gradients]
        self.builder.env = {n: before[n] if n in before else self.read(n, detached) for n in node.all_input_nodes}
        # The result of an in-place operator is the tensor that it wrote to: it must not write again.
        self.current[node] = self.read(self.base[node][0]) if writes(node) else self.builder.copy(node)
        if node in self.base:
            self.seen[node] = self._version(node)

    def _viewed(self, node: fx.Node) -> list[fx.Node]:
        """Returns the nodes whose memory a node shares."""
        # An item of a split shares memory with its base, an item of a topk does not.
        if node.target is operator.getitem:
            parent: Any = node.args[0]
            return [parent] if parent in self.base else []
        return _sharing(node, self.fixed, self.builder.mode)

    def _source(self, node: fx.Node) -> fx.Node | None:
        """Returns the node that a write to a view also changes."""
        sources = self.base.get(node, ())
        if len(sources) > 1:
            raise _refused(node, f"an in-place operator writes through `{node.target}`, a view of several tensors")
        return sources[0] if sources else None

    def _root(self, node: Any) -> fx.Node:
        while node in self.base:
            node = self.base[node][0]
        return node

    def _version(self, node: fx.Node) -> int:
        """Returns the number of writes to the memory of a node."""
        return sum(map(self._version, self.base[node])) if node in self.base else self.version.get(node, 0)


def _defaults(op: OpOverload, form: OpOverload) -> list[Any]:
    """Returns the default values of the positional arguments that the functional form requires."""
    needed = sum(not arg.has_default_value() and not arg.kwarg_only for arg in form._schema.arguments)
    return [arg.default_value for arg in op._schema.arguments[:needed]]


def _written(node: fx.Node) -> fx.Node:
    """Returns the tensor that an in-place operator writes into: its first operand, or its argument `out`."""
    operand = written_operand(node)
    if not isinstance(operand, fx.Node):
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        name = [arg.name for arg in schema if arg.alias_info is not None and arg.alias_info.is_write][-1]
        raise _refused(node, f"{node.target} writes into `{name}`")
    return operand


def _sharing(node: fx.Node, fixed: FakeTensorMode, symbolic: FakeTensorMode) -> list[fx.Node]:
    """Returns the operands whose memory a result shares: see NOTE [What shares memory].

    Args:
        fixed: a fake mode without symbols.
        symbolic: the fake mode of the graph, for operators that read values.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return []
    may_alias = has(target, Trait.MAY_ALIAS) or any(r.alias_info is not None for r in target._schema.returns)
    if not may_alias and not _is_composed(target):
        return []
    operands = [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
    examples = {n: n.meta["val"] for n in node.all_input_nodes}

    def tried(mode: FakeTensorMode, values: dict[fx.Node, Any]) -> list[fx.Node]:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        return [operands[i] for i in evaluated(mode, _lie_in, target, [values[n] for n in operands], args, kwargs)]

    try:
        return tried(fixed, {n: at_captured_sizes(value, fixed) for n, value in examples.items()})
    except (RuntimeError, ValueError):
        return tried(symbolic, examples)  # Sizes that depend on values are made up, and may not fit each other.


@cache
def _is_composed(op: OpOverload) -> bool:
    """True for an operator that torch composes of others: these may be views."""
    return op.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)


def _lie_in(target: Any, operands: Sequence[torch.Tensor], args: Any, kwargs: Any) -> list[int]:
    """Returns the places of the operands whose memory the result of a call shares; a tuple may share several."""
    result = target(*args, **kwargs)
    memory = {x.untyped_storage()._cdata for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)}
    places = [i for i, x in enumerate(operands) if x.untyped_storage()._cdata in memory]
    # One tensor lies in one memory: operands that share it are views of each other, and the first stands for all.
    return places[:1] if isinstance(result, torch.Tensor) else places


def _scattered(builder: Builder, view: fx.Node, rest: Any, base: Any, value: fx.Node) -> fx.Node:
    """Returns the base of `view` with the view's part replaced by `value`; `rest` are the view's other arguments."""
    target: Any = view.target
    if target in SCATTERS:
        return builder.call(SCATTERS[target], base, value, *rest)
    if has(target, Trait.RESHAPE):
        return builder.call(aten.reshape.default, value, _sizes(builder, base))
    if has(target, Trait.SAME | Trait.MAY_ALIAS) or writes(view):
        return value  # The result of an in-place operator is the tensor that it wrote to.
    if has(target, Trait.SWAP):
        return builder.call(target, value, *rest)
    if target is aten.permute.default:
        # The inverse permutation puts the value back.
        order = [d % len(rest[0]) for d in rest[0]]
        return builder.call(aten.permute.default, value, [order.index(d) for d in range(len(order))])
    raise _refused(view, f"an in-place operator writes through `{target}`")


def _scattered_item(builder: Builder, item: fx.Node, items: fx.Node, base: Any, value: fx.Node) -> fx.Node:
    """Returns `base` with one of several views of it replaced by `value`: an item of `unbind`, or of a split."""
    place: Any = item.args[1]
    dim = arguments_of(items).get("dim", 0)
    if items.target is aten.unbind.int:
        return builder.call(aten.select_scatter.default, base, value, dim, place)
    sizes = [x.shape[dim] for x in items.meta["val"][: place + 1]]
    if items.target not in SPLITS or not all(isinstance(size, int) for size in sizes):
        raise _refused(item, "an in-place operator writes through one of several views")
    return builder.call(aten.slice_scatter.default, base, value, dim, sum(sizes[:-1]), sum(sizes))


def _diagonal(builder: Builder, node: fx.Node, wrap: bool) -> fx.Node:
    """Returns a mask of the diagonal of a value; with `wrap` it begins again one row below the square of a matrix."""
    sizes, device = _sizes(builder, node), node.meta["val"].device
    places = [builder.call(aten.arange.default, n, device=device, pin_memory=False) for n in sizes]
    if wrap and len(sizes) == 2:
        period = builder.call(operator.add, sizes[1], 1) if isinstance(sizes[1], fx.Node) else sizes[1] + 1
        places[0] = builder.call(aten.remainder.Scalar, places[0], period)
    shapes = [[-1 if d == dim else 1 for d in range(len(sizes))] for dim in range(len(sizes))]
    rows, *columns = (builder.call(aten.view.default, n, shape) for n, shape in zip(places, shapes, strict=True))
    return reduce(
        lambda x, y: builder.call(aten.logical_and.default, x, y),
        (builder.call(aten.eq.Tensor, rows, n) for n in columns),
    )


def _sizes(builder: Builder, node: fx.Node) -> list[Any]:
    """Returns the sizes of a value, with symbolic sizes as nodes."""
    shape = node.meta["val"].shape
    return [n if isinstance(n, int) else builder.call(aten.sym_size.int, node, d) for d, n in enumerate(shape)]


def _lies_in_one_memory(writer: fx.Node) -> Error:
    return _refused(
        writer,
        "it is a result or an argument of autotp.opaque, and shares its memory with another one that is used",
        "x.clone() in the opaque code, for a result that is a view; or write to a new tensor",
    )


def _refused(node: fx.Node, why: str, fix: str = f"write the new value to a new tensor; or {LAST_WAY_OUT}") -> Error:
    return Error(f"the model changes a tensor in place where autotp cannot follow: {why}", at=line_of(node), fix=fix)
