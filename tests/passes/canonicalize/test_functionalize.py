"""functionalize: what writes into memory becomes a value, seen by all that share the memory and by nothing else."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors import OPERATOR, message
from graphs import draft, expect_same, lines, ops, run, some
from torch import Tensor, nn

import autotp
from autotp.errors import Error
from autotp.passes.canonicalize.functionalize import functionalize

aten = torch.ops.aten
X = some(2, 1, 4)

LIBRARY = torch.library.Library("autotp_tests", "FRAGMENT")  # of its own: its `add_` is not torch's
LIBRARY.define("add_(Tensor(a!) x, Scalar by) -> Tensor(a!)")
LIBRARY.impl("add_", lambda x, by: x.mul_(by), "CompositeExplicitAutograd")


def written(*views: tuple[Any, ...], target: Any = aten.add_.Scalar, args: tuple[Any, ...] = (3.0,)) -> Any:
    """Writes through views of views of a value; the value, the views and what the operator returned are read."""

    def make(call: Any, x: Any) -> Any:
        found = [call(aten.clone.default, x)]
        for view, *rest in views:
            found.append(call(view, found[-1], *rest))
        given = [found[0] if arg == "itself" else arg for arg in args]
        last = call(target, found[-1], *given)
        single = [value for value in (*found, last) if isinstance(value.meta["val"], Tensor)]
        several = [value for value in found if not isinstance(value.meta["val"], Tensor)]
        single += [call(operator.getitem, value, i) for value in several for i in range(len(value.meta["val"]))]
        return tuple(call(aten.mul.Scalar, value, 2) for value in single)

    return make


def test_functionalize_does_the_docstring_s_example() -> None:
    graph = draft(written((aten.select.int, 1, 0), target=aten.fill_.Scalar), x=X)
    found, updated = functionalize(graph, [])
    assert lines(found)[:5] == [
        "clone(x)",
        "select(clone, 1, 0)",
        "ones_like(select)",
        "mul(ones_like, 3.0)",
        "select_scatter(clone, mul, 1, 0)",
    ]
    assert not updated
    expect_same(graph, found, [X])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(written(), id="itself"),
        pytest.param(written((aten.slice.Tensor, 2, 1, 3)), id="slice"),
        pytest.param(written((aten.slice.Tensor, -1, 0, 4, 2)), id="slice-every-other"),
        pytest.param(written((aten.select.int, 2, -1)), id="select"),
        pytest.param(written((aten.diagonal.default, 0, 0, 2)), id="diagonal"),
        pytest.param(written((aten.diagonal.default, -1, 2, 0)), id="diagonal-below"),
        pytest.param(written((aten.view.default, [4, 2])), id="view"),
        pytest.param(written((aten.unsqueeze.default, 0)), id="unsqueeze"),
        pytest.param(written((aten.squeeze.dim, 1)), id="squeeze"),
        pytest.param(written((aten.transpose.int, 0, -1)), id="transpose"),
        pytest.param(written((aten.permute.default, [2, 0, 1])), id="permute-cyclic"),
        pytest.param(written((aten.permute.default, [-1, 0, 1])), id="permute-negative"),
        pytest.param(written((aten.detach.default,)), id="detach"),
        pytest.param(written((aten.alias.default,)), id="alias"),
        pytest.param(
            written((aten.select.int, 0, 1), (aten.slice.Tensor, 1, 2), (aten.t.default,)), id="view-of-views"
        ),
        pytest.param(written((aten.unbind.int,), (operator.getitem, 1)), id="item-of-unbind"),
        pytest.param(written((aten.unbind.int, -1), (operator.getitem, 0)), id="item-of-unbind-behind"),
        pytest.param(written((aten.unbind.int,), (operator.getitem, 1), (aten.select.int, 1, 2)), id="view-of-an-item"),
        pytest.param(written((aten.split.Tensor, 1, -1), (operator.getitem, 1)), id="item-of-split"),
        pytest.param(written((aten.split_with_sizes.default, [1, 3], 2), (operator.getitem, 1)), id="item-of-sizes"),
        pytest.param(written((aten.chunk.default, 2, 2), (operator.getitem, 1)), id="item-of-chunk"),
        pytest.param(written(target=aten.zero_.default, args=()), id="zero"),
        pytest.param(written(target=aten.copy_.default, args=(torch.ones(4),)), id="copy-broadcast-of-another-dtype"),
        pytest.param(written(target=aten.eq_.Scalar, args=(1.0,)), id="comparison-keeps-the-dtype"),
        pytest.param(written((aten.detach.default,), target=aten.mul_.Tensor, args=("itself",)), id="by-itself"),
    ],
)
def test_functionalize_writes_through_views(make: Callable[..., Any]) -> None:
    graph = draft(make, x=X)
    found, _ = functionalize(graph, [], constants=["x"])
    assert not any(kind.endswith("_") for kind in ops(found))
    expect_same(graph, found, [X])


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.pow_.Scalar, (2,)),
        (aten.pow_.Tensor, ("itself",)),
        (aten.float_power_.Scalar, (2,)),
        (aten.clamp_.default, (-0.5, 0.5)),
        (aten.lerp_.Scalar, (torch.ones(4, dtype=torch.float64), 0.3)),
        (aten.bernoulli_.float, ()),
        (aten.bernoulli_.float, (0.3,)),
        (aten.bernoulli_.Tensor, (torch.full((4,), 0.3),)),
        (aten.normal_.default, ()),
        (aten.normal_.default, (1.0, 0.1)),
        (aten.uniform_.default, (0.5, 1.5)),
        (aten.exponential_.default, ()),
        (aten.cauchy_.default, ()),
        (aten.geometric_.default, (0.5,)),
        (aten.log_normal_.default, ()),
        (aten.random_.to, (5,)),
    ],
    ids=str,
)
def test_functionalize_finds_the_out_of_place_form_by_types(target: Any, args: tuple[Any, ...]) -> None:
    """Found by the types of its arguments: neither its name nor its defaults need be the same."""
    graph = draft(written(target=target, args=args), x=X)
    found, _ = functionalize(graph, [])
    expect_same(graph, found, [X])


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("sizes", [(4, 4), (3, 5), (9, 3), (1, 4), (3, 3, 3)], ids=str)
def test_functionalize_fills_a_diagonal(sizes: tuple[int, ...], wrap: bool) -> None:
    x = some(*sizes)
    graph = draft(written(target=aten.fill_diagonal_.default, args=(5.0, wrap)), x=x)
    found, _ = functionalize(graph, [])
    expect_same(graph, found, [x])


class InBatch(nn.Module):
    """Scores each row against all others; a row's own score and those of equal items are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, items: Tensor) -> Tensor:
        y = self.down(self.up(x).relu())
        same = items[:, None] == items[None, :]
        same.fill_diagonal_(False)
        scores = (y @ y.t()).masked_fill(same, -9.0)
        scores.fill_diagonal_(0.5)
        scores.diagonal(1).mul_(2.0)
        return scores.logsumexp(1).sum()


