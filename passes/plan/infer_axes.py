"""infer_axes: gives every dimension of every tensor an axis, by unification along the operators' rules.

Before: x f32[s77, s27, 768], w f32[2304, 768], linear(x, w), split(...), view(...), attention(...)
After:  w[0] = (q: heads x 64 | k: heads x 64 | v: heads x 64), w[1] = width, ...
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autotp.rules.call import Call, call_of, operand_nodes
from autotp.rules.language import STAR, UNIT, Expr, Group, Name, Rule, Term, names
from autotp.rules.registry import rule_of, unknown
from autotp.sharding.axis import ONE, Axis, Size, concat, find, holds, leaves, product, tangle, touches, unify
from autotp.sharding.grid import is_full

Dims = tuple[Axis, ...]


@dataclass(frozen=True)
class Factor:
    """One factor of a rule at one node.

    Attributes:
        name: its name in the rule.
        axis: its axis.
        mark: "" it may be cut, "^" never, "!" in the operator's parallel form.
        ins: operand position -> the operand's dimension that has the factor.
        outs: output position -> dimension.
        summed: False if an output without the factor is not a sum over it: it is another part of `q | k | v`.
    """

    name: str
    axis: Axis
    mark: str
    ins: dict[int, int]
    outs: dict[int, int]
    summed: bool = True


@dataclass(frozen=True)
class Bound:
    """A rule bound to the axes of one node's operands and outputs.

    Attributes:
        rule: the rule.
        operands: the operand nodes, in the order of the rule's terms.
        factors: the rule's factors.
        dims: the axes of the operands' and of the outputs' dimensions.
        known: False for an operator without a rule.
    """

    rule: Rule
    operands: tuple[fx.Node, ...]
    factors: tuple[Factor, ...]
    dims: tuple[list[Dims], list[Dims]]
    known: bool = True

    def renamed(self, copy: fx.Node) -> Bound:
        """Returns the same rule for a copy of the node in another graph."""
        operands = tuple(n for n in operand_nodes(copy) if n is not None)
        return Bound(self.rule, operands, self.factors, self.dims, self.known)

    def cuttable(self, leaf: Axis) -> Factor | None:
        """Returns the factor along which this operator can be cut by `leaf`, or None.

        Several factors may have the leaf only if one dimension is their concatenation (`q | k | v`): then they are cut
        together, and are returned as one factor.
        """
        factors = [factor for factor in self.factors if touches(factor.axis, leaf)]
        if find(leaf).kind == "grid":
            return None if self.rule.exact else self._on_grid(factors, find(leaf))
        if not factors or any(factor.mark == "^" or not holds(factor.axis, leaf) for factor in factors):
            return None
        factor = factors[0] if len(factors) == 1 else self._siblings(factors, leaf)
        return factor if factor is not None and self._held(factor, leaf) else None

    def _on_grid(self, factors: list[Factor], grid: Axis) -> Factor | None:
        """Returns the factors that a grid cuts as one factor, or None.

        All of them appear in the outputs, or are unused parts of a concatenation, or are summed over.
        """
        dims = [axis for side in self.dims for term in side for axis in term if touches(axis, grid)]
        if not factors or any(factor.mark == "^" for factor in factors) or not all(holds(axis, grid) for axis in dims):
            return None
        parts = {name.name for term in self.rule.ins for expr in term for name in _parts(expr)}
        summed = [factor for factor in factors if not factor.outs and factor.name not in parts]
        some = [f for f in factors if 0 < len(f.outs) < len(self.rule.outs) and f.name not in parts]
        every = all(any(holds(factor.axis, leaf) for factor in factors) for leaf in grid.parts)
        if some or (summed and (len(summed) < len(factors) or not (every and is_full(grid)))):
            return None
        if not every and any(
            factor.mark == "!" for factor in factors
        ):  # Ranks with the same shard would draw differently.
            return None
        ins, outs = _places(factors)
        return Factor(" ".join(f.name for f in factors), grid, max(f.mark for f in factors), ins, outs, bool(summed))

    def _held(self, factor: Factor, leaf: Axis) -> bool:
        """True if cutting `leaf` cuts every dimension with the factor, not only one part of a concatenation."""
        places = ((self.dims[0], factor.ins), (self.dims[1], factor.outs))
        return all(holds(dims[i][d], leaf) for dims, place in places for i, d in place.items())

    def _siblings(self, factors: list[Factor], leaf: Axis) -> Factor | None:
        # The dimensions that all of them are in: one has to be their concatenation.
        ins = set.intersection(*(set(factor.ins.items()) for factor in factors))
        outs = set.intersection(*(set(factor.outs.items()) for factor in factors))
        whole = [self.dims[0][i][d] for i, d in ins] + [self.dims[1][o][d] for o, d in outs]
        if not any(holds(axis, leaf) for axis in whole):
            return None
        places = _places(factors)
        sides = [(place, places[side]) for f in factors for side, place in enumerate((f.ins, f.outs))]
        clash = any(place.get(i, d) != d for place, all_ in sides for i, d in all_.items())
        # "!" is greater than "": if one of them needs the parallel form, all do.
        mark = max(factor.mark for factor in factors)
        return None if clash else Factor(" | ".join(f.name for f in factors), whole[0], mark, *places)


def _parts(expr: Expr, inside: bool = False) -> Iterator[Name]:
    """Yields the factors in the concatenations of an expression."""
    if isinstance(expr, Group):
        for part in expr.parts:
            yield from _parts(part, inside or expr.kind == "concat")
    elif inside:
        yield expr


def _places(factors: Sequence[Factor]) -> tuple[dict[int, int], dict[int, int]]:
    """Returns the dimensions that have any of the factors, in operands and in outputs."""
    ins = {i: dim for factor in factors for i, dim in factor.ins.items()}
    return ins, {i: dim for factor in factors for i, dim in factor.outs.items()}


@dataclass(frozen=True)
class Axes:
    """The axes of a graph's values, and its operators' rules.

    Attributes:
        dims: node -> for each of its output tensors the axes of its dimensions.
        bound: node -> its rule, bound to axes.
    """

    dims: dict[fx.Node, tuple[Dims, ...]] = field(default_factory=dict)
    bound: dict[fx.Node, Bound] = field(default_factory=dict)

    def of(self, node: fx.Node) -> Dims:
        """Returns the axes of the dimensions of a node whose value is a tensor."""
        return self.dims[node][0]

    def dim_of(self, node: fx.Node, leaf: Axis) -> int | None:
        """Returns the dimension of `node` that a cut of `leaf` divides, or None."""
        dims = [d for d, axis in enumerate(self.of(node)) if holds(axis, leaf)]
        return dims[0] if len(dims) == 1 else None


def infer_axes(graph: fx.Graph) -> Axes:
    """Returns the axes of all values in `graph`. Its nodes have example values in `node.meta["val"]`."""
    axes = Axes()
    for node in graph.nodes:
        visit(node, axes)
    return axes


def visit(node: fx.Node, axes: Axes) -> None:
    """Adds a node to `axes`, which must have its operands."""
    if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor) and is_getitem(node):
        axes.dims[node] = (axes.dims[node.args[0]][_tensor_index(node)],)  # type: ignore[index]
        return
    call = call_of(node) if node.op == "call_function" else None
    values = call.outputs if call else outputs(node)
    # New axes, which the rule unifies with those of the operands.
    axes.dims[node] = tuple(tuple(Axis(Size.of(n)) for n in value.shape) for value in values)
    if call is not None and values:
        axes.bound[node] = bind_rule(node, call, axes)


def bind_rule(node: fx.Node, call: Call, axes: Axes) -> Bound:
    """Unifies the factors of a node's rule with the axes of its operands and outputs; returns the bound rule.

    A rule with other terms than the call has tensors and dimensions knows nothing of this call.
    """
    operands = tuple(n for n in operand_nodes(node) if n is not None)
    dims = [axes.of(n) for n in operands]
    outs = list(axes.dims[node])
    rule = rule_of(call)
    fits = rule is not None and _fits(rule, dims, outs)
    rule = rule if rule is not None and fits else unknown(call)
    return Bound(rule, operands, _unify_terms(rule, dims, outs), (dims, outs), fits)


def _fits(rule: Rule, ins: list[Dims], outs: list[Dims]) -> bool:
    """True if the rule has a term for each tensor, and in each term a factor for each dimension."""
    if len(rule.ins) != len(ins) or len(rule.outs) != len(outs):
        return False
    pairs = zip((*rule.ins, *rule.outs), (*ins, *outs), strict=True)
    return all(len(term) - 1 <= len(dims) if STAR in term else len(term) == len(dims) for term, dims in pairs)


def is_getitem(node: fx.Node) -> bool:
    """True for the node that picks one output of a tuple-valued operator."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node)


