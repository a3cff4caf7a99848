"""One call of a block whose kept values have fates: what goes on around it, and what goes wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from budgets.fates import CASES, GRAPH, operands, step
from ranks import Checks
from small_models import Mixture, gpt, tokens
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.errors import Error
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.passes.emit.kept_values.fates import Fates
from autotp.passes.emit.kept_values.recomputed import Recomputed

aten = torch.ops.aten
checks = Checks()
SOME = {name: CASES[name] for name in ("full", "scores", "between", "three ways", "alternately", "masks as seeds")}


@pytest.mark.parametrize("fates", SOME.values(), ids=SOME)
def test_fates_inside_of_hooks_of_others(fates: Fates) -> None:
    """What stays is handed to hooks around the call, in the same order in each call: torch's checkpoint counts them."""
    block = Recomputed(GRAPH, fates)

    def moved(*xs: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return block(*xs)

    def twice(*xs: Tensor) -> Any:
        return checkpoint(lambda *ys: block(block(*ys), *ys[1:]), *xs, use_reentrant=False)

    def expected(*xs: Tensor) -> Any:
        return GRAPH(GRAPH(*xs), *xs[1:])

    for _ in range(2):
        torch.testing.assert_close(step(moved, operands(2, 4, 8)), step(GRAPH, operands(2, 4, 8)), rtol=0, atol=0)
        torch.testing.assert_close(step(twice, operands(3, 4, 8)), step(expected, operands(3, 4, 8)), rtol=0, atol=0)


@pytest.mark.parametrize("fates", SOME.values(), ids=SOME)
def test_fates_in_the_autocast_of_forward(fates: Fates) -> None:
    """And the rest of backward has its own."""
    block = Recomputed(GRAPH, fates)
    for forward, backward in ((True, False), (False, True)) * 2:
        gradients = []
        for run in (GRAPH, block):
            xs = operands(2, 4, 8, dtype=torch.float32)
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16, enabled=forward):
                y = run(*xs)
            with torch.autocast("cpu", torch.bfloat16, enabled=backward):
                gradients.append(torch.autograd.grad(y.float().sum(), xs))
        torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_a_part_of_an_autocast_region_runs_in_it() -> None:
    """The nodes that enter and leave the region run with each part."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    region = graph.call_function(enter_autocast, ("cpu", torch.bfloat16, True, False))
    first = graph.call_function(aten.linear.default, (x, w), name="first")
    second = graph.call_function(aten.linear.default, (graph.call_function(torch.tanh, (first,)), w))
    graph.call_function(exit_autocast, (region,))
    graph.output(graph.call_function(torch.exp, (second,)))
    module = fx.GraphModule(nn.Module(), graph)
    block, gradients = Recomputed(module, {"first": "recompute", "tanh": "recompute"}), []
    for run in (module, block, block):
        xs = [x.detach().float().requires_grad_() for x in operands(2, 4, 8)[:2]]
        gradients.append(torch.autograd.grad(run(*xs).sum(), xs))
    torch.testing.assert_close(gradients[1:], gradients[:1] * 2, rtol=0, atol=0)


def test_an_exception_in_a_block_leaves_no_hooks() -> None:
    """In the first call and in a later one; the next call is right."""
    fails = [True]

    def fail(x: Tensor) -> Tensor:
        if fails[0]:
            raise ValueError("no")
        return x * 2

    graph = fx.Graph()
    y = graph.call_function(torch.tanh, (graph.call_function(torch.exp, (graph.placeholder("x"),)),))
    graph.output(graph.call_function(torch.sin, (graph.call_function(fail, (y,)),)))
    block = Recomputed(fx.GraphModule(nn.Module(), graph))
    x = torch.randn(3, requires_grad=True)
    for fails[0] in (True, False, True, False):
        if fails[0]:
            with pytest.raises(ValueError, match="no"):
                block(x)
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        else:
            torch.testing.assert_close(
                torch.autograd.grad(block(x).sum(), x), torch.autograd.grad((x.exp().tanh() * 2).sin().sum(), x)
            )


@pytest.mark.parametrize("later", [False, True])
def test_a_changed_value_is_an_error(later: bool) -> None:
    """Of a value that is held for a part, and of one that autograd keeps between dropped ones."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    held = graph.call_function(torch.exp, (x,), name="held")
    graph.output((graph.call_function(torch.sin, (graph.call_function(torch.tanh, (held,)),)), held))
    block = Recomputed(fx.GraphModule(nn.Module(), graph), {"tanh": "recompute"})
    x = torch.randn(3, requires_grad=True)
    for _ in range(1 + later):
        y, value = block(x)
    with torch.no_grad():
        value.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_another_number_of_tensors_is_an_error() -> None:
    """Than in the first call of the same sizes: the numbers would mean other tensors."""
    more = [False]

    def act(x: Tensor) -> Tensor:
        return x.exp().tanh() if more[0] else x.tanh()

    graph = fx.Graph()
    graph.output(graph.call_function(torch.sin, (graph.call_function(act, (graph.placeholder("x"),)),)))
    block, x = Recomputed(fx.GraphModule(nn.Module(), graph)), torch.randn(3, requires_grad=True)
    block(x)
    more[0] = True
    with pytest.raises(Error, match="keeps 3 tensors, and 2 when it ran first"):
        block(x)