def test_a_model_that_writes_a_diagonal_is_verified() -> None:
    assert autotp.verify(InBatch(), 2, example_inputs=(torch.randn(5, 6), torch.tensor([3, 1, 3, 0, 1]))).ok


@pytest.mark.parametrize("name", ["__ior__", "__iand__", "__ixor__", "__ilshift__", "__irshift__"])
def test_functionalize_follows_augmented_assignments(name: str) -> None:
    """`mask |= other` and `mask[0] |= other` are operators of their own in a graph."""
    given = torch.tensor([[5, 2, 1], [6, 0, 3]])

    def make(call: Any, x: Any) -> Any:
        y = call(aten.clone.default, x)
        call(getattr(aten, name).Tensor, call(aten.select.int, y, 0, 0), torch.tensor([1, 2, 1]))
        return y, call(getattr(aten, name).Scalar, y, 1)

    graph = draft(make, x=given)
    found, _ = functionalize(graph, [])
    expect_same(graph, found, [given])


def other_view(call: Any, x: Any) -> Any:
    """A view taken before the write, of the same memory, shows it; what was computed before does not."""
    y = call(aten.clone.default, x)
    window, before = call(aten.select.int, y, 0, 0), call(aten.exp.default, y)
    call(aten.mul_.Scalar, call(aten.slice.Tensor, y, 2, 0, 2), 5)
    return call(aten.exp.default, window), before, y


def between(call: Any, x: Any) -> Any:
    """A view that is read between two writes and again behind them."""
    y = call(aten.clone.default, x)
    window, found = call(aten.select.int, y, 0, 0), []
    for _ in range(2):
        call(aten.add_.Scalar, y, 1)
        found.append(call(aten.exp.default, window))
    return tuple(found)


