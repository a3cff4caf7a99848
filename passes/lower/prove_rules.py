"""prove_rules: tests a rule by brute force: the operator on slices against the operator on whole tensors.

    pass-through: op(slice of x) is the slice of op(x)          reduced: op(slice of x) sum to op(x)
    introduced:   op with a local size is the slice of op       linear:  op(x1) + op(x2) is op(x1 + x2)

Every factor is cut into chunks, also uneven and empty ones, and once strided, as the minor part of a product. The parts
of a concatenation are cut together. The same code makes the local calls of graphs (`passes/lower/localize.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autotp.errors import Error
from autotp.ops.collectives import joined_terms
from autotp.passes.builder import Builder
from autotp.passes.lower.local_sizes import Local, Target
from autotp.passes.lower.localize import FORMS, localize
from autotp.passes.plan.infer_axes import Axes, Bound, Factor, infer_axes
from autotp.rules.call import call_of, outputs_of, result_tensors
from autotp.rules.registry import has_user_rule, rule_of
from autotp.rules.row import Trait
from autotp.rules.traits import draws, has
from autotp.sharding.axis import Axis, Size, find, leaves, product, unify
from autotp.sharding.layout import layout_of
from autotp.source_location import line_of

TAKES_NUMBERS = "an operator that takes such numbers; autotp.rule(..., reference=f) if it has no kernel for CPUs"
TOLERANCE = 4096
"""The allowed difference of two results, in units in the last place of the largest number: 1e-12 in float64."""


def prove_rule(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], tp: int) -> list[str]:
    """Tests the rule of `op` on these arguments, cut on `tp` ranks; returns one line for each problem.

    Factors that need replication (`^`) claim nothing. Factors with a parallel form (`!`) are tested if the form is a
    single call. An operator without a rule has no problems.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        node = _call_node(op, args, kwargs)
        try:
            axes = infer_axes(node.graph)
        except Exception as error:  # A rule function may raise anything: then the rule is wrong.
            return [f"{op}: the rule does not fit: {type(error).__name__}: {error}"]
        bound = axes.bound.get(node)
        if bound is None or not bound.known:
            rule = None if bound is None else rule_of(call_of(node))
            return [] if rule is None else [f"{op}: the rule does not fit: {rule}"]
        trial = _Trial(node, axes, bound, tp)
        if has_user_rule(op) and not trial.repeats():
            return [f"{op}: two runs on the same numbers differ, and no rule can say how"]
        return [f"{op}: {problem}" for problem in trial.problems()]