def doubled_in_place(x: Tensor, fresh: bool) -> Tensor:
    """As a sum over ranks that overwrites its operand."""
    with torch.no_grad():
        x.mul_(2)
    return x


@pytest.mark.parametrize("names", [(), ("exp",), ("sin",), ("exp", "sin"), ("exp", "sin", "tanh")], ids=str)
def test_what_writes_in_place_runs_again_with_the_maker_of_the_memory(names: tuple[str, ...]) -> None:
    """And not without it: it would write twice."""
    graph = fx.Graph()
    written = graph.call_function(
        doubled_in_place, (graph.call_function(torch.neg, (graph.placeholder("x"),)),), {"fresh": True}
    )
    values = graph.call_function(torch.exp, (graph.call_function(torch.sin, (written,)),))
    graph.output(graph.call_function(torch.tanh, (values,)))
    module = fx.GraphModule(nn.Module(), graph)
    for more in ((), ("neg",)):
        block = Recomputed(module, dict.fromkeys((*names, *more), "recompute"))
        for _ in range(2):
            x = torch.randn(3, requires_grad=True)
            expected = torch.autograd.grad(module(x).sum(), x)
            torch.testing.assert_close(torch.autograd.grad(block(x).sum(), x), expected, rtol=0, atol=0)


def test_fates_under_transforms_keep_everything() -> None:
    """torch.func knows no fates."""
    xs = operands(2, 4, 8)
    results = []
    for run in (GRAPH, Recomputed(GRAPH, CASES["three ways"])):
        torch.manual_seed(1)
        results.append(torch.func.grad(lambda x, run=run: run(x, *xs[1:]).sum())(xs[0]))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["full", "scores", "between", "host"])
def test_fates_in_compiled_code(name: str) -> None:
    """Groups of operators run again there."""

    def smooth(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = aten.softmax.int(aten.gelu.default(aten.linear.default(x, w)), -1)
        return aten.linear.default(aten.sigmoid.default(y), v) + y

    module = fx.symbolic_trace(smooth)
    names = [node.name for node in module.graph.nodes if node.op == "call_function"]
    fates = {name: fate for name, fate in CASES[name].items() if name in names}
    block = Recomputed(module, None if name == "full" else fates)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled, operands(2, 4, 8)), step(module, operands(2, 4, 8)))


# ---- on ranks


WAYS = "recompute", "keep", "host", "bits", "recompute"


def mixed(start: int) -> Callable[[fx.Graph], Fates]:
    """Each operator of a block has another fate than the one before it; ranks with equal parts have the same graph."""

    def fates(graph: fx.Graph) -> Fates:
        names = [node.name for node in graph.nodes if node.op == "call_function"]
        return {name: WAYS[(i + start) % len(WAYS)] for i, name in enumerate(names)}  # type: ignore[misc]

    return fates


def expect_gradients_of_one_device(whole: nn.Module, n: int, batches: list[tuple[Any, ...]], **options: Any) -> None:
    """In several steps, of other sizes than at capture; with each kind of mixed fates, bit by bit those of "none"."""
    results = []
    for start in (None, 0, 1, 2, 3):
        with patch("autotp.passes.emit.kept_values.recompute.scores", mixed(start or 0)):
            how = "none" if start is None else "selective"
            cut: Any = autotp.parallelize(
                copy.deepcopy(whole), n, example_inputs=batches[0], randomness="exact", recompute=how, **options
            )
            torch.manual_seed(5)
            for batch in batches:
                cut(*batch).square().sum().backward()
        results.append([p.grad for p in cut.parameters()])
        torch.testing.assert_close(results[-1], results[0], rtol=0, atol=0)
    torch.manual_seed(5)
    for batch in batches:
        whole(*batch).square().sum().backward()
    state = dict(whole.named_parameters())
    torch.testing.assert_close(
        {name: p.grad for name, p in cut.named_parameters()}, {name: p.grad for name, p in state.items()},
        rtol=1e-10, atol=1e-10,
    )  # fmt: skip


@checks.on(2, 3)
def mixed_fates_have_the_gradients_of_one_device(rank: int, n: int) -> None:
    """With dropout; along the sequence as well, and with halves of a batch that take turns."""
    torch.manual_seed(0)
    batches = [tokens(*sizes) for sizes in ((2, 6), (2, 6), (4, 5), (2, 6))]
    for options in ({}, {"sequence_parallel": True}, {"overlap": "batch"}):
        whole = gpt(seed=0, n_head=6, n_embd=12, dropout=0.1 if "overlap" not in options else 0.0).double()
        expect_gradients_of_one_device(whole, n, batches, **options)


@checks.on(2)
def mixed_fates_of_experts_have_the_gradients_of_one_device(rank: int, n: int) -> None:
    """Grouped products, and indices that a router chooses."""
    torch.manual_seed(0)
    whole = Layers(Mixture(), Mixture()).double()
    batches = [(torch.randn(size, 8, dtype=torch.float64),) for size in (12, 7, 12)]
    expect_gradients_of_one_device(whole, n, batches)


class Layers(nn.Module):
    """Numbered modules, one after another."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.h = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens 8]"""
        for layer in self.h:
            x = layer(x)
        return x


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
