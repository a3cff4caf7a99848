"""python_calls: each Python function runs the operator that it stands for, with the arguments of a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.ops.placement_moves import apart
from autotp.passes.emit.python_calls import PYTHON_CALLS, call_python
from autotp.rules.call import bound_arguments

aten = torch.ops.aten
X, Y, W = torch.randn(2, 4, 8), torch.randn(2, 8, 4), torch.randn(8)
HEADS = torch.randn(2, 2, 4, 8)

Given = tuple[tuple[Any, ...], dict[str, Any]]
ARGUMENTS: dict[Any, Given] = {
    aten.add.Tensor: ((X, X), {"alpha": 2}),
    aten.addmm.default: ((W, X[0], torch.randn(8, 8)), {"beta": 2, "alpha": 3}),
    aten.bmm.default: ((X, Y), {}),
    aten.cat.default: (([X, X], -1), {}),
    aten.contiguous.default: ((HEADS.transpose(1, 2),), {"memory_format": torch.channels_last}),
    aten.cos.default: ((X,), {}),
    aten.detach.default: ((X,), {}),
    aten.div.Tensor: ((X, 3.0), {}),
    aten.dropout.default: ((X, 0.5, True), {}),
    aten.embedding.default: ((torch.randn(5, 3), torch.tensor([[1, 2]]), 1, True, True), {}),
    aten.eq.Scalar: ((torch.tensor([1, 2]), 1), {}),
    aten.exp.default: ((X,), {}),
    aten.expand.default: ((X[:1], [2, -1, 8]), {"implicit": True}),
    aten.flatten.using_ints: ((X, 1, 2), {}),
    aten.gelu.default: ((X,), {"approximate": "tanh"}),
    aten.layer_norm.default: ((X, [8], W, W, 1e-3, False), {}),
    aten.linear.default: ((X, torch.randn(3, 8), torch.randn(3)), {}),
    aten.log.default: ((X.abs(),), {}),
    aten.logical_not.default: ((X > 0,), {}),
    aten.masked_fill.Scalar: ((X, X > 0, 0), {}),
    aten.matmul.default: ((X, Y), {}),
    aten.mean.dim: ((X, [-1], True), {"dtype": torch.float64}),
    aten.mm.default: ((X[0], Y[0]), {}),
    aten.mul.Tensor: ((X, 2.0), {}),
    aten.ne.Scalar: ((torch.tensor([1, 2]), 1), {}),
    aten.neg.default: ((X,), {}),
    aten.permute.default: ((X, [2, 0, 1]), {}),
    aten.pow.Tensor_Scalar: ((X, 2), {}),
    aten.relu.default: ((X,), {}),
    aten.reshape.default: ((X.transpose(1, 2), [2, -1]), {}),
    aten.rms_norm.default: ((X, [8], W, 1e-3), {}),
    aten.rsqrt.default: ((X.abs(),), {}),
    aten.scaled_dot_product_attention.default: (
        (HEADS, HEADS[:, :1], HEADS[:, :1], torch.randn(4, 4), 0.5, False),
        {"scale": 0.5, "enable_gqa": True},
    ),
    aten.select.int: ((X, 1, -1), {}),
    aten.sigmoid.default: ((X,), {}),
    aten.silu.default: ((X,), {}),
    aten.sin.default: ((X,), {}),
    aten.softmax.int: ((X.to(torch.bfloat16), -1, torch.float32), {}),
    aten.split_with_sizes.default: ((X, [3, 5], 2), {}),
    aten.sub.Tensor: ((X, X), {"alpha": 3}),
    aten.sum.default: ((X,), {"dtype": torch.float64}),
    aten.tanh.default: ((X,), {}),
    aten.to.dtype: ((HEADS.transpose(1, 2), torch.float64, True, True, torch.contiguous_format), {}),
    aten.transpose.int: ((X, 1, 2), {}),
    aten.type_as.default: ((X, X.double()), {}),
    aten.unsqueeze.default: ((X, -1), {}),
    aten.view.default: ((X, [2, 32]), {}),
}
"""Operator -> arguments of a call, with each optional one; `is_causal` excludes a mask, so it stands below."""

NUMBER = torch.tensor(3.0)
MORE: list[tuple[Any, Given]] = [
    (aten.add.Tensor, ((X, 1), {"alpha": 2})),
    (aten.add.Tensor, ((X > 0, True), {})),
    (aten.cat.default, (([torch.empty(0), X[0, 0]],), {})),
    (aten.contiguous.default, ((X.transpose(1, 2),), {})),
    (aten.div.Tensor, ((torch.tensor([3, 4]), 2), {})),
    (aten.dropout.default, ((X.clone().requires_grad_(), 0.25, True), {})),
    (aten.embedding.default, ((torch.randn(5, 3), torch.tensor(1)), {})),
    (aten.eq.Scalar, ((X > 0, False), {})),
    (aten.expand.default, ((NUMBER, []), {})),
    (aten.flatten.using_ints, ((NUMBER,), {})),
    (aten.layer_norm.default, ((X, [4, 8]), {})),
    (aten.layer_norm.default, ((X, [8], None, W), {})),
    (aten.linear.default, ((X[0, 0], torch.randn(3, 8)), {})),
    (aten.masked_fill.Scalar, ((X, X > 0, float("-inf")), {})),
    (aten.masked_fill.Scalar, ((X > 1, X > 0, True), {})),
    (aten.matmul.default, ((W, W), {})),
    (aten.mean.dim, ((X, None), {})),
    (aten.mean.dim, ((X, [], True), {})),
    (aten.mul.Tensor, ((torch.tensor([1, 2]), 2.5), {})),
    (aten.permute.default, ((NUMBER, []), {})),
    (aten.pow.Tensor_Scalar, ((X.abs(), -0.5), {})),
    (aten.reshape.default, ((X[:1, :1, :1], []), {})),
    (aten.rms_norm.default, ((X, [4, 8]), {})),
    (aten.scaled_dot_product_attention.default, ((HEADS, HEADS, HEADS, None, 0.0, True), {})),
    (aten.scaled_dot_product_attention.default, ((HEADS, HEADS, HEADS, torch.ones(4, 4).bool().tril()), {})),
    (aten.softmax.int, ((X, 1), {})),
    (aten.split_with_sizes.default, ((X, [1, 1]), {})),
    (aten.sub.Tensor, ((X, 0.5), {"alpha": 2})),
    (aten.sum.default, ((X > 0,), {})),
    (aten.to.dtype, ((X, torch.bfloat16), {})),
    (aten.to.dtype, ((HEADS.transpose(1, 2), torch.float32, False, True), {})),
    (aten.view.default, ((X[:1, :1, :1], []), {})),
    (aten.view.default, ((X, [-1]), {})),
]
"""Calls with few arguments, with numbers, and of tensors without dimensions."""


class Dispatched(TorchDispatchMode):
    """Notes the operators that reach the dispatcher, with their arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = {name: arg for name, arg in (kwargs or {}).items() if not isinstance(arg, Tensor)}
        self.found.append((op, [a for a in args if not isinstance(a, Tensor | list)], plain))
        return op(*args, **(kwargs or {}))