def prove_node(node: fx.Node, tp: int = 2) -> None:
    """Tests the rule of a user's operator on random numbers with the shapes of a captured graph, on its device.

    Raises:
        Error: the rule is not true; names the factor and the result.
    """
    cards = {n.meta["val"].device for n in node.all_input_nodes if _is_on_card(n.meta["val"])}
    try:
        with torch.random.fork_rng(devices=[card.index or 0 for card in cards]):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _example(n.meta["val"]))
            problems = prove_rule(node.target, args, kwargs, tp)  # type: ignore[arg-type]
    except Exception as error:  # A user's operator may fail in any way.
        problem = f"{node.target} does not run on numbers like the graph's, so its rule is not proved"
        got = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Error(problem, got=got, at=line_of(node), fix=TAKES_NUMBERS) from error
    if problems:
        shapes = ", ".join(str(list(x.shape)) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        raise Error(
            f"the rule of {node.target} is not true of this call",
            found=problems[0].partition(": ")[2],
            shapes=shapes,
            at=line_of(node),
            fix="mark what the operator mixes with ^, name only operands it is linear in",
        )


def _is_on_card(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda and torch.cuda.is_available()


def _example(value: Any) -> Any:
    """Returns random numbers with the shape, dtype and device of an example value; on the CPU where it has none."""
    if not isinstance(value, Tensor):
        return value.node.hint if isinstance(value, torch.SymInt) else value
    device = value.device if _is_on_card(value) else "cpu"
    shape = [n if isinstance(n, int) else n.node.hint for n in value.shape]
    if value.is_floating_point() or value.is_complex():
        return torch.randn(shape, dtype=value.dtype, device=device)
    return torch.randint(0, 2, shape, device=device).to(value.dtype)


def _call_node(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Returns a call in a graph of its own, with real tensors as example values."""
    graph = fx.Graph()

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value.detach()
        return node

    node = graph.call_function(op, *pytree.tree_map(place, (tuple(args), kwargs)))
    node.meta["val"] = op(*args, **kwargs)
    return node


@dataclass(frozen=True)
class _Trial:
    """A test of the rule of one call, whose operands and outputs are real tensors."""

    node: fx.Node
    axes: Axes
    bound: Bound
    tp: int

    def problems(self) -> Iterator[str]:
        yield from (f"factor {f.name} does not line up" for f in self.bound.factors if find(f.axis).tangled)
        values = self.repeats()
        for leaf in self._leaves():
            factor = self.bound.cuttable(leaf)
            if factor is not None and (not factor.mark or (values and self._one_call(factor, leaf))):
                problem = self._cut(factor, leaf, values)
                if problem:
                    yield f"factor {factor.name} of {leaf.size} on {self.tp} ranks, {_kind(factor)}: {problem}"
        for group in self.bound.rule.linear:
            problem = self._linear(sorted(group)) if values else ""
            if problem:
                yield f"linear in operands {sorted(group)}: {problem}"

    def repeats(self) -> bool:
        """False for an operator that draws random numbers or leaves memory uninitialised: only shapes are compared."""
        if draws(self.node):  # A few numbers may be drawn twice by chance.
            return False
        again = result_tensors(self._run(self.node, {}))
        equal = all(tensor_difference(a, b) == "" for a, b in zip(outputs_of(self.node), again, strict=True))
        return equal and not has(self.node.target, Trait.UNINITIALIZED)

    def _one_call(self, factor: Factor, leaf: Axis) -> bool:
        """True if the parallel form is a single call, which gets the start of a rank's part of the factor."""
        return self.node.target in FORMS and find(factor.axis) is find(leaf)

    # ---- the leaves to cut

    def _leaves(self) -> Iterator[Axis]:
        """Yields the leaves of all factors; then the leaves that parts of a concatenation share; then minor parts."""
        yield from self._whole_leaves()
        if self._tie():
            yield from self._whole_leaves()
        for leaf in self._whole_leaves():
            n = leaf.size.number
            major = next(d for d in range(2, n + 1) if n % d == 0)
            if major < n and not leaf.tangled:
                minor = Axis(Size(n // major))
                unify(leaf, product([Axis(Size(major)), minor]))
                yield minor

    def _whole_leaves(self) -> list[Axis]:
        distinct = {leaf: None for factor in self.bound.factors for leaf in leaves(factor.axis)}
        return [leaf for leaf in distinct if leaf.size.number > 1]

    def _tie(self) -> bool:
        """Gives the parts of every concatenation a common leaf; returns True if there were any."""
        tied = False
        for axis in {find(axis) for dims in (*self.bound.dims[0], *self.bound.dims[1]) for axis in dims}:
            parts = [find(part) for part in axis.parts] if axis.kind == "concat" else []
            shared = gcd(*(part.size.number for part in parts)) if parts else 1
            if shared > 1 and all(part.kind == "leaf" for part in parts):
                tied, leaf = True, Axis(Size(shared))
                for part in parts:
                    unify(part, product([leaf, Axis(Size(find(part).size.number // shared))]))
        return tied

    # ---- local calls

    def _cut(self, factor: Factor, leaf: Axis, values: bool) -> str:
        """Compares the call cut along `leaf` with the whole call; returns the problem, or ""."""
        got = []
        for rank in range(self.tp):
            try:
                got.append(result_tensors(self._local(factor, leaf, rank)))
            except Exception as error:  # An operator may fail on a slice in any way.
                return f"rank {rank}: {type(error).__name__}: {error}".splitlines()[0]
        for o, want in enumerate(outputs_of(self.node)):
            outs = [results[o] for results in got]
            difference = self._part(o, want, outs, leaf, values) if o in factor.outs else self._sum(want, outs, values)
            if difference:
                return f"output {o}{difference}"
        return ""

    def _local(self, factor: Factor, leaf: Axis, rank: int) -> Any:
        """Returns the result of `rank`."""
        local = Local(Builder(nullcontext()), Target("tp", self.tp, rank))  # type: ignore[arg-type]
        real: dict[fx.Node, Tensor] = {}
        for node in self.node.all_input_nodes:
            x, dims = node.meta["val"], self.axes.of(node)
            real[local.builder.copy(node)] = layout_of(tuple(x.shape), dims, leaf, self.tp, "").take(x, rank)
        return self._run(localize(local, self.node, self.axes, factor, leaf), real)

    def _run(self, node: fx.Node, real: dict[fx.Node, Tensor]) -> Any:
        """Runs the call `node` on `real` tensors; on its example values where there are none."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: real[n] if n in real else n.meta["val"])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _part(self, o: int, want: Tensor, got: list[Tensor], leaf: Axis, values: bool) -> str:
        layout = layout_of(tuple(want.shape), self.bound.dims[1][o], leaf, self.tp, "")
        parts = (tensor_difference(layout.take(want, rank), part, values) for rank, part in enumerate(got))
        return next((f", rank {rank}{difference}" for rank, difference in enumerate(parts) if difference), "")

    def _sum(self, want: Tensor, got: list[Tensor], values: bool) -> str:
        wrong = next((part for part in got if part.shape != want.shape), None)
        if wrong is not None:
            return f": {_typed(wrong)}, expected {_typed(want)}"
        parts = torch.stack(got)
        match self.bound.rule.reducer:
            case "sum":
                total = parts.sum(0, dtype=want.dtype)
            case "max":
                total = parts.amax(0)
            case reducer:
                total = joined_terms(parts, reducer)
        return tensor_difference(want, total, values, parts)

    def _linear(self, group: list[int]) -> str:
        """Replaces the operands of a group by summands, and compares the sum of results; returns the problem, or ""."""
        nodes = [self.bound.operands[i] for i in group]
        whole = [node.meta["val"] for node in nodes]
        if any(x.dtype == torch.bool or not x.isfinite().all() for x in whole):
            return ""
        summands = [_summands(x, self.tp) for x in whole]
        runs = [
            result_tensors(self._run(self.node, dict(zip(nodes, xs, strict=True))))
            for xs in zip(*summands, strict=True)
        ]
        for o, want in enumerate(outputs_of(self.node)):
            difference = self._sum(want, [run[o] for run in runs], True)
            if difference:
                return f"output {o}{difference}"
        return ""


def _kind(factor: Factor) -> str:
    return "pass-through" if factor.ins and factor.outs else "reduced" if factor.ins else "introduced"


def _summands(x: Tensor, n: int) -> list[Tensor]:
    """Returns `n` tensors that sum to `x`."""
    real = x.is_floating_point() or x.is_complex()
    rest = [torch.randn_like(x) if real else torch.randint_like(x, 0, 4) for _ in range(n - 1)]
    return [x - sum(rest), *rest] if n > 1 else [x]


def _typed(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def tensor_difference(want: Tensor, got: Tensor, values: bool = True, parts: Tensor | None = None) -> str:
    """Returns the difference of two tensors as text, or ""; rounding is relative to the largest number."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return f": {_typed(got)}, expected {_typed(want)}"
    if not values or not want.numel():
        return ""
    if not want.is_floating_point() and not want.is_complex():
        return "" if want.equal(got) else ": other numbers"
    every = torch.cat([want.flatten(), *([] if parts is None else [parts.flatten()])]).abs()
    finite = every[every.isfinite()]
    room, largest = TOLERANCE * torch.finfo(want.dtype).eps, finite.max().item() if finite.numel() else 0
    close = torch.isclose(got, want, rtol=room, atol=room * largest, equal_nan=True)
    return "" if close.all() else f": off by {(got - want).abs().nan_to_num().max().item():.2g}"
