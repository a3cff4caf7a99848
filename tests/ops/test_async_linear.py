"""async_linear: products of one input as one operator are those of each by itself, and so are gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Checks, Collectives
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.distributed import fake_pg

from autotp.ops.async_linear import async_linear, products
from autotp.ops.collectives import all_gather, copy, reduce
from autotp.sharding.partition import chunk_bounds

aten = torch.ops.aten
checks = Checks()


def world() -> str:
    return dist.group.WORLD.group_name  # type: ignore[union-attr]


CASES: dict[str, tuple[Any, Any, tuple[bool, ...], tuple[bool, ...]]] = {
    # gathered, flattened, turned, biases
    "copy": (None, None, (False, False), (True, False)),
    "copy-turned": (None, (0, 1), (True, False), (False, True)),
    "copy-empty": (None, None, (False, True), (True, True)),
    "copy-heads": (None, (2, 3), (False, True), (True, True)),
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
    if name == "copy-heads":  # What the products read has one dimension of two.
        x = x.unflatten(-1, (2, 2))
    if gathered is not None:
        start, stop = chunk_bounds(length // gathered[2], n, rank)
        x = x[:, start * gathered[2] : stop * gathered[2]].contiguous()
    torch.manual_seed(rank)
    out = 0 if name == "copy-empty" and rank == n - 1 else 3
    weights = [torch.randn((4, out) if turn else (out, 4), dtype=torch.float64) for turn in turned]
    biases = [torch.randn(out, dtype=torch.float64) if bias else None for bias in biased]

    def one(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        given = iter(rest[len(turned) :])
        return async_linear(
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
def async_linear_has_the_gradients_of_each_product(rank: int, n: int) -> None:
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


class Taken(torch.autograd.Function):
    """The identity, whose node takes over what backward does with its gradient: it notes it in `seen`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[str]) -> Tensor:
        ctx.products, ctx.seen = [], seen
        ctx.start_gradient = lambda grad, group, fresh: seen.append("sum") or reduce(grad, group)
        ctx.add_to_gradient = lambda a, b: ctx.products.append(a @ b)
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor, None]:
        if grad is None:
            ctx.seen.append("product")
        return sum(ctx.products) if grad is None else grad, None


@checks.on(2)
def async_linear_leaves_a_gradient_to_the_node_that_takes_it(rank: int, n: int) -> None:
    """The sum of the input's gradient, and the products of the weights' gradients; with the same numbers."""
    (one, each), given = drawn("copy", rank, n)
    found, seen = [], list[str]()
    for f, taken in ((each, False), (one, True)):
        leaves = [t.clone().requires_grad_() for t in given]
        operands = [Taken.apply(leaf, seen) for leaf in leaves[:3]] if taken else leaves[:3]
        found.append(torch.autograd.grad(scalar(f(*operands, *leaves[3:])), leaves))
    torch.testing.assert_close(*found)
    assert sorted(seen) == ["product", "product", "sum"]


def tied(rank: int) -> None:
    """The input is made of a weight: its second derivatives go both ways, and neither is counted twice."""
    torch.manual_seed(rank)
    found = []
    for f in (async_linear, lambda x, group, *rest: products(copy(x, group), rest[1], *rest[2:])):
        torch.manual_seed(0)
        w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        ys = f(torch.tanh(w), world(), None, None, (w,), (None,), (False,))
        first = torch.autograd.grad(scalar(ys), w, create_graph=True)
        found.append(torch.autograd.grad((first[0] ** 2).sum(), w))
    torch.testing.assert_close(*found)


@checks.on(2)
def async_linear_under_transforms(rank: int, n: int) -> None:
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
def async_linear_keeps_parts_and_sends_once_a_way(rank: int, n: int) -> None:
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
def async_linear_sums_while_weight_gradients_are_computed(rank: int, n: int) -> None:
    """The sum is under way before the first weight's gradient is computed, and awaited after the last."""
    (one, _), given = drawn("copy", rank, n)
    leaves, seen = [t.requires_grad_() for t in given], []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        keeps_no_tensor = True  # So sums may be in place, as without a mode.

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(op).split(".")[1])
            return op(*args, **(kwargs or {}))

    y = one(*leaves)
    with Seen():
        torch.autograd.backward(y, [torch.ones_like(t) for t in y])
    order = [name for name in seen if name in ("mm", "addmm_", "all_reduce_", "wait_tensor")]
    assert order == ["mm", "addmm_", "all_reduce_", "mm", "mm", "wait_tensor"], order


@checks.on(2)
def async_linear_compiled_has_the_same_gradients(rank: int, n: int) -> None:
    """In compiled code, too, of all and of some of the leaves."""
    for name in ("copy-turned", "copy-heads", "gather-flat"):
        torch._dynamo.reset()
        (one, _), given = drawn(name, rank, n)
        for frozen in (-1, 0):
            found = []
            for f in (one, torch.compile(one, fullgraph=True, backend="aot_eager", dynamic=False)):
                leaves = [t.clone().requires_grad_(i != frozen) for i, t in enumerate(given)]
                scalar(f(*leaves)).backward()
                found.append([leaf.grad for leaf in leaves])
            torch.testing.assert_close(*found, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


CALLS = re.compile(r"(?:extern_kernels\.(?:add)?|torch\.ops\._c10d_functional\.)(\w+?)_?(?:\.default)?\(")


@pytest.fixture
def sends_nothing() -> Iterator[str]:
    """The name of a group of two ranks whose collectives compiled code sees, as those of NCCL."""
    assert fake_pg  # It registers the backend.
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    yield world()
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Those of torch's compiler about torch.
def test_compiled_async_linear_waits_after_the_products(sends_nothing: str) -> None:
    """In the code that torch's compiler makes, the sum starts, weights get their gradients, and backward waits."""
    torch._dynamo.reset()
    x = torch.randn(6, 4, requires_grad=True)
    weights = [torch.randn(5, 4, requires_grad=True) for _ in range(2)]

    @torch.compile(fullgraph=True, dynamic=False)
    def step(x: Tensor, *weights: Tensor) -> Tensor:
        return scalar(async_linear(x, sends_nothing, None, None, weights, (None, None), (False, False)))

    _, codes = run_and_get_code(lambda: step(x, *weights).backward())
    lines = [line for line in codes[-1].partition("def call(")[2].splitlines() if not line.lstrip().startswith("#")]
    names = [name for line in lines for name in CALLS.findall(line)]
    assert names == ["mm", "mm", "all_reduce", "mm", "mm", "wait_tensor"], names