def outputs(node: fx.Node) -> Sequence[Any]:
    """Returns the example value of a placeholder or attribute in a tuple; an empty tuple for other nodes."""
    value = node.meta.get("val")
    return (value,) if node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor) else ()


def _tensor_index(node: fx.Node) -> int:
    """Returns the index among the tuple's tensors of the item that a getitem picks."""
    source, index = node.args
    values = source.meta["val"]  # type: ignore[union-attr]
    return sum(isinstance(v, torch.Tensor) for v in values[:index])


def named_dims(rule: Rule, ins: list[Dims]) -> Iterator[list[tuple[str, Axis]]]:
    """Yields for each operand the (factor, axis) of each dimension; the factor is "" for a group of factors or none."""
    for term, dims in zip(_spelled(rule.ins, ins), ins, strict=True):
        names_ = [expr.name if isinstance(expr, Name) and expr != UNIT else "" for expr in term]
        yield list(zip(names_, dims, strict=True))


def _unify_terms(rule: Rule, ins: list[Dims], outs: list[Dims]) -> tuple[Factor, ...]:
    tensors = (*ins, *outs)
    terms = _spelled((*rule.ins, *rule.outs), tensors)
    pairs = [pair for term, dims in zip(terms, tensors, strict=True) for pair in zip(term, dims, strict=True)]
    # Single factors are unified first: their sizes are needed to build the groups.
    axes_by_name = {name: Axis(size) for name, size in rule.sizes.items()}
    uncuttable: set[str] = set()  # Factors whose two lengths are equal on these inputs only: they cannot be cut here.
    for expr, axis in pairs:
        if isinstance(expr, Name) and expr != UNIT and not unify(axes_by_name.setdefault(expr.name, axis), axis):
            uncuttable.add(expr.name)
    for expr in (expr for term in (*rule.ins, *rule.outs) for expr in term if isinstance(expr, Name)):
        # It has size 1 wherever it stands alone; it may be part of a group.
        axes_by_name.setdefault(expr.name, Axis(ONE))
    # At most one factor of a group may be new, and each group that is built makes its factors known for the next.
    for expr, axis in sorted(pairs, key=lambda pair: _unknown_parts(pair[0], axes_by_name)):
        if isinstance(expr, Group) and not unify(_build(expr, find(axis).size, axes_by_name), axis):
            uncuttable.update(name.name for name in names(expr))
    factors = _factors(terms[: len(ins)], terms[len(ins) :], axes_by_name)
    return tuple(replace(factor, mark="^") if factor.name in uncuttable else factor for factor in factors)


