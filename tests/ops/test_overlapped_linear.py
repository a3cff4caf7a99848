"""columns: the products of one input as one operator give what each by itself gives, however it is differentiated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import draft, lines
from ranks import Checks, Collectives
from torch import Tensor, fx

from autotp.ops.collectives import all_gather, copy, reduce
from autotp.ops.overlapped_linear import columns, products
from autotp.passes.lower.overlap import overlap, separate
from autotp.sharding.partition import chunk_bounds

aten = torch.ops.aten
checks = Checks()

# ---- the pass


def of(make: Any, **shapes: tuple[int, ...]) -> fx.Graph:
    return draft(make, **{name: torch.ones(shape) for name, shape in shapes.items()})


SHAPES: dict[str, tuple[int, ...]] = {"x": (2, 3, 4), "w": (6, 4), "v": (5, 4), "b": (6,)}


def pair(call: Any, x: Any, w: Any, v: Any, b: Any) -> Any:
    c = call(copy, x, "tp")
    return call(aten.linear.default, c, w, b), call(aten.linear.default, c, call(aten.mul.Tensor, v, 2))


def test_products_of_one_copy_are_one_operator() -> None:
    """A weight that is computed between them stands before."""
    graph = of(pair, **SHAPES)
    assert lines(overlap(graph)) == [
        "mul(v, 2)",
        "columns(x, 'tp', None, None, [w, mul], [b, None], [False, False])",
        "getitem(columns, 0)",
        "getitem_1 = getitem(columns, 1)",
        "return getitem, getitem_1",
    ]
    assert sorted(lines(separate(overlap(graph)))[:-1]) == sorted(lines(graph)[:-1])


def flattened(call: Any, x: Any, w: Any, v: Any, b: Any) -> Any:
    f = call(aten.flatten.using_ints, call(all_gather, x, "tp", 1, 3), 0, 1)
    return call(aten.addmm.default, b, f, call(aten.t.default, w)), call(aten.mm.default, f, call(aten.t.default, v))


def test_turned_weights_behind_a_flattening() -> None:
    graph = of(flattened, **SHAPES)
    assert "columns(x, 'tp', [1, 3, 1], [0, 1], [t, t_1], [b, None], [True, True])" in lines(overlap(graph))
    assert sorted(lines(separate(overlap(graph)))[:-1]) == sorted(lines(graph)[:-1])


def others(call: Any, x: Any, w: Any, v: Any, b: Any) -> Any:
    c = call(copy, x, "tp")
    return call(aten.linear.default, c, w), call(aten.relu.default, c)


def chained(call: Any, x: Any, w: Any, v: Any, b: Any) -> Any:
    c = call(copy, x, "tp")
    first = call(aten.linear.default, c, call(aten.slice.Tensor, w, 0, 0, 4))
    return call(aten.linear.default, c, call(aten.sum.dim_IntList, first, [0])), first


def sums(call: Any, x: Any, w: Any, v: Any, b: Any) -> Any:
    return call(aten.linear.default, call(reduce, x, "tp"), w), b


def test_complex_products_stay() -> None:
    """Their gradients are conjugated, which the operator does not do."""
    given = {name: torch.ones(shape, dtype=torch.complex64) for name, shape in SHAPES.items()}
    graph = draft(pair, **given)
    assert lines(overlap(graph)) == lines(graph)


@pytest.mark.parametrize("make", [others, chained, sums], ids=lambda make: make.__name__)
def test_what_is_no_group_stays(make: Any) -> None:
    """Something else reads the copy; a weight is made of another product; no copy."""
    graph = of(make, **SHAPES)
    assert lines(overlap(graph)) == lines(graph)


# ---- the operator


def world() -> str:
    return dist.group.WORLD.group_name  # type: ignore[union-attr]


CASES: dict[str, tuple[Any, Any, tuple[bool, ...], tuple[bool, ...]]] = {
    # gathered, flattened, turned, biases
    "copy": (None, None, (False, False), (True, False)),
    "copy-turned": (None, (0, 1), (True, False), (False, True)),
    "copy-empty": (None, None, (False, True), (True, True)),
    "gather": ((1, 5, 1), None, (False, True), (True, True)),
    "gather-flat": ((1, 5, 1), (0, 1), (True, True), (True, False)),
    "gather-blocks": ((1, 10, 2), None, (False,), (False,)),
}


def drawn(name: str, rank: int, n: int) -> tuple[Any, list[Tensor]]:
    """A function of the input, the weights and the biases, and these; the weights differ from rank to rank."""
    gathered, flat, turned, biased = CASES[name]
    torch.manual_seed(0)
    length = 5 if gathered is None else gathered[1]
    x = torch.randn(2, length, 4, dtype=torch.float64)
    if gathered is not None:
        start, stop = chunk_bounds(length // gathered[2], n, rank)
        x = x[:, start * gathered[2] : stop * gathered[2]].contiguous()
    torch.manual_seed(rank)
    out = 0 if name == "copy-empty" and rank == n - 1 else 3
    weights = [torch.randn((4, out) if turn else (out, 4), dtype=torch.float64) for turn in turned]
    biases = [torch.randn(out, dtype=torch.float64) if bias else None for bias in biased]

    def one(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        given = iter(rest[len(turned) :])
        return columns(
            x, world(), gathered, flat, rest[: len(turned)], [next(given) if b else None for b in biased], turned
        )

    def each(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        given = iter(rest[len(turned) :])
        read = copy(x, world()) if gathered is None else all_gather(x, world(), *gathered)
        return products(read, flat, rest[: len(turned)], [next(given) if b else None for b in biased], turned)

    return (one, each), [x, *weights, *(b for b in biases if b is not None)]


def scalar(ys: Any) -> Tensor:
    return sum(((i + 1) * y**3).sum() for i, y in enumerate(ys))  # type: ignore[return-value]


@checks.on(2, 3)
def gradients(rank: int, n: int) -> None:
    """All of them, some of them, of some of the products, twice, and second derivatives."""
    same = torch.testing.assert_close
    for name in CASES:
        functions, given = drawn(name, rank, n)
        for frozen in (-1, 0, 1, len(given) - 1):
            found = []
            for f in functions:
                leaves = [t.clone().requires_grad_(i != frozen) for i, t in enumerate(given)]
                ys = f(*leaves)
                scalar(ys).backward(retain_graph=True)
                scalar(ys[-1:]).backward()
                found.append([leaf.grad for leaf in leaves])
            same(*found)
        again = []
        for f in functions:
            leaves = [t.clone().requires_grad_() for t in given]
            first = torch.autograd.grad(scalar(f(*leaves)), leaves, create_graph=True)
            again.append(torch.autograd.grad(sum((g**2).sum() for g in first), leaves))
        same(*again)
    tied(rank)


def tied(rank: int) -> None:
    """The input is made of a weight: its second derivatives go both ways, and neither is counted twice."""
    torch.manual_seed(rank)
    found = []
    for f in (columns, lambda x, group, *rest: products(copy(x, group), rest[1], *rest[2:])):
        torch.manual_seed(0)
        w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        ys = f(torch.tanh(w), world(), None, None, (w,), (None,), (False,))
        first = torch.autograd.grad(scalar(ys), w, create_graph=True)
        found.append(torch.autograd.grad((first[0] ** 2).sum(), w))
    torch.testing.assert_close(*found)


@checks.on(2)
def transforms(rank: int, n: int) -> None:
    """torch.func, its maps, forward mode, no_grad: what each product by itself gives."""
    for name in ("copy", "gather"):
        (one, each), given = drawn(name, rank, n)
        for run in (_gradient, _forward, _mapped):
            torch.testing.assert_close(run(one, given), run(each, given))
        with torch.no_grad():
            torch.testing.assert_close(one(*given), each(*given))


def _gradient(f: Any, given: list[Tensor]) -> Any:
    return torch.func.grad(lambda *a: scalar(f(*a)), argnums=(0, 1))(*given)


def _forward(f: Any, given: list[Tensor]) -> Any:
    return torch.func.jvp(f, tuple(given), tuple(given))[1]


def _mapped(f: Any, given: list[Tensor]) -> Any:
    return torch.func.vmap(f, (0, *[None] * (len(given) - 1)))(torch.stack([given[0]] * 2), *given[1:])


@checks.on(2)
def what_is_kept_and_sent(rank: int, n: int) -> None:
    """The part is kept, not the whole; one collective a way, and one to gather again."""
    (one, _), given = drawn("gather", rank, n)
    leaves = [t.requires_grad_() for t in given]
    kept: list[Tensor] = []
    with Collectives() as sent:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            ys = one(*leaves)
        assert {tuple(t.shape) for t in kept} == {tuple(t.shape) for t in leaves[:3]}
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    assert sent.counts == {"all-gather-into-tensor": 2, "all-reduce": 1}, sent.counts  # gloo's reduce-scatter


@checks.on(2)
def it_overlaps(rank: int, n: int) -> None:
    """The sum is under way before the first weight's gradient is computed, and awaited after the last."""
    (one, _), given = drawn("copy", rank, n)
    leaves, seen = [t.requires_grad_() for t in given], []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(op).split(".")[1])
            return op(*args, **(kwargs or {}))

    y = one(*leaves)
    with Seen():
        torch.autograd.backward(y, [torch.ones_like(t) for t in y])
    order = [name for name in seen if name in ("mm", "addmm_", "all_reduce_", "wait_tensor")]
    assert order == ["mm", "addmm_", "all_reduce_", "mm", "mm", "wait_tensor"], order


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