def second_write(call: Any, x: Any) -> Any:
    """What an in-place operator returns is the same memory."""
    y = call(aten.clone.default, x)
    first = call(aten.add_.Scalar, y, 1)
    call(aten.mul_.Scalar, first, 3)
    call(aten.sub_.Scalar, y, 2)
    return y, first


def copies(call: Any, x: Any) -> Any:
    """A copy has memory of its own."""
    y = call(aten.clone.default, x)
    call(aten.add_.Scalar, call(aten.clone.default, y), 1)
    return y


def piece(call: Any, x: Any) -> Any:
    """The pieces of a split that is written to show it, once it is read again."""
    y = call(aten.clone.default, x)
    pieces = call(aten.split.Tensor, y, 2, -1)
    first = call(operator.getitem, pieces, 0)
    call(aten.mul_.Scalar, y, 7)
    return call(aten.exp.default, first), call(operator.getitem, pieces, 1)


def one_of_several(call: Any, x: Any) -> Any:
    """What `topk` returns is no view: a write to one output is seen there only."""
    top = call(aten.topk.default, x, 2)
    values = call(operator.getitem, top, 0)
    call(aten.mul_.Scalar, values, 7)
    return values, call(operator.getitem, top, 1), x


@pytest.mark.parametrize("make", [other_view, between, second_write, copies, piece, one_of_several])
def test_functionalize_shows_a_write_to_all_sharing_memory(make: Callable[..., Any]) -> None:
    graph = draft(make, x=X)
    expect_same(graph, functionalize(graph, [])[0], [X])


@pytest.mark.parametrize(
    "maybe",
    [
        pytest.param((aten.reshape.default, [12]), id="reshape"),
        pytest.param((aten.flatten.using_ints,), id="flatten"),
        pytest.param((aten.contiguous.default,), id="contiguous"),
        pytest.param((aten.to.dtype, torch.float64), id="to"),
        pytest.param((aten.type_as.default, torch.ones(1, dtype=torch.float64)), id="type_as"),
        pytest.param((aten.dropout.default, 0.5, False), id="dropout"),
    ],
)
@pytest.mark.parametrize("changed", ["value", "view"])
@pytest.mark.parametrize("before", [aten.clone.default, aten.t.default, None], ids=["plain", "strided", "f32"])
def test_functionalize_knows_when_a_reshape_copies(maybe: tuple[Any, ...], changed: str, before: Any) -> None:
    """Of a transposed value `reshape` is a copy, of another dtype `to` is: the other does not see what one is given."""

    def make(call: Any, x: Any) -> Any:
        value = call(aten.clone.default, x)
        value = call(aten.to.dtype, value, torch.float32) if before is None else call(before, value)
        view = call(maybe[0], value, *maybe[1:])
        call(aten.mul_.Scalar, value if changed == "value" else view, 3)
        return value, view

    graph = draft(make, x=some(3, 4))
    expect_same(graph, functionalize(graph, [])[0], [some(3, 4)])


HIDDEN = {
    "einsum": (aten.einsum.default, "abc->cab"),
    "meshgrid": (aten.meshgrid.indexing,),
    "cartesian": (aten.cartesian_prod.default,),
    "unsafe-split": (aten.unsafe_split.Tensor, 2),
    "unsafe-chunk": (aten.unsafe_chunk.default, 2, -1),
    "several": (aten.broadcast_tensors.default,),
}
"""Views that no schema tells of: with what is before the operand, or behind."""


def hidden_view(call: Any, name: str, x: Any) -> Any:
    target, *rest = HIDDEN[name]
    several = {"einsum": (*rest, [x]), "meshgrid": ([x],), "cartesian": ([x],), "several": ([x, x],)}
    view = call(target, *several.get(name, (x, *rest)), **({"indexing": "ij"} if name == "meshgrid" else {}))
    return view if name in ("einsum", "cartesian") else call(operator.getitem, view, 0)