def dispatched(run: Any, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    with Dispatched() as mode:
        found = run(*args, **kwargs)
    return mode.found, found


def test_python_calls_are_all_tried_here() -> None:
    """Those of the table; libraries add others, which their own tests try."""
    assert ARGUMENTS.keys() == {operator for operator in PYTHON_CALLS if operator.namespace == "aten"}


def test_python_calls_are_tried_with_every_option() -> None:
    """Not the default of the schema, which a function could ignore."""
    for operator, (args, kwargs) in ARGUMENTS.items():
        others = bound_arguments(operator, args, kwargs)
        for argument in operator._schema.arguments:
            if argument.has_default_value() and argument.name != "is_causal":
                assert argument.name in kwargs or len(args) > list(others).index(argument.name), (operator, argument)
                assert argument.default_value is not others[argument.name], (operator, argument)


def by_keyword(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """The same call with all that has a default by keyword."""
    arguments = operator._schema.arguments[: len(args)]
    needed = sum(not argument.has_default_value() for argument in arguments)
    return args[:needed], {x.name: arg for x, arg in zip(arguments[needed:], args[needed:], strict=True)} | kwargs


def emitted(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A graph of one call after the pass, as a function of the same arguments."""
    graph, tensors = fx.Graph(), list[Tensor]()

    def node(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        tensors.append(x)
        placeholder = graph.placeholder(f"x{len(tensors)}")
        placeholder.meta["val"] = x
        return placeholder

    graph.output(graph.call_function(operator, *pytree.tree_map(node, (args, kwargs))))
    module = call_python(fx.GraphModule(nn.Module(), graph))
    assert not module.graph.find_nodes(op="call_function", target=operator)
    return lambda *args, **kwargs: module(*tensors)


@pytest.mark.parametrize("spelled", [lambda _, *given: given, by_keyword], ids=["place", "keyword"])
@pytest.mark.parametrize(
    ("operator", "given"), [*ARGUMENTS.items(), *MORE], ids=lambda x: str(x) if callable(x) else ""
)
def test_an_emitted_call_runs_its_operator(operator: Any, given: Given, spelled: Any) -> None:
    """Whichever of its arguments a graph gives, by place or by keyword."""
    args, kwargs = spelled(operator, *given)
    theirs, expected = dispatched(operator, args, kwargs)
    ours, found = dispatched(emitted(operator, args, kwargs), args, kwargs)
    assert ours == theirs and theirs
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_call_python_changes_graphs_in_blocks() -> None:
    inner, outer = fx.Graph(), fx.Graph()
    x = inner.placeholder("x")
    inner.output(inner.call_function(aten.add.Tensor, (x, 1.0)))
    root = nn.Module()
    root.block = fx.GraphModule(nn.Module(), inner)
    x = outer.placeholder("x")
    outer.output(outer.call_function(aten.slice.Tensor, (outer.call_module("block", (x,)), 0, 1, 3)))
    module = call_python(fx.GraphModule(root, outer))
    assert "torch.add(x, 1.0)" in module.get_submodule("block").code  # type: ignore[operator]
    assert "torch.ops.aten.slice.Tensor" in module.code
    assert module(torch.arange(4.0)).tolist() == [2, 3]


def test_call_python_narrows_slices_of_numbers() -> None:
    graph = fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    x.meta["val"] = torch.empty(3, 8)
    ends = [(0, 5), (2, 2**63 - 1), (-3, -1), (None, None), (5, 2), (-99, 99)]
    outputs = [graph.call_function(aten.slice.Tensor, (x, -1, *pair)) for pair in ends]
    kept = [graph.call_function(aten.slice.Tensor, (x, 1, 0, end, step)) for end, step in ((8, 2), (n, 1))]
    graph.output([*outputs, *kept])
    module = call_python(fx.GraphModule(nn.Module(), graph))
    assert module.code.count("torch.narrow(") == len(ends)
    value = torch.arange(24.0).view(3, 8)
    expected = [value[:, slice(*pair)] for pair in ends]
    assert all(a.equal(b) for a, b in zip(module(value, 4), [*expected, value[:, ::2], value[:, :4]], strict=True))


def test_call_python_drops_apart_unless_it_is_returned() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    inside, returned = (graph.call_function(apart, (x,)) for _ in range(2))
    graph.output([graph.call_function(aten.mul.Tensor, (inside, 2.0)), returned])
    module = call_python(fx.GraphModule(nn.Module(), graph))
    assert module.code.count("apart(") == 1, module.code
    value = torch.ones(2)
    twice, same = module(value)
    assert twice.tolist() == [2, 2] and same.equal(value) and same is not value


def cut_up(*pieces: tuple[int, int], returned: bool = False) -> fx.GraphModule:
    """A graph that multiplies slices of the last dimension, [3 8], by 2, 3, ..., and joins them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 8)
    parts = [graph.call_function(aten.slice.Tensor, (x, -1, *piece)) for piece in pieces]
    scaled = [graph.call_function(aten.mul.Tensor, (part, i + 2.0)) for i, part in enumerate(parts)]
    joined = graph.call_function(aten.cat.default, (scaled, -1))
    graph.output([joined, parts[0]] if returned else joined)
    return fx.GraphModule(nn.Module(), graph)


def backward_nodes(y: Tensor) -> list[str]:
    """The names of the operators of a backward."""
    seen, queue = [], [y.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.append(node)
            queue += [after for after, _ in node.next_functions]
    return sorted(node.name() for node in seen)


@pytest.mark.parametrize("pieces", [((4, 8), (0, 4)), ((0, 3), (3, 4), (4, 2**63 - 1)), ((0, 8), (8, 8))], ids=str)
def test_call_python_splits_slices_that_share_out_a_dimension(pieces: Any) -> None:
    """In backward, too: the gradients are joined, and no tensor of the whole's size is filled for each."""
    plain, module = cut_up(*pieces), call_python(cut_up(*pieces))
    assert (module.code.count("torch.split_with_sizes("), module.code.count("narrow")) == (1, 0)
    x = torch.arange(24.0).view(3, 8).requires_grad_()
    found, expected = module(x), plain(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    grad = torch.randn_like(found)
    torch.testing.assert_close(
        *(torch.autograd.grad(y, x, grad, retain_graph=True)[0] for y in (found, expected)), rtol=0, atol=0
    )
    slices = [name.startswith(("Slice", "Split")) for name in backward_nodes(found)]
    assert sum(slices) == 1


def test_call_python_splits_slices_of_a_slice() -> None:
    """As GPT-NeoX and Phi turn the halves of a part of each head."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 8)
    outer = [graph.call_function(aten.slice.Tensor, (x, -1, *piece)) for piece in ((0, 4), (4, 8))]
    outer[0].meta["val"] = torch.empty(3, 4)
    inner = [graph.call_function(aten.slice.Tensor, (outer[0], -1, *piece)) for piece in ((2, 4), (0, 2))]
    graph.output(graph.call_function(aten.cat.default, ([*inner, outer[1]], -1)))
    module = call_python(fx.GraphModule(nn.Module(), graph))
    assert module.code.count("torch.split_with_sizes(") == 2
    value = torch.arange(24.0).view(3, 8)
    torch.testing.assert_close(module(value), value[:, [2, 3, 0, 1, 4, 5, 6, 7]])


@pytest.mark.parametrize("pieces", [((0, 4), (4, 7)), ((0, 5), (4, 8)), ((1, 8),), ((0, 4), (0, 4))], ids=str)
def test_call_python_leaves_other_slices(pieces: Any) -> None:
    assert "split" not in call_python(cut_up(*pieces)).code


def test_call_python_leaves_slices_that_the_caller_gets() -> None:
    """torch refuses to write into a part of a split."""
    module = call_python(cut_up((0, 4), (4, 8), returned=True))
    assert "split" not in module.code
    module(torch.zeros(3, 8, requires_grad=True) + 1)[1].add_(1)


def test_call_python_reshapes_a_value_once() -> None:
    """Unless another operator reads it between, or the caller gets the value."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    twice = [graph.call_function(aten.reshape.default, (x, sizes)) for sizes in ([4, 6], [2, 12])]
    ends = [graph.call_function(aten.reshape.default, (y, [-1, 3])) for y in twice]
    graph.output([graph.call_function(aten.neg.default, (y,)) for y in (*ends, twice[1])])
    module = call_python(fx.GraphModule(nn.Module(), graph))
    assert module.code.count("torch.reshape(") == 3, module.code
    value = torch.arange(24.0).view(3, 8).t()
    assert [y.tolist() for y in module(value)] == [
        (-value.reshape(sizes)).tolist() for sizes in ((8, 3), (8, 3), (2, 12))
    ]  # fmt: skip


def test_call_python_returns_reshapes_in_memory_of_their_own() -> None:
    """The caller writes into it, or into a view of it; the tensor that was reshaped stays as it is."""
    graph = fx.Graph()
    turned = graph.call_function(aten.transpose.int, (graph.placeholder("x"), 0, 1))
    row = graph.call_function(aten.reshape.default, (turned, [-1]))
    graph.output(
        graph.call_function(aten.unsqueeze.default, (graph.call_function(aten.reshape.default, (row, [8, 3])), 0))
    )
    module, value = call_python(fx.GraphModule(nn.Module(), graph)), torch.arange(24.0).view(3, 8)
    module(value).zero_()
    assert value.tolist() == torch.arange(24.0).view(3, 8).tolist()


def test_call_python_returns_writable_views_of_slices() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 8)
    slices = [graph.call_function(aten.slice.Tensor, (x, -1, *piece)) for piece in ((0, 4), (4, 8))]
    graph.output([graph.call_function(aten.transpose.int, (part, 0, 1)) for part in slices])
    module = call_python(fx.GraphModule(nn.Module(), graph))
    first, _ = module(torch.zeros(3, 8, requires_grad=True) + 1)
    assert first.add_(1).tolist() == [[2.0] * 3] * 4