def _spelled(terms: Sequence[Term], tensors: Sequence[Dims]) -> list[Term]:
    """Returns the terms with `*` replaced by named factors."""
    pairs = list(zip(terms, tensors, strict=True))
    stars = max((len(dims) - len(term) + 1 for term, dims in pairs if STAR in term), default=0)
    return [_without_star(term, dims, stars) for term, dims in pairs]


def _without_star(term: Term, dims: Dims, stars: int) -> Term:
    """Replaces `*` by named factors, aligned right; a dimension of size 1 has no factor."""
    if STAR in term:
        index = term.index(STAR)
        count = len(dims) - len(term) + 1
        spelled = [Name(f"*{stars - count + i}") for i in range(count)]
        term = (*term[:index], *spelled, *term[index + 1 :])
    return tuple(UNIT if find(axis).size == ONE else expr for expr, axis in zip(term, dims, strict=True))


def _unknown_parts(expr: Expr, axes_by_name: dict[str, Axis]) -> int:
    return len([name for name in names(expr) if name.name not in axes_by_name])


def _build(expr: Expr, size: Size, axes_by_name: dict[str, Axis]) -> Axis:
    """Returns the axis of an expression of known size; at most one factor in a group may be new."""
    if isinstance(expr, Name):
        return axes_by_name.setdefault(expr.name, Axis(size))
    if expr.kind == "concat":
        lengths = [_size(part, axes_by_name) for part in expr.parts]
        # Where a part begins would depend on symbols, so the axis cannot be cut.
        if size.symbols or any(n.symbols for n in lengths if n):
            return Axis(size, tangled=True)
        # The one new part has what the others leave.
        remaining = Size(size.number - sum(n.number for n in lengths if n))
        return concat([_build(part, n or remaining, axes_by_name) for part, n in zip(expr.parts, lengths, strict=True)])
    # The one new factor of a product has the size that the known factors leave.
    rest: Size | None = size
    for part in expr.parts:
        inner = _size(part, axes_by_name)
        rest = rest.divided(inner) if rest is not None and inner is not None else rest
    return product([_build(part, _size(part, axes_by_name) or rest or size, axes_by_name) for part in expr.parts])


def _size(expr: Expr, axes_by_name: dict[str, Axis]) -> Size | None:
    """Returns the size of an expression; None if a factor is not known."""
    if isinstance(expr, Name):
        return find(axes_by_name[expr.name]).size if expr.name in axes_by_name else None
    sizes = []
    for part in expr.parts:
        size = _size(part, axes_by_name)
        if size is None:
            return None
        sizes.append(size)
    if expr.kind == "concat":
        return Size(sum([size.number for size in sizes]))
    total = ONE
    for size in sizes:
        total = total * size
    return total


def _factors(ins: list[Term], outs: list[Term], axes_by_name: dict[str, Axis]) -> Iterator[Factor]:
    places: dict[str, tuple[dict[int, int], dict[int, int], set[str]]] = {}
    for side, terms in enumerate((ins, outs)):
        for position, term in enumerate(terms):
            for dim, expr in enumerate(term):
                for named in names(expr):
                    entry = places.setdefault(named.name, ({}, {}, set()))
                    (entry[0] if side == 0 else entry[1])[position] = dim
                    entry[2].add(named.mark)
    for name, (in_dims, out_dims, marks) in places.items():
        mark = "^" if "^" in marks else "!" if "!" in marks else ""
        yield Factor(name, axes_by_name[name], mark, in_dims, out_dims)


__all__ = ["Axes", "Bound", "Factor", "bind_rule", "infer_axes", "leaves", "named_dims", "tangle", "visit"]
