"""A judge from outside: spmd_types, Meta's checker of SPMD programs, types a rank's lowered graph.

In one process, without a process group, the graph's operators are called one after another on small tensors, under its
`typecheck()`. The judge shares no code with `passes/check`, and knows no axis, no rule and no decision of a plan.

    ours      Replicate  Copied  Shard  Partial      copy I -> R       reduce P -> I        scatter I -> S
    theirs    I          R       V, S   P            gather S -> I     all_gather S -> R    reduce_scatter P -> S

NOTE [What the judge is told]
- The types of parameters and inputs, by their layouts alone; those that outputs must have. Where `run` neighbouring
  ranks hold the same part, one mesh axis becomes two: V on the axis of the groups, I on the axis of the holders.
- The numbers in which the graphs of the ranks differ: each is a `Scalar` of type V.
- The result of a lookup in a part of a table, and of the other functions in `TERMS`, is P: by their definition.
- A product with a parameter that is cut: `rules.einsum`, which knows the dimension that the layout cuts.

The tensors are those of rank 0, whose part is the longest. Everything else is inferred by the judge.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, P, R, S, V, rules
from spmd_types.checker import typecheck
from torch import Tensor, fx, nn

from autotp.ops import collectives, custom_vjp, dropout, lookup, placement_moves
from autotp.ops.coalesced import together
from autotp.ops.experts.rows import combine
from autotp.ops.losses import cross_entropy
from autotp.ops.losses.linear_cross_entropy import linear_class_terms
from autotp.passes.program.program import Program
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_length
from autotp.sharding.placement import JOINED

aten = torch.ops.aten
Types = dict[Any, Any]


class Inexpressible(Exception):
    """The graph holds something for which the judge's language has no word."""


TORCH = (
    "add sub mul div neg mm bmm matmul sum mean cat stack permute transpose unsqueeze squeeze t select clone detach "
    "cumsum flip roll gather index_select unbind narrow unflatten flatten "
    "zeros ones full zeros_like ones_like full_like arange linspace eye"
)
METHODS = "view expand reshape repeat new_zeros new_ones new_full"
"""The operators that the judge knows by a function of torch, or a method of tensors, with the same arguments. Of all
others it knows that a Partial cannot pass."""
PUBLIC = {name: getattr(torch, name) for name in TORCH.split()}
PUBLIC |= {name: getattr(Tensor, name) for name in METHODS.split()}


