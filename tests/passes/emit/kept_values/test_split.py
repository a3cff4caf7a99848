"""Fates of kept values: gradients stay what they are, bit by bit, whatever happens with what backward needs."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from budgets.fates import CASES, GRAPH, every, operands, step
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.ops.random_state import random_state_of
from autotp.passes.emit.kept_values.fates import Fates, saved_by_node
from autotp.passes.emit.kept_values.recomputed import Recomputed

aten = torch.ops.aten


@pytest.mark.parametrize("fates", CASES.values(), ids=CASES)
def test_fates_leave_each_bit_of_the_gradients(fates: Fates) -> None:
    """In the first call of some sizes and in later ones, at other sizes, with a frozen parameter."""
    block = Recomputed(GRAPH, fates)
    for sizes, frozen in (
        ((2, 4, 8), False),
        ((2, 4, 8), False),
        ((3, 5, 8), False),
        ((2, 4, 8), True),
        ((3, 5, 8), False),
    ):
        xs = operands(*sizes, frozen=frozen)
        torch.testing.assert_close(step(block, xs), step(GRAPH, xs), rtol=0, atol=0)


@pytest.mark.parametrize("fates", CASES.values(), ids=CASES)
def test_fates_of_inputs_elsewhere_in_their_memory(fates: Fates) -> None:
    """Rows of a batch, parameters in one flat memory, and one tensor for two inputs in some of the calls."""
    block, batch, flat = Recomputed(GRAPH, fates), operands(6, 4, 8)[0].detach(), torch.randn(3, 8, 8).double()
    for i, (j, k) in enumerate(((0, 1), (2, 0), (1, 1), (1, 2))):
        x = batch[2 * (i % 3) :][:2]
        for values in ((x, flat[j], flat[k]), (x, flat[j].clone(), flat[k].clone())):
            xs = [value.detach().requires_grad_() for value in values]
            torch.testing.assert_close(step(block, xs), step(GRAPH, xs), rtol=0, atol=0)
    w = flat[1].clone().requires_grad_()
    for xs in (operands(2, 4, 8), [*operands(2, 4, 8)[:1], w, w], operands(2, 4, 8)):
        gradients = []
        for run in (block, GRAPH):
            torch.manual_seed(3)
            gradients.append(torch.autograd.grad(run(*xs).square().sum(), list(dict.fromkeys(xs))))
        torch.testing.assert_close(*gradients, rtol=0, atol=0)
    with torch.autograd.graph.save_on_cpu():
        y = block(batch[:2], *[x.detach().requires_grad_() for x in flat[:2]])
    y.sum().backward()


@pytest.mark.parametrize("fates", CASES.values(), ids=CASES)
def test_fates_have_a_second_backward_and_second_derivatives(fates: Fates) -> None:
    """Two runs of backward by one graph, one for some inputs only, and derivatives of gradients."""
    block, expected = Recomputed(GRAPH, fates), None
    for run in (GRAPH, block, block):
        xs = operands(2, 4, 8)
        torch.manual_seed(3)
        y = run(*xs).square().sum()
        first = torch.autograd.grad(y, xs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), xs, retain_graph=True)
        some = torch.autograd.grad(y, xs[2:], retain_graph=True)
        gradients = [*first, *second, *some, *torch.autograd.grad(y, xs)]
        expected = gradients if expected is None else expected
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)


# ---- what stays, and what runs again


class Watching(TorchDispatchMode):
    """Notes the memory that operators make, and counts the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.made: dict[int, tuple[StorageWeakRef, int, str]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[op.__name__] += 1
        result = op(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.made:
                storage = x.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), op.__name__
        return result

    def stays(self) -> int:
        """Bytes of what is still there. A clone on the CPU stands for memory of the host, as random states are."""
        sizes = [(size, name) for ref, size, name in self.made.values() if not ref.expired()]
        return sum(size for size, name in sizes if name != "clone.default" and size != STATE)


STATE = random_state_of(torch.device("cpu")).numel()


def stays(fates: Fates, later: bool) -> int:
    """Bytes that a call keeps for backward, in the first call of some sizes or in a later one."""
    block, xs = Recomputed(GRAPH, fates), operands(2, 4, 8)
    if later:
        block(*xs)
    with Watching() as watching:
        y = block(*xs)
    gc.collect()
    theirs = {x.untyped_storage()._cdata for x in (*xs, y)}
    watching.made = {memory: row for memory, row in watching.made.items() if memory not in theirs}
    return watching.stays()


@pytest.mark.parametrize("later", [False, True])
def test_fates_keep_only_what_they_say(later: bool) -> None:
    """Counted by hand, in float64; a value that two operators save is there once."""
    row, square, best = 2 * 4 * 8 * 8, 2 * 4 * 4 * 8, 2 * 4 * 5 * 8
    none = stays({}, later)
    assert stays(every("recompute"), later) == 0
    assert stays(every("host"), later) == 0
    # Softmax's result, the mask's noise, the condition of `masked_fill`, and the product of weights and noise.
    names = "matmul_default", "gt_scalar", "masked_fill_scalar", "softmax_int", "dropout_default"
    assert none - stays(dict.fromkeys(names, "recompute"), later) == 3 * square + square // 8
    # `masked` is no tensor that autograd keeps. But where softmax runs again, it is held.
    assert none - stays({"softmax_int": "recompute"}, later) == 0
    assert none - stays(every("bits", "gt"), later) == square // 8 - square // 64
    assert none - stays(every("bits", "topk"), later) == best // 2
    # The noise of the two that are not fast, and the mask of one byte an element of the one that is.
    assert none - stays(every("bits", "dropout", "fast"), later) == square + best + row // 8


def test_backward_runs_a_part_when_it_is_asked_for_and_nothing_for_nobody() -> None:
    """`gelu` and `sigmoid` have nothing in common; the products are not made again, and of the second dropout nothing.

    A backward for the last operators only runs one of the parts.
    """
    block, xs = Recomputed(GRAPH, every("recompute", "gelu", "sigmoid", "dropout_default_1")), operands(2, 4, 8)
    block(*xs)
    with Watching() as watching:
        y = block(*xs)
        forward = Counter(watching.counts)
        y.sum().backward()
    again = watching.counts - forward
    assert again["gelu.default"] == 0 and again["sigmoid.default"] == 1 and forward["sigmoid.default"] == 1
    assert again["bernoulli_.float"] == 1 and again["native_dropout.default"] == 0
    whole = Recomputed(GRAPH)
    whole(*xs)
    with Watching() as watching:
        y = whole(*xs)
        forward = Counter(watching.counts)
        y.sum().backward()
    again = watching.counts - forward
    assert again["gelu.default"] == 1 and again["gather.default"] == 1 and again["narrow.default"] == 0


def test_fates_free_everything_after_backward_and_without_one() -> None:
    """Without the garbage collector: a cycle through autograd's memory would stay for ever."""
    gc.disable()
    try:
        for fates in CASES.values():
            block = Recomputed(GRAPH, fates)
            for runs_backward in (False, True, False, True):
                xs = operands(2, 4, 8)
                middle = xs[0] * 2
                with Watching() as watching:
                    y = block(middle, *xs[1:])
                if runs_backward:
                    y.sum().backward()
                refs = [weakref.ref(middle), weakref.ref(y)]
                del middle, y
                assert [ref() for ref in refs] == [None, None]
                alive = [row for row in watching.made.values() if not row[0].expired() and row[2] != "t.default"]
                assert alive == []
    finally:
        gc.enable()


# ---- what autograd saves


def block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """x: [n s 8], w: [8 8], v: [8 8] -> [n s 8]"""
    hidden = aten.gelu(aten.linear(x, w)).flatten(0, 1)
    weights = aten.softmax(aten.dropout(hidden, 0.5, True), -1)
    return aten.linear(weights, v).unflatten(0, x.shape[:2])


@pytest.mark.parametrize("device", ["cpu", "meta", "fake"])
def test_saved_by_node_names_the_maker_of_each_memory(device: str) -> None:
    """Through views; softmax saves its own output, and dropout a mask that is nobody's output."""
    with FakeTensorMode() if device == "fake" else torch.device(device):
        xs = [torch.randn(*shape, requires_grad=True) for shape in ((2, 3, 8), (8, 8), (8, 8))]
        saved = saved_by_node(fx.symbolic_trace(block), xs)
    assert [(x.node, x.origin, x.bytes) for x in saved] == [
        ("linear", "w", 256), ("linear", "x", 192), ("gelu", "linear", 192), ("dropout", None, 192),
        ("softmax", "softmax", 192), ("linear_1", "v", 256), ("linear_1", "softmax", 192),
    ]  # fmt: skip
    assert len({x.memory for x in saved}) == 6 and [x.index for x in saved] == list(range(7))
    assert [x.fate({"dropout": "bits", "softmax": "host"}) for x in saved] == [
        "keep", "keep", "keep", "bits", "host", "keep", "host"
    ]  # fmt: skip