@pytest.mark.parametrize("name", HIDDEN)
def test_functionalize_follows_views_that_schemas_hide(name: str) -> None:
    """It shows what is written to its base behind it, and nothing is written through it."""
    value = some(6) if name in ("meshgrid", "cartesian") else some(2, 3, 4)

    def base_written(call: Any, x: Any) -> Any:
        base = call(aten.mul.Tensor, x, 2.0)
        view = hidden_view(call, name, base)
        call(aten.add_.Scalar, base, 1)
        return call(aten.exp.default, view)

    def view_written(call: Any, x: Any) -> Any:
        base = call(aten.mul.Tensor, x, 2.0)
        call(aten.add_.Scalar, hidden_view(call, name, base), 1)
        return base

    graph = draft(base_written, x=value)
    expect_same(graph, functionalize(graph, [])[0], [value])
    with pytest.raises(Error, match="an in-place operator writes through"):
        functionalize(draft(view_written, x=value), [])


def detached(made: Any) -> Any:
    """Writes through `detach()` into what `made` computes of the input."""

    def make(call: Any, x: Any) -> Any:
        base = made(call, x)
        call(aten.copy_.default, call(aten.select.int, call(aten.detach.default, base), 0, 1), x)
        return base

    return make


PLAIN = {
    "zeros": lambda call, x: call(aten.zeros_like.default, call(aten.stack.default, [x, x])),
    "detached": lambda call, x: call(aten.detach.default, call(aten.stack.default, [x, x])),
    "compared": lambda call, x: call(aten.gt.Scalar, call(aten.stack.default, [x, x]), 0),
}


@pytest.mark.parametrize("name", PLAIN)
def test_writes_under_no_grad_have_no_gradient(name: str) -> None:
    """The base has the value that was written, and no gradient of it."""
    graph = draft(detached(PLAIN[name]), x=X)
    found, _ = functionalize(graph, [])
    expect_same(graph, found, [X])
    given = X.clone().requires_grad_()
    (result,) = run(found, [given])
    assert not result.requires_grad


def straight_through(call: Any, x: Any) -> tuple[Any, ...]:
    """What was chosen, with the gradient of a value that is written to it: `chosen = h.detach(); chosen += x - ...`."""
    chosen = call(aten.detach.default, call(aten.round.default, x))
    call(aten.add_.Tensor, chosen, call(aten.sub.Tensor, x, call(aten.detach.default, x)))
    part = call(aten.select.int, chosen, 0, 0)
    call(aten.mul_.Scalar, part, 3.0)
    return chosen, part


def test_a_detached_tensor_gets_the_written_value_s_gradient() -> None:
    given = X.clone().requires_grad_()
    for value in run(functionalize(draft(straight_through, x=X), [])[0], [given]):
        (found,) = torch.autograd.grad(value.sum(), given, retain_graph=True)
        expected = torch.tensor([3.0, 1.0] if value.shape == X.shape else [3.0, 0.0]).view(2, 1, 1)
        torch.testing.assert_close(found, expected.expand(X.shape).to(found.dtype))


def test_functionalize_refuses_a_second_write_behind_detach() -> None:
    """Its memory is written by another name, and the graph has its values without the gradient."""

    def make(call: Any, x: Any) -> tuple[Any, ...]:
        base = call(aten.round.default, x)
        chosen = call(aten.detach.default, base)
        call(aten.add_.Tensor, chosen, x)
        call(aten.mul_.Scalar, call(aten.detach.default, base), 2.0)
        return (chosen,)

    with pytest.raises(Error, match=r"written to a tensor behind `detach\(\)`, and its memory is written again"):
        functionalize(draft(make, x=X), [])


@pytest.mark.parametrize("name", ["value", "view", "assigned"])
def test_functionalize_refuses_no_grad_writes_where_gradients_flow(name: str) -> None:
    bases = {
        "value": lambda call, x: call(aten.stack.default, [x, x]),
        "view": lambda call, x: call(aten.view.default, call(aten.stack.default, [x, x]), [2, *X.shape]),
        "assigned": assigned,
    }
    assert message(lambda: functionalize(draft(detached(bases[name]), x=X), [])) == (
        "the model changes a tensor in place where autotp cannot follow: autograd does not see what is written under "
        "torch.no_grad or through detach(), and a gradient flows through that tensor\n"
        "  at       ?\n"
        "  try      compute a new tensor: `y = x + (new - x).detach()` has the new values and the gradient of x"
    )


def assigned(call: Any, x: Any) -> Any:
    """Zeros, a part of which was set to a value that a gradient flows through."""
    base = PLAIN["zeros"](call, x)
    call(aten.copy_.default, call(aten.select.int, base, 0, 0), x)
    return base