def called_function(target: Any) -> Callable[..., Any]:
    """Returns the function by which the judge knows an operator."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return PUBLIC.get(target._schema.name.removeprefix("aten::"), target)
    found: Callable[..., Any] = target
    return found


# ---- the mesh


@dataclass(frozen=True)
class Mesh:
    """The ranks: one axis, or two where `run` neighbouring ranks hold the same parts of a tensor.

    Attributes:
        axes: name of an axis in the graph -> the judge's axes, the outermost first.
    """

    tp: int
    run: int
    axes: Mapping[str, Sequence[Any]]

    @property
    def groups(self) -> Sequence[Any]:
        """The axes between ranks that hold different parts."""
        return [axis for axis in self.axes["tp"] if axis not in self.holders]

    @property
    def holders(self) -> Sequence[Any]:
        """The axes between ranks that hold the same part."""
        return self.axes.get(f"tp/{self.run}", [])

    def types(self, layout: Layout | None) -> Types:
        """Returns the type of a tensor with this layout."""
        if layout is None or layout.dim is None:
            return dict.fromkeys(self.axes["tp"], I)
        if layout.repeated:
            return dict.fromkeys(self.groups, V) | dict.fromkeys(self.holders, I)
        only = len(self.axes["tp"]) == 1
        return dict.fromkeys(self.axes["tp"], S(layout.dim) if only else V)


def mesh_of(tp: int, layouts: Sequence[Layout]) -> Mesh:
    """Returns the mesh. Raises Inexpressible if ranks hold the same positions in another way than by equal groups."""
    repeated = [layout for layout in layouts if layout.repeated]
    if not repeated:
        return Mesh(tp, 1, {"tp": [spmd.MeshAxis.of(tp, 1)]})
    for run in range(2, tp):
        if tp % run == 0 and all(_is_held_by_groups(layout, run) for layout in repeated):
            axes = [spmd.MeshAxis.of(tp // run, run), spmd.MeshAxis.of(run, 1)]
            return Mesh(tp, run, {"tp": axes, f"tp/{run}": axes[1:]})
    raise Inexpressible("some positions of a tensor are on several ranks, and others are not")


def _is_held_by_groups(layout: Layout, run: int) -> bool:
    firsts = [layout.pieces[rank // run * run] for rank in range(len(layout.pieces))]
    return list(layout.pieces) == firsts and layout.holders() == {run}


# ---- the judge


def judge(graphs: Sequence[fx.Graph], program: Program, given: Mapping[str, Any]) -> None:
    """Raises SpmdTypeError if the judge refuses the graph of rank 0; another error if the graph cannot be called.

    Args:
        graphs: the graphs of all ranks, before `fuse`, without groups of products (`separate`).
        given: placeholder name -> tensor of rank 0, or number.
    """
    held = layouts_of(program)
    mesh = mesh_of(program.tp, list(held.values()))
    names = {str(i): axis for i, axis in enumerate(mesh.axes["tp"])}
    tensors = {name: x.detach().requires_grad_(x.requires_grad) for name, x in given.items() if torch.is_tensor(x)}
    with spmd.set_current_mesh(names), typecheck(local=True):
        for name, x in tensors.items():
            spmd.assert_type(x, mesh.types(held.get(name)))
        _Judge(mesh, {**given, **tensors}, program.local_outputs).run(graphs)


def layouts_of(program: Program) -> dict[str, Layout]:
    """Returns placeholder name -> layout of the parameters, and of inputs that are cut."""
    parameters = program.captured.parameters
    return {place: program.layouts[name] for place, name in parameters.items()} | program.local_inputs


def given_to(program: Program, model: nn.Module, inputs: Sequence[Any]) -> dict[str, Any]:
    """Returns what rank 0 reads: placeholder name -> its part of a parameter, a buffer, a constant or an input."""
    captured, held = program.captured, layouts_of(program)
    found: dict[str, Any] = dict(captured.constants)
    own = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    found |= {place: held[place].take(own[name].detach(), 0) for place, name in captured.parameters.items()}
    found |= dict(zip(captured.inputs, inputs, strict=True))
    for name in [*captured.parameters, *captured.inputs]:
        if torch.is_tensor(found[name]) and found[name].is_floating_point():
            found[name] = found[name].detach().clone().requires_grad_()
    return found | {place: buffers[name] for place, name in captured.buffers.items()}


@dataclass
class _Judge:
    """Calls the operators of a graph under the judge's eyes."""

    mesh: Mesh
    given: Mapping[str, Any]
    local_outputs: Mapping[int, Layout]
    env: dict[fx.Node, Any] = field(default_factory=dict)

    def run(self, graphs: Sequence[fx.Graph]) -> None:
        for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
            node = nodes[0]
            try:
                self.env[node] = self._visit(node, nodes)
            except Exception as error:
                if hasattr(error, "add_note"):  # From Python 3.11 on.
                    error.add_note(f"at {node.format_node()}")
                raise

    def _visit(self, node: fx.Node, nodes: Sequence[fx.Node]) -> Any:
        if node.op == "placeholder":
            return self.given[node.name]
        if node.op == "output":
            return self._output(node.args[0])
        if node.op != "call_function":
            raise Inexpressible(node.op)
        load = lambda a: self.env[a] if isinstance(a, fx.Node) else a  # noqa: E731
        args, kwargs = (fx.node.map_aggregate(a, load) for a in (node.args, node.kwargs))
        if "grouped_mm" in str(node.target):  # torch's, transformers' and ours
            return _product("mk,gkn,g->mn", node.target)(self, *args, **kwargs)
        if node.target in MOVES:
            return MOVES[node.target](self, *args, **kwargs)
        function = called_function(node.target)
        if isinstance(node.target, torch._ops.OpOverload):
            args = tuple(self._typed_number(a, [n.args[i] for n in nodes]) for i, a in enumerate(args))
        return function(*args, **kwargs)

    def _typed_number(self, number: Any, on_ranks: Sequence[Any]) -> Any:
        """Returns a number in which ranks differ as a `Scalar`."""
        if any(type(one) not in (int, float) for one in on_ranks) or all(one == number for one in on_ranks):
            return number
        run = self.mesh.run
        alike = all(one == on_ranks[i // run * run] for i, one in enumerate(on_ranks))
        return spmd.Scalar(
            number, dict.fromkeys(self.mesh.axes["tp"], V) | dict.fromkeys(self.mesh.holders, R if alike else V)
        )

    def _output(self, results: Sequence[Any]) -> None:
        for i, result in enumerate(results):
            x = self.env.get(result) if isinstance(result, fx.Node) else result
            if torch.is_tensor(x):
                self.expect(x, self.mesh.types(self.local_outputs.get(i)), f"output {i}")

    def expect(self, x: Tensor, types: Types, name: str) -> None:
        """Raises SpmdTypeError unless `x` has these types; without a gradient R and I are the same."""
        for axis, want in types.items():
            got, want = spmd.get_axis_local_type(x, axis), V if isinstance(want, spmd.Shard) else want
            if got is not want and (x.requires_grad or {got, want} != {R, I}):
                raise spmd.SpmdTypeError(f"{name} is {got.name}, and should be {want.name}")

    def read(self, x: Tensor) -> Any:
        """Returns a value without a gradient as R, which its `einsum` wants; its operators take I as well."""
        for axis in self.mesh.axes["tp"] if not x.requires_grad else ():
            if spmd.get_axis_local_type(x, axis) is I:
                x = rules.convert(x, axis, src=I, dst=R)
        return x

    # ---- conjugates: the judge's own rule for each; only the result's size is ours

    def moved(self, kind: Any, x: Tensor, y: Tensor, axes: Sequence[Any], src: Any, dst: Any) -> Tensor:
        """Returns `y` with the type that the judge's function `kind` gives from `src` to `dst`, on each of the axes."""
        typed: Any = x
        for i, axis in enumerate(axes):
            pending = src is P and spmd.get_axis_local_type(typed, axis) is V  # `all_reduce` sums a V, too.
            last = {"out": y} if i == len(axes) - 1 else {}
            typed = kind(typed, axis, src=V if pending else src, dst=dst, **last)
        return y


def _plain(function: Callable[[], Tensor]) -> Tensor:
    """Returns what a function computes outside of the judge's sight."""
    with spmd.no_typecheck():
        return function()


def _part(size: int, block: int, tp: int) -> int:
    return chunk_length(size // block, tp) * block


def _same(x: Tensor) -> Tensor:
    return _plain(lambda: x.view_as(x))


def _copy(self: _Judge, x: Tensor, axis: str) -> Tensor:
    return self.moved(rules.convert, x, _same(x), self.mesh.axes[axis], I, R)


def _reduce(self: _Judge, x: Tensor, axis: str, op: str = "sum") -> Tensor:
    if op == "sum":
        return self.moved(rules.all_reduce, x, _same(x), self.mesh.axes[axis], P, I)
    for one in self.mesh.axes[axis]:  # It knows no other reduction: the parts of all ranks, and what is made of them.
        parts = _plain(lambda: torch.stack([x if op in JOINED else x.detach()]))  # noqa: B023
        whole = self.moved(rules.all_gather, x, parts, [one], V, I)
        x = collectives.joined_terms(whole, op) if op in JOINED else whole.amax(0)
    return x


def _scatter(self: _Judge, x: Tensor, axis: str, dim: int, size: int, block: int = 1) -> Tensor:
    y = _plain(lambda: x.narrow(dim, 0, _part(size, block, self.mesh.tp)))
    return self.moved(rules.convert, x, y, self.mesh.axes[axis], I, S(dim))


def _gather(self: _Judge, x: Tensor, axis: str, dim: int, size: int, block: int = 1, dst: Any = I) -> Tensor:
    if x.shape[dim] != _part(size, block, self.mesh.tp):
        raise ValueError(f"{x.shape[dim]} positions of {size}")
    y = _plain(lambda: torch.cat([x] * self.mesh.tp, dim).narrow(dim, 0, size))
    return self.moved(rules.all_gather, x, y, self.mesh.axes[axis][::-1], S(dim), dst)


def _all_gather(self: _Judge, *args: Any) -> Tensor:
    return _gather(self, *args, dst=R)


def _reduce_scatter(self: _Judge, x: Tensor, axis: str, dim: int, size: int, block: int = 1) -> Tensor:
    y = _plain(lambda: x.narrow(dim, 0, _part(size, block, self.mesh.tp)))
    return self.moved(rules.reduce_scatter, x, y, self.mesh.axes[axis], P, S(dim))


def _all_to_all(self: _Judge, x: Tensor, axis: str, dim: int, size: int, to: int, to_size: int, *blocks: int) -> Tensor:
    block, to_block = blocks or (1, 1)
    if x.shape[dim] != _part(size, block, self.mesh.tp) or x.shape[to] != to_size:
        raise ValueError(f"{x.shape[dim]} positions of {size}, {x.shape[to]} of {to_size}")
    joined = _plain(lambda: torch.cat([x] * self.mesh.tp, dim).narrow(dim, 0, size))
    y = _plain(lambda: joined.narrow(to, 0, _part(to_size, to_block, self.mesh.tp)))
    return self.moved(rules.all_to_all, x, y, self.mesh.axes[axis], S(dim), S(to))


def _share(self: _Judge, x: Tensor, axis: str, dim: int, ranges: Any) -> Tensor:
    if ranges != ((0, x.shape[dim]),):
        raise Inexpressible("some positions of a tensor are on several ranks, and others are not")
    return _copy(self, x, axis)


def _together(self: _Judge, xs: Sequence[Tensor], axis: str, where: Sequence[Any]) -> tuple[Tensor, ...]:
    pairs = zip(xs, where, strict=True)
    return tuple(_copy(self, x, axis) if at is None else _share(self, x, axis, *at) for x, at in pairs)


# ---- moves without communication


def _take(self: _Judge, x: Tensor, axis: str, dim: int, pieces: Any, rank: int) -> Tensor:
    y = _plain(lambda: placement_moves.take(x, axis, dim, pieces, rank))
    return self.moved(rules.convert, x, y, self.mesh.groups, R, S(dim))


def _first(self: _Judge, x: Tensor, axis: str, dim: int, ranges: Any) -> Tensor:
    axes = self.mesh.holders or self.mesh.axes["tp"]
    return self.moved(rules.convert, x, _same(x), axes, R, I)


def _place(self: _Judge, x: Tensor, axis: str, *args: Any) -> Tensor:
    y = _plain(lambda: placement_moves.place(x, axis, *args))
    typed: Any = x
    for axis in self.mesh.axes["tp"]:
        src = spmd.get_axis_local_type(typed, axis)
        typed = rules.convert(typed, axis, src=S(args[0]) if src is V else src, dst=P)
    rules.output(y, typed)
    return y


# ---- functions whose results are terms of a sum


def _term(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def typed(self: _Judge, *args: Any) -> Tensor:
        y = function(*args)
        for axis in self.mesh.axes["tp"]:
            if spmd.get_axis_local_type(y, axis) is V:
                y = self.moved(rules.reinterpret, y, _same(y), [axis], V, P)
        return y

    return typed


def _class_terms(x: Tensor, top: Tensor, classes: Tensor, dim: int, start: int, size: int) -> Tensor:
    z = x - top
    picked = lookup.gather(z, dim, classes.unsqueeze(dim), start, size).squeeze(dim)
    return torch.stack([z.exp().sum(dim), picked])


def _linear_class_terms(
    self: _Judge, weight: Tensor, x: Tensor, classes: Tensor, start: int, size: int, scale: float, cap: float,
    bias: Tensor | None, first_part: float = 0.0, second_part: float = 0.0, second_weight: Any = None,
    second_x: Any = None,
    second_scale: float = 1.0, second_cap: float = 0.0, second_bias: Tensor | None = None, shares: Any = None,
    *low: Any,
) -> Tensor:  # fmt: skip
    """Returns terms of the classes of a rank: V. Scale and cap change no type."""
    low = (*low, *[None] * 4)
    z = _linear(self, x, weight, bias)
    z = z if low[0] is None else z + _linear(self, low[1], low[0], None)
    terms = [z.logsumexp(-1), lookup.gather(z, -1, classes[..., None], start, size)[..., 0]]
    if first_part or second_part:
        others = [] if second_weight is None else [_linear(self, second_x, second_weight, second_bias)]
        sums = (sum(others, z) * (z.softmax(-1) if shares is None else shares)).sum(-1)
        terms += [sums] + [y.logsumexp(-1) for y in others]
    return torch.stack(terms)


TERMS = {
    lookup.embedding: lookup.embedding,
    lookup.gather: lookup.gather,
    cross_entropy.class_terms: _class_terms,
    combine: combine,
}


# ---- products with parameters that are cut


def _product(equation: str, target: Any) -> Callable[..., Tensor]:
    """Returns a product of (x, weight): by `rules.einsum` if the layout of the weight cuts one of its dimensions."""
    within = equation.split("->")[0].split(",")[1].index("k")

    def typed(self: _Judge, x: Tensor, weight: Tensor, *more: Tensor) -> Tensor:
        axis, spec = self.mesh.axes["tp"][0], spmd.get_partition_spec(weight)
        if spec is None:
            found: Tensor = called_function(target)(x, weight, *more)
            return found
        y = _plain(lambda: target(x, weight, *more))
        if spec[within] is not None and spmd.get_axis_local_type(x, axis) is V:
            spmd.assert_type(x, {axis: S(x.dim() - 1)})
        with typecheck(local=False):
            rules.einsum(equation, self.read(x), weight, *map(self.read, more), out=y)
        return y

    return typed


def _linear(self: _Judge, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = _product("...k,nk->...n", aten.linear.default)(self, x, weight)
    return y if bias is None else torch.add(y, bias)


def _addmm(self: _Judge, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.add(_product("mk,kn->mn", aten.mm.default)(self, x, weight), bias)


def _permute(self: _Judge, x: Tensor, dims: Sequence[int]) -> Tensor:
    y, spec = torch.permute(x, dims), spmd.get_partition_spec(x)
    for d, old in enumerate(dims):
        if spec is not None and spec[old] is not None:
            spmd.assert_type(y, {spec[old]: S(d)})
    return y


def _transpose(self: _Judge, x: Tensor, a: int, b: int) -> Tensor:
    dims = list(range(x.dim()))
    dims[a], dims[b] = dims[b], dims[a]
    return _permute(self, x, dims)


# ---- operators through which a Partial passes, but not as the judge knows them


def _masked_fill(self: _Judge, x: Tensor, mask: Tensor, value: float) -> Tensor:
    """Returns zeros in some places: a product with a mask, for the judge."""
    return torch.mul(x, mask.logical_not()) if value == 0 else torch.masked_fill(x, mask, value)


def _index(self: _Judge, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Returns rows of `x`, in which an index is linear; the judge wants all operands of a linear operator P."""
    pending = any(spmd.get_axis_local_type(x, axis) is P for axis in self.mesh.axes["tp"])
    if not pending or len(indices) != 1 or indices[0].dim() != 1:
        found: Tensor = aten.index.Tensor(x, indices)
        return found
    y = _plain(lambda: aten.index.Tensor(x, indices))
    rules.einsum("_...,n->n...", x, self.read(indices[0]), linear_in=(0,), out=y)
    return y


# ---- dropout, and a backward that the model defines


def _fast_dropout(self: _Judge, x: Tensor, p: float, rank: int) -> Tensor:
    return F.dropout(x, p)


def _fast_attention(
    self: _Judge, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: Any,
    grouped: bool, rank: int,
) -> Tensor:  # fmt: skip
    return F.scaled_dot_product_attention(q, k, v, mask, p, causal, scale=scale, enable_gqa=grouped)


def _empty(self: _Judge, size: Sequence[int], dtype: Any = None, **given: Any) -> Tensor:
    """Returns memory that operators write before they read it: for the judge the same on all ranks."""
    return torch.zeros(size, dtype=dtype)


def _vjp_output(self: _Judge, y: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Returns a value, and its gradient with the type that the judge says a gradient has."""
    axes = self.mesh.axes["tp"]
    gradient = _plain(lambda: y.detach())
    spmd.assert_type(gradient, {axis: spmd.get_axis_local_type(y, axis).backward_type() for axis in axes})
    return y.view_as(y), gradient


def _vjp_sent(self: _Judge, x: Tensor, gradient: Tensor) -> Tensor:
    axes = self.mesh.axes["tp"]
    self.expect(gradient, {a: spmd.get_axis_local_type(x, a).backward_type() for a in axes}, "the gradient")
    return x.view_as(x)


def _conjugates() -> Iterator[tuple[Any, Callable[..., Any]]]:
    yield collectives.copy, _copy
    yield collectives.reduce, _reduce
    yield collectives.scatter, _scatter
    yield collectives.gather, _gather
    yield collectives.all_gather, _all_gather
    yield collectives.reduce_scatter, _reduce_scatter
    yield collectives.all_to_all, _all_to_all
    yield collectives.share, _share
    yield together, _together


MOVES: dict[Any, Callable[..., Any]] = {
    **dict(_conjugates()),
    **{target: _term(function) for target, function in TERMS.items()},
    placement_moves.take: _take,
    placement_moves.first: _first,
    placement_moves.place: _place,
    aten.linear.default: _linear,
    linear_class_terms: _linear_class_terms,
    aten.mm.default: _product("mk,kn->mn", aten.mm.default),
    aten.addmm.default: _addmm,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.masked_fill.Scalar: _masked_fill,
    aten.index.Tensor: _index,
    aten.empty.memory_format: _empty,
    dropout.fast_dropout: _fast_dropout,
    dropout.fast_attention: _fast_attention,
    custom_vjp.output: _vjp_output,
    custom_vjp.kept: lambda self, x: x.detach(),
    custom_vjp.sent: _vjp_sent,
    custom_vjp.result: lambda self, y, sent: y.view_as(y),
    operator.getitem: lambda self, x, i: x[i],
}
