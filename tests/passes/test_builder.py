"""builder: a new graph beside the old one, example values computed once, and values at the captured sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import draft, lines, some
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from autotp.passes.builder import Builder, at_captured_sizes, copied, evaluated, fake_mode_of

aten = torch.ops.aten


def old() -> fx.Graph:
    graph = draft(lambda call, x: call(aten.relu.default, call(aten.exp.default, x)), x=some(3, 4))
    for i, node in enumerate(graph.nodes):
        node.meta |= {"stack_trace": f"line {i}", "nn_module_stack": {"": ("h.0", None)}, "other": i}
    return graph


def test_a_copy() -> None:
    """It has example value, line and module of the original, and the original stays as it was."""
    graph = old()
    before, builder = lines(graph), Builder(fake_mode_of(graph))
    for node in graph.nodes:
        builder.copy(node)
    assert lines(builder.graph) == before == lines(graph)
    for node in graph.nodes:
        new = builder.env[node]
        assert new.graph is builder.graph
        assert new.meta == {key: value for key, value in node.meta.items() if key != "other"}


def test_a_new_call() -> None:
    """Its example value follows from those of its operands, its line is that of `origin`."""
    graph = old()
    x, exp, *_ = graph.nodes
    builder = Builder(fake_mode_of(graph))
    builder.copy(x)
    assert builder.map([x, 2, {"y": x}]) == [builder.env[x], 2, {"y": builder.env[x]}]
    builder.origin = exp
    new = builder.call(aten.sum.dim_IntList, builder.env[x], [1], dtype=torch.float32)
    assert (new.meta["val"].shape, new.meta["val"].dtype) == ((3,), torch.float32)
    assert new.meta["stack_trace"] == "line 1"
    assert "val" not in builder.raw(aten.exp.default, (new,)).meta


def test_a_call_is_evaluated_once_for_equal_arguments() -> None:
    mode, calls = FakeTensorMode(), list[Any]()

    def target(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((args, kwargs))
        return args[0] + 1

    x, same, longer = (mode.from_tensor(some(n)) for n in (3, 3, 4))
    found = [evaluated(mode, target, *args) for args in ((x, 1), (same, 1), (x, 1.0), (x, True), (longer, 1), (x, 1))]
    assert len(calls) == 4, "1, 1.0 and True are three keys"
    assert found[0] is found[1] is found[5]
    assert found[4].shape == (4,)
    evaluated(mode, target, x, 1, at=[1])
    evaluated(mode, target, x, 1, at=(1,))
    assert len(calls) == 5


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (aten.baddbmm.default, [(6, 1, 5), (6, 5, 4), (6, 4, 5)]),
        (aten.baddbmm.default, [(6, 5, 7), (6, 5, 4), (6, 4, 7)]),
        (aten.addmm.default, [(1, 5), (5, 4), (4, 5)]),
        (aten.addbmm.default, [(1, 5), (6, 5, 4), (6, 4, 5)]),
        (aten.addmv.default, [(1,), (5, 4), (4,)]),
        (aten.linear.default, [(6, 5, 4), (3, 4)]),
    ],
    ids=str,
)
def test_products_of_symbolic_sizes(op: Any, shapes: list[tuple[int, ...]]) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    values = [
        mode.from_tensor(
            torch.empty(shape), source=ConstantSource(f"x{i}"),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape)),
        )
        for i, shape in enumerate(shapes)
    ]  # fmt: skip
    result = evaluated(mode, op, *values)
    assert tuple(map(int, result.shape)) == tuple(op(*map(torch.empty, shapes)).shape)


def test_strides_are_a_key() -> None:
    mode = FakeTensorMode()
    x = mode.from_tensor(some(3, 3))
    found = [evaluated(mode, torch.clone, y) for y in (x, x.t())]
    assert [y.stride() for y in found] == [(3, 1), (1, 3)]


def test_captured_sizes() -> None:
    """A symbolic size becomes the number that it had; one that depends on values becomes some number."""
    symbolic, plain = FakeTensorMode(shape_env=ShapeEnv()), FakeTensorMode()
    x = symbolic.from_tensor(some(3, 5).t())
    size = Builder(symbolic).length("rows", 7)
    assert symbolic.shape_env is not None
    unknown = symbolic.shape_env.create_unbacked_symint()
    y, n, m, text = at_captured_sizes((x, size, unknown, "mean"), plain)
    assert (tuple(y.shape), y.stride(), n, m, text) == ((5, 3), (1, 5), 7, 2, "mean")
    assert all(type(length) is int for length in y.shape)
    assert at_captured_sizes((unknown * 3, unknown + size), plain) == (6, 9)


def test_sizes_of_values_that_the_graph_knows() -> None:
    symbolic, plain = FakeTensorMode(shape_env=ShapeEnv()), FakeTensorMode()
    assert symbolic.shape_env is not None
    counted, equal, few = (symbolic.shape_env.create_unbacked_symint() for _ in range(3))
    torch._check(counted >= 5)
    torch._check(equal == 7)
    torch._check(few <= 1)
    torch._check(few >= 0)
    assert at_captured_sizes((counted, counted * 2, equal, few), plain) == (5, 10, 7, 1)


@pytest.mark.parametrize("empty", [True, False])
def test_the_mode_of_a_graph(empty: bool) -> None:
    graph = fx.Graph() if empty else old()
    found = fake_mode_of(graph)
    assert isinstance(found, FakeTensorMode)
    assert empty or found is next(iter(graph.nodes)).meta["val"].fake_mode


def test_a_copy_is_that_of_torch() -> None:
    """Nested and named operands, names, readers and notes; the notes of both graphs can be changed apart."""
    graph = draft(lambda call, x: call(aten.cat.default, [call(aten.add.Tensor, x, x, alpha=2), x], 1), x=some(3, 4))
    for node in graph.nodes:
        node.meta["other"] = [1]
    made: list[tuple[fx.Graph, dict[fx.Node, fx.Node]]] = [(fx.Graph(), {}), (fx.Graph(), {})]
    for node in graph.nodes:
        for (new, env), copy in zip(made, (copied, fx.Graph.node_copy), strict=True):
            env[node] = copy(new, node, env.__getitem__)
    (ours, _), (theirs, _) = made
    assert str(ours) == str(theirs) == str(graph)
    for mine, other in zip(ours.nodes, theirs.nodes, strict=True):
        assert list(map(str, mine.users)) == list(map(str, other.users)) and mine.meta == other.meta
        assert (mine.type, mine.kwargs.keys()) == (other.type, other.kwargs.keys())
    next(iter(ours.nodes)).meta["val"] = None
    assert next(iter(graph.nodes)).meta["val"] is not None