def test_functionalize_returns_last_values_of_changed_buffers() -> None:
    """A buffer's last value is returned behind the outputs, whatever was written to in between, and only if changed."""

    def make(call: Any, count: Any, mean: Any, x: Any) -> Any:
        call(aten.add_.Scalar, count, 1)
        call(aten.mul_.Tensor, call(aten.select.int, count, 0, 1), 2.0)
        return call(aten.mul.Tensor, x, mean)

    values = [some(2), some(4), X]
    graph = draft(make, count=values[0], mean=values[1], x=X)
    found, updated = functionalize(graph, ["mean", "count"])
    assert updated == ["count"]
    result, count = run(found, values)
    torch.testing.assert_close(result, X * values[1])
    expected = (values[0] + 1) * torch.tensor([1.0, 2.0])
    torch.testing.assert_close(count, expected)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        pytest.param(
            lambda call, x: call(aten.add_.Scalar, x, 1), "writes into an input or a parameter of the model", id="input"
        ),
        pytest.param(
            lambda call, x: call(aten.relu_.default, call(aten.view.default, x, [8])),
            "writes into an input or a parameter of the model",
            id="view-of-an-input",
        ),
        pytest.param(
            written((aten.unfold.default, 2, 2, 1)),
            "an in-place operator writes through `aten.unfold.default`",
            id="unfold",
        ),
        pytest.param(
            written(target=torch.ops.autotp_tests.add_.default, args=(2,)),
            "autotp_tests.add_.default has no form that returns a new tensor",
            id="no-functional-form",
        ),
    ],
)
def test_functionalize_refuses_writes_it_cannot_follow(make: Callable[..., Any], why: str) -> None:
    or_else = "" if "an input" in why else f"; or {OPERATOR}"  # Opaque code writes into no argument either.
    assert message(lambda: functionalize(draft(make, x=X), [])) == (
        f"the model changes a tensor in place where autotp cannot follow: {why}\n"
        "  at       ?\n"
        f"  try      write the new value to a new tensor{or_else}"
    )


def test_functionalize_makes_writable_inputs_new_values() -> None:
    graph = draft(lambda call, x: (call(aten.add_.Scalar, x, 1), x), x=X)
    found, updated = functionalize(graph, [], {"x"})
    assert lines(found) == ["add(x, 1)", "return add, add"]
    assert not updated
    expect_same(graph, found, [X])


class Picks(nn.Module):
    """Writes into a tensor, and reshapes rows whose number depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y = self.down(self.up(x).relu())
        first = torch.zeros_like(y)
        first[0] = 1.0
        rows = keep.nonzero().flatten()
        picked = y.index_select(0, rows).reshape(rows.shape[0] * 2, 3).exp()
        return (first + y).sum() + picked.sum()


def test_models_with_data_dependent_sizes_are_verified() -> None:
    """What a view shares is tried on sizes; those of values are made up, and need not fit each other."""
    given = torch.randn(5, 6), torch.tensor([1, 0, 1, 1, 0])
    assert autotp.verify(Picks(), 2, example_inputs=given).ok


class Fives(Picks):
    """Writes what it reads of groups of five numbers, in rows whose number depends on values."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y = self.down(self.up(x).relu())
        groups = y.index_select(0, keep.nonzero().flatten()).reshape(-1, 5)
        first = torch.zeros_like(y)
        first.detach()[0] = groups.sum(0)[0]
        return (first + y).sum() + groups.exp().sum()


def test_gradient_flows_through_data_dependent_multiples() -> None:
    given = torch.randn(7, 6), torch.tensor([1, 1, 1, 0, 1, 1, 0])
    assert autotp.verify(Fives(), 2, example_inputs=given).ok


class Codebook(nn.Module):
    """Moves its entries to the means of the nearest rows; an entry without rows takes a row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.register_buffer("entries", torch.randn(5, 12))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        nearest = (h @ self.entries.t()).argmax(-1)
        count = torch.bincount(nearest, minlength=5)
        sums = torch.zeros(5, 12).to(h).index_add(0, nearest, h)
        means = torch.where((count == 0)[:, None], h[:5], sums / count.clamp(min=1)[:, None])
        self.entries.data.copy_(means)
        return self.down(h + self.entries[nearest]).sum()


def test_gradient_flows_beside_a_count_of_another_length() -> None:
    """Whether a gradient flows through an operator is tried: counts of 5 entries are as long as a tensor of 5 rows."""
    assert autotp.verify(Codebook(), 2, example_inputs=torch.randn(8, 6)).ok
